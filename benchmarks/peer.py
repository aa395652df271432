"""gradient-accumulator 0.5.2, in a virtual environment of its own with its old TensorFlow.

    python -m benchmarks.peer script.py

runs a script there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks.measuring import Settings, mean_ratio, table, write

ROOT = Path(__file__).parents[1]
ENVIRONMENT = ROOT / "build" / "peer"
PACKAGES = ["gradient-accumulator==0.5.2", "tensorflow-cpu==2.13.1", "numpy<1.25"]
PYTHON = (3, 11)
"""The last one that this TensorFlow installs with."""


def interpreter() -> str:
    """Return the Python of the environment, which is set up the first time.

    Raises:
        FileNotFoundError: if there is no Python to set it up with.
        subprocess.CalledProcessError: if it does not install.
    """
    python = str(ENVIRONMENT / "bin" / "python")
    if (ENVIRONMENT / "installed").exists():
        return python
    name = "python{}.{}".format(*PYTHON)
    base = sys.executable if sys.version_info[:2] == PYTHON else shutil.which(name)
    if base is None:
        raise FileNotFoundError(f"{PACKAGES[1]} needs {name}, which is not installed here")
    print(f"setting up {' '.join(PACKAGES)} (a few minutes)", flush=True)
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    subprocess.run([base, "-m", "venv", str(ENVIRONMENT)], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    (ENVIRONMENT / "installed").touch()
    return python


def run(settings: Settings) -> None:
    """Measure, and write `peer.md`; say why if it does not install here."""
    if settings.is_smoke:
        print("skipped: it needs an environment of its own; run without --smoke")
        return
    try:
        python = interpreter()
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        print(f"skipped: {error}")
        return
    found = subprocess.run(
        [python, str(Path(__file__).with_name("old_stack.py")), str(settings.rounds)],
        stdout=subprocess.PIPE,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "src")))},
    )
    rows = []
    for work, times in json.loads(found.stdout.splitlines()[-1]).items():
        if isinstance(times, str):
            rows.append([work, *[times] * 3])
        else:
            full, *others = (np.array(values) for values in times.values())
            rows.append([work, *(mean_ratio(values, full) for values in others)])
        print("  ".join(rows[-1]), flush=True)
    notes = [
        f"{', '.join(PACKAGES)}: `GradientAccumulateModel` and bigbatch in `fit`, k = 8, "
        "micro-batches of 16, time per update relative to the full batch of that stack. Mean "
        "and standard error over three models; all take turns."
    ]
    headings = ("work", "gradient-accumulator", "bigbatch, window", "bigbatch, split")
    write(settings, "peer", "gradient-accumulator", table(headings, rows), notes)


def main() -> int:
    """Run a script in the environment; say so if there is no Python for it."""
    try:
        python = interpreter()
    except FileNotFoundError as error:
        print(f"skipped: {error}")
        return 0
    return subprocess.run([python, *sys.argv[1:]], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
