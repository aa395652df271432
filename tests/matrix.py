"""The contract tests on every supported TensorFlow, each in an environment of its own.

`make matrix` runs all rows, `make matrix ROWS="tf2.10 tf2.15"` some. Environments are kept in
`build/matrix`. What passed, and on which commit, is written to `tests/matrix.json`, and from
there to the page `docs/versions.md`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
HOME = ROOT / "build" / "matrix"
RESULTS = ROOT / "tests" / "matrix.json"
PAGE = ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- versions: written by make matrix -->", "<!-- versions end -->"

LOOPS = (
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/contract/test_*.py")),
    "tests/test_bad_input.py",
    "tests/test_compat_tf.py",
)
FIT = ("tests/contract/fit",)
FIT_2 = (*FIT, "tests/test_compat_keras2.py")
OLD = ("-W", "ignore")
"""Old versions warn of newer ones of their dependencies: no error there."""


@dataclass(frozen=True)
class Row:
    """An environment, and the tests that apply in it."""

    name: str
    python: str
    packages: tuple[str, ...]
    keras: str
    """As in `tests/stack.py`."""
    loops: tuple[str, ...] = LOOPS
    fit: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


ROWS = [
    Row(
        "tf1.14",
        "3.7",
        ("tensorflow==1.14.0", "protobuf<4", "numpy<1.20", "h5py<3"),
        "tf.keras",
        loops=("tests/test_eager1.py",),
        # The other tests' conftest.py is for TensorFlow 2.
        options=(*OLD, "--noconftest"),
    ),
    Row(
        "tf2.10",
        "3.10",
        ("tensorflow-cpu==2.10.*", "numpy<2"),
        "tf.keras",
        fit=FIT_2,
        options=OLD,
    ),
    Row("tf2.13", "3.11", ("tensorflow-cpu==2.13.*",), "tf.keras", fit=FIT_2, options=OLD),
    Row("tf2.15", "3.11", ("tensorflow-cpu==2.15.*",), "tf.keras", fit=FIT_2, options=OLD),
    # Before 3.10 metrics of Keras 3 cannot be updated in a loop on replicas.
    Row(
        "tf2.16",
        "3.11",
        ("tensorflow-cpu==2.16.*", "keras==3.10.0"),
        "keras",
        fit=FIT,
        options=OLD,
    ),
    Row("newest", "3.11", ("tensorflow-cpu==2.21.*", "keras"), "keras", fit=FIT),
    Row("python3.12", "3.12", ("tensorflow-cpu", "keras"), "keras", fit=FIT),
    Row(
        "python3.13",
        "3.13",
        ("tensorflow-cpu", "keras"),
        "keras",
        fit=FIT,
        # AutoGraph makes syntax trees in a way that Python 3.13 deprecates.
        options=("-W", "ignore::DeprecationWarning"),
    ),
    Row("tf_keras", "3.11", ("tensorflow", "tf_keras"), "tf_keras", fit=FIT_2, options=OLD),
]


def find_python(version: str) -> str | None:
    """Return an interpreter of this version that starts: on the PATH, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = sorted(map(str, pyenv.glob(f"versions/{version}.*/bin/python")))
    for path in filter(None, [shutil.which(f"python{version}"), *found]):
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        if f" {version}." in done.stdout:
            return path
    return None


def run(*command: str, **environment: str) -> int:
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, check=False
    ).returncode


def environment_of(row: Row, interpreter: str, wheel: Path) -> str | None:
    """Return the Python of a row's environment; `None` if it cannot be made."""
    home = HOME / row.name
    python = str(home / "bin" / "python")
    packages = [*row.packages, "tensorboard", "pytest", "pytest-xdist", "hypothesis"]
    note = home / "packages.txt"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if not note.exists() or note.read_text() != "\n".join(packages):
        print(f"== {row.name}: setting up {' '.join(packages)}", flush=True)
        if run(interpreter, "-m", "venv", "--clear", str(home)) or run(*install, *packages):
            return None
        note.write_text("\n".join(packages))
    if run(*install, str(wheel)) or run(*install, "--no-deps", "--force-reinstall", str(wheel)):
        return None
    return python


def versions_of(row: Row, python: str) -> dict[str, str]:
    """Return the versions a row really has."""
    program = (
        "import json, platform, stack; "
        "versions = [platform.python_version(), stack.tf.__version__, stack.VERSION]; "
        "print(json.dumps(versions))"
    )
    done = subprocess.run(
        [python, "-c", program],
        capture_output=True,
        env={**os.environ, "BIGBATCH_KERAS": row.keras, "PYTHONPATH": str(ROOT / "tests")},
        text=True,
        check=True,
    )
    versions = json.loads(done.stdout.splitlines()[-1])
    versions[-1] = f"{row.keras} {versions[-1]}"
    return dict(zip(("python", "tensorflow", "keras"), versions))


def passed(row: Row, python: str, paths: tuple[str, ...]) -> bool:
    """Run the tests of a row; say whether they passed."""
    command = [python, "-m", "pytest", "-q", "-n", "2", "-m", "not matrix", *row.options]
    print(f"== {row.name}: {' '.join((*command[1:], *paths))}", flush=True)
    return run(*command, *paths, BIGBATCH_KERAS=row.keras, TF_CPP_MIN_LOG_LEVEL="3") == 0


def git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def current_commit() -> str:
    """Return the commit that is checked out, and whether files differ from it.

    The results of other rows do not count: they are written while the matrix runs.
    """
    written = [f":!{path.relative_to(ROOT)}" for path in (RESULTS, PAGE)]
    is_changed = bool(git("status", "--porcelain", "--", ".", *written).strip())
    return git("rev-parse", "HEAD")[:7] + ("+changes" if is_changed else "")


def build_wheel() -> Path:
    target = HOME / "wheel"
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    subprocess.run(command, cwd=ROOT, check=True)
    (wheel,) = target.glob("*.whl")
    return wheel


def run_row(row: Row, wheel: Path, commit: str) -> tuple[str, dict[str, Any] | None]:
    """Return how a row ended, and what there is to note of it."""
    interpreter = find_python(row.python)
    if interpreter is None:
        return f"SKIPPED: there is no Python {row.python}, on the PATH or by pyenv", None
    python = environment_of(row, interpreter, wheel)
    if python is None:
        return "FAILED: the environment could not be made", None
    outcome: dict[str, Any] = versions_of(row, python)
    for name, paths in (("loops", row.loops), ("fit", row.fit)):
        outcome[name] = passed(row, python, paths) if paths else None
    outcome["commit"] = commit
    failed = [name for name in ("loops", "fit") if outcome[name] is False]
    return f"FAILED: {' and '.join(failed)}" if failed else "passed", outcome


def table(results: dict[str, Any]) -> str:
    """Return the table of supported versions."""
    cells = {True: "yes", False: "**fails**", None: "no"}
    lines = [
        "| Python | TensorFlow | Keras | custom loops | `fit` | commit |",
        "|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        noted = results.get(row.name)
        if noted is not None:
            versions = [noted[name] for name in ("python", "tensorflow", "keras")]
            marks = [cells[noted[name]] for name in ("loops", "fit")]
            lines.append(f"| {' | '.join([*versions, *marks, noted['commit']])} |")
    return "\n".join(lines)


def with_table(page: str, results: dict[str, Any]) -> str:
    """Return the page with the table of these results."""
    pattern = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}\n\n{table(results)}\n\n{END}", page)


def main(names: list[str]) -> int:
    unknown = set(names) - {row.name for row in ROWS}
    if unknown:
        print(f"No such row: {', '.join(unknown)}. There are {[row.name for row in ROWS]}.")
        return 2
    wheel, commit = build_wheel(), current_commit()
    ends = {}
    for row in ROWS:
        if names and row.name not in names:
            continue
        ends[row.name], outcome = run_row(row, wheel, commit)
        print(f"== {row.name}: {ends[row.name]}", flush=True)
        if outcome is not None:
            noted = {**json.loads(RESULTS.read_text()), row.name: outcome}
            results = {one.name: noted[one.name] for one in ROWS if one.name in noted}
            RESULTS.write_text(json.dumps(results, indent=2) + "\n")
            PAGE.write_text(with_table(PAGE.read_text(), results))
    print("== Matrix")
    for name, end in ends.items():
        print(f"{name:12} {end}")
    return int(any(end.startswith("FAILED") for end in ends.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
