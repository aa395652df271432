"""First calls, the number of traces, and the time to import."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import keras
import numpy as np

from benchmarks.candidates import FULL_BATCH, IN_FIT, KERAS, MICROBATCH, SPLIT, WINDOW
from benchmarks.measuring import Settings, table, write
from benchmarks.work import WORK, Work, traces_of

STEPS = (2, 64)
IMPORT = """
import time
start = time.perf_counter()
import bigbatch
print(time.perf_counter() - start)
"""


def run(settings: Settings) -> None:
    """Measure, and write `tracing.md`."""
    rows = []
    for name in settings.some(("tiny", "convolutional", "transformer")):
        work = WORK[name]
        for k in STEPS:
            full, _ = first_call(work, FULL_BATCH, k)
            for candidate in (SPLIT, WINDOW, KERAS):
                seconds, traces = first_call(work, candidate, k)
                rows.append([name, candidate, k, f"{seconds / full:.2f}", traces])
                print("  ".join(map(str, rows[-1])), flush=True)
    headings = ("work", "candidate", "k", "first call, to that of the full batch", "traces")
    times = [
        float(
            subprocess.run(
                [sys.executable, "-c", IMPORT], capture_output=True, check=True
            ).stdout
        )
        for _ in range(10)
    ]
    lines = [
        *table(headings, rows),
        "",
        f"`import bigbatch` takes {1000 * np.median(times):.0f} ms (median of {len(times)}, "
        f"from {1000 * min(times):.0f} to {1000 * max(times):.0f} ms).",
    ]
    notes = [
        "One epoch of `fit` with a ragged last batch, in which everything is traced. Traces "
        "are of the model's forward pass in training."
    ]
    write(settings, "tracing", "Tracing", lines, notes)


def first_call(work: Work, name: str, k: int) -> tuple[float, Any]:
    """Return how long the first epoch takes, and how often the model was traced in it."""
    keras.utils.set_random_seed(0)
    candidate = IN_FIT[name](work, False)
    before = traces_of(candidate.model)
    seconds = candidate.run(*work.data(MICROBATCH * k + 5), k)
    return seconds, traces_of(candidate.model) - before
