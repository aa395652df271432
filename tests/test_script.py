"""`bigbatch run`: a script as it is, with every `fit` accumulated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os
import sys
os.environ["SET_BEFORE_KERAS"] = str("keras" in sys.modules)
import tensorflow as tf  # which looks for Keras
import keras
import numpy as np

def annotated(a: int): pass
assert annotated.__annotations__ == {"a": int}

class Own(keras.Sequential):
    fits = 0
    def fit(self, *args, **kwargs):
        self.fits += 1
        return super().fit(*args, **kwargs)

keras.utils.set_random_seed(0)
model = Own([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("adam", "mse")
x = np.random.default_rng(0).normal(size=(60, 4))
options = dict(batch_size=int(sys.argv[1]), shuffle=False, verbose=0)
model.fit(x, x[:, :1], epochs=2, **options)
model.fit(x, x[:, :1], **{**options, "verbose": 2})
assert os.environ["SET_BEFORE_KERAS"] == "False"
print(__name__, __file__, model.fits, int(model.optimizer.iterations))
print("weights", *model.get_weights()[0].ravel())
if len(sys.argv) > 2:
    def broken():
        raise KeyError("mine")
    keras.layers.Lambda(lambda x: x)
    class Bad(keras.callbacks.Callback):
        def on_epoch_end(self, *_):
            broken()
    model.fit(x, x[:, :1], callbacks=[Bad()], **options)
"""


def run(directory, *command):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    (directory / "train.py").write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def weights_of(result):
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("weights")]
    return [float(number) for number in line.split()[1:]]


@pytest.mark.slow
def test_a_script_runs_as_it_is(tmp_path):
    plain = run(tmp_path, "train.py", "30")
    options = ["-m", "bigbatch.cli", "run", "train.py"]
    split = run(tmp_path, *options, "--microbatch-size", "8", "--", "30")
    window = run(tmp_path, *options, "--accumulation-steps", "5", "--", "6")
    for result in (plain, split, window):
        assert result.returncode == 0, result.stderr
        assert f"__main__ {tmp_path / 'train.py'} 2 6" in result.stdout
    for result in (split, window):
        assert weights_of(result) == pytest.approx(weights_of(plain), abs=5e-6)
    assert (
        split.stdout.count("bigbatch: batch 30 = 4 micro-batches of up to 8 samples") == 1
    )  # silent if asked
    assert "bigbatch: " not in plain.stdout


@pytest.mark.slow
def test_an_error_looks_like_that_of_the_script(tmp_path):
    options = ["-m", "bigbatch.cli", "run", "train.py", "--microbatch-size", "8"]
    result = run(tmp_path, *options, "--", "30", "fail")
    assert result.returncode == 1
    assert "KeyError: 'mine'" in result.stderr
    lines = result.stderr.splitlines()
    assert lines[lines.index("Traceback (most recent call last):") + 1].startswith(
        f'  File "{tmp_path / "train.py"}", line'
    )
    assert str(Path("bigbatch", "keras")) not in result.stderr


def test_exit_codes_of_a_script(tmp_path, capsys):
    from bigbatch.cli import main

    for text, code, printed in (
        ("import sys; sys.exit(3)", 3, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit('no data')", 1, "no data\n"),
        ("import sys; print(sys.argv[1:])", 0, "bigbatch: the script has not called fit()"),
        ("raise KeyboardInterrupt", 130, None),
        ("1 +", 1, None),
    ):
        script = tmp_path / "exits.py"
        script.write_text(text)
        before = list(sys.argv), list(sys.path), sys.modules["__main__"], list(sys.meta_path)
        arguments = ["run", str(script), "--microbatch-size", "8", "--", "a", "--b"]
        assert main(arguments) == code, text
        assert before == (sys.argv, sys.path, sys.modules["__main__"], sys.meta_path)
        out, err = capsys.readouterr()
        assert printed is None or err.startswith(printed)
        assert err == "" or printed != ""
        assert out in ("", "['a', '--b']\n")


def exit_code(*arguments):
    from bigbatch.cli import main

    try:
        return main(arguments)
    except SystemExit as leave:  # argparse
        return leave.code


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--microbatch-size", "8"], "nowhere.py"),
        ([], "--microbatch-size"),
        (["--microbatch-size", "8", "--accumulation-steps", "2"], "not allowed with"),
        (["--microbatch-size", "eight"], "'eight' is not a positive integer"),
        (["--microbatch-size", "0"], "'0' is not a positive integer"),
        (["--accumulation-steps", "-3"], "'-3' is not a positive integer"),
        (["--accumulation-steps", "auto"], "'auto' is not a positive integer"),
        (["--microbatch-size", "8", "--batch-norm", "synced"], "'synced'"),
        (["--microbatch-size", "8", "-m", "package.module"], "not allowed with"),
    ],
)
def test_what_cannot_be_run(arguments, said, capsys):
    assert exit_code("run", "nowhere.py", *arguments) == 2
    assert said in capsys.readouterr().err


def test_bad_values_are_refused_before_the_script_starts(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("print('started')")
    for bad in (["--microbatch-size", "0"], ["--microbatch-size", "8", "--batch-norm", "no"]):
        assert exit_code("run", str(script), *bad) == 2
    assert "started" not in capsys.readouterr().out
    assert exit_code("run", str(script), "--microbatch-size", "Auto") == 0
    assert "started" in capsys.readouterr().out


def test_modes_of_batch_normalisation_are_those_of_the_engine():
    from bigbatch.cli import _BATCH_NORM
    from bigbatch.engine.batch_norm import MODES

    assert _BATCH_NORM == MODES


def test_arguments_of_the_script_without_dashes_get_a_hint(tmp_path, capsys):
    """The command in the hint is one that runs the script."""
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.argv[1:])")
    command = ["run", str(script), "--microbatch-size", "8", "--epochs", "10", "data.csv"]
    assert exit_code(*command) == 2
    hint = capsys.readouterr().err.splitlines()[-1]
    assert "arguments of the script come after --: bigbatch run" in hint
    followed = hint.split("come after --: bigbatch ")[1].split()
    assert exit_code(*followed) == 0
    assert capsys.readouterr().out == "['--epochs', '10', 'data.csv']\n"
    assert exit_code("plan", "train:make", "--batch-size", "8", "--no") == 2
    assert "come after --" not in capsys.readouterr().err


MODULE = """
import sys
from package.values import VALUE
from . import values
print(__name__, __package__, __spec__.name, VALUE, values.VALUE, sys.argv[1:])
sys.exit(4)
"""


def test_a_module_runs_as_with_python_m(tmp_path, monkeypatch, capsys):
    package = tmp_path / "package"
    package.mkdir()
    for name, text in (
        ("__init__", ""),
        ("values", "VALUE = 7"),
        ("train", MODULE),
        ("__main__", MODULE),
        ("broken", "1 / 0"),
    ):
        (package / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    options = ["--microbatch-size", "8", "--", "a"]
    for name, runs in (("package.train", "train"), ("package", "__main__")):
        assert exit_code("run", "-m", name, *options) == 4
        out = capsys.readouterr().out
        assert out == f"__main__ package package.{runs} 7 7 ['a']\n"
        plain = run(tmp_path, "-m", name, "a")
        assert (plain.returncode, plain.stdout) == (4, out)
    assert exit_code("run", "-m", "package.broken", *options) == 1
    error = capsys.readouterr().err.splitlines()
    assert error[1].strip().startswith(f'File "{package / "broken.py"}", line 1')
    for name in ("package.nothing", "nothing", "package.values.nothing"):
        assert exit_code("run", "-m", name, *options) == 2
        assert "Fix: bigbatch run -m package.module" in capsys.readouterr().err
    for name in [name for name in sys.modules if name.split(".")[0] == "package"]:
        del sys.modules[name]


def test_the_version_and_help(capsys):
    import bigbatch

    assert exit_code("--version") == 0
    assert capsys.readouterr().out == f"bigbatch {bigbatch.__version__}\n"
    assert exit_code() == 0
    assert "bigbatch run train.py --microbatch-size auto" in capsys.readouterr().out


NOISY = """
import os, sys
os.write(2, b"noise of C code\\n")
print("noise of Python", file=sys.stderr)
if os.environ.get("FAIL"):
    raise ImportError("broken")
"""
QUIETLY = """
import sys
from bigbatch.core.quiet import quiet_import

with quiet_import("noisy"):
    import noisy
    import noisy
print("said", file=sys.stderr)
assert noisy.__name__ == "noisy"
assert not any(type(one).__name__ == "_Finder" for one in sys.meta_path)
"""


@pytest.mark.parametrize("fails", [False, True])
def test_the_import_of_a_framework_is_silent_unless_it_fails(tmp_path, fails):
    (tmp_path / "noisy.py").write_text(NOISY)
    (tmp_path / "main.py").write_text(QUIETLY)
    environment = {**os.environ, "FAIL": "1" if fails else ""}
    done = subprocess.run(
        [sys.executable, "main.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ("noise of C code" in done.stderr) is ("noise of Python" in done.stderr) is fails
    assert ("said" in done.stderr) is not fails
    assert ("ImportError: broken" in done.stderr) is fails
    assert done.returncode == int(fails)
