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
    assert split.stdout.count("bigbatch: batch 30 in 8 samples") == 1  # silent if asked
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


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "nowhere.py", "--microbatch-size", "8"],
        ["run", "nowhere.py"],
        ["run", "nowhere.py", "--microbatch-size", "8", "--accumulation-steps", "2"],
        ["run", "nowhere.py", "--microbatch-size", "eight"],
    ],
)
def test_what_cannot_be_run(arguments, capsys):
    from bigbatch.cli import main

    try:
        code = main(arguments)
    except SystemExit as leave:  # argparse
        code = leave.code
    assert code == 2
    assert capsys.readouterr().err
