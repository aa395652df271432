"""gradient-accumulator 0.5.2, in a virtual environment of its own with its old TensorFlow."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks.measuring import Settings, ratio, table, write

ROOT = Path(__file__).parents[1]
ENVIRONMENT = ROOT / "build" / "peer"
PACKAGES = ["gradient-accumulator==0.5.2", "tensorflow-cpu==2.13.1", "numpy<1.25"]


def run(settings: Settings) -> None:
    """Measure, and write `peer.md`; say why if it does not install here."""
    if settings.is_smoke:
        print("skipped: it needs an environment of its own; run without --smoke")
        return
    python = ENVIRONMENT / "bin" / "python"
    if not (ENVIRONMENT / "installed").exists():
        print(f"setting up {' '.join(PACKAGES)} (a few minutes)", flush=True)
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *PACKAGES]
        if subprocess.run(install, check=False).returncode:
            print("skipped: it does not install with this Python")
            return
        (ENVIRONMENT / "installed").touch()
    found = subprocess.run(
        [str(python), str(Path(__file__).with_name("old_stack.py")), str(settings.rounds)],
        stdout=subprocess.PIPE,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    measured = json.loads(found.stdout.splitlines()[-1])
    rows = []
    for work, times in measured["times"].items():
        rows.append([work, ratio(*map(np.array, times)) if times else measured["errors"][work]])
        print("  ".join(rows[-1]), flush=True)
    notes = [
        f"{', '.join(PACKAGES)}: `GradientAccumulateModel`, k = 8, micro-batches of 16, "
        "relative to the full batch *of that stack*: compare with the column *to the full "
        "batch* of [speed.md](speed.md)."
    ]
    lines = table(("work", "time per update, to the full batch"), rows)
    write(settings, "peer", "gradient-accumulator", lines, notes)
