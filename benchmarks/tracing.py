"""First calls, the number of traces, and the time to import."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import keras
import numpy as np

from benchmarks.candidates import FULL_BATCH, IN_FIT, KERAS, MICROBATCH, SPLIT, WINDOW
from benchmarks.measuring import Settings, table, warm_up, write
from benchmarks.work import Work, traces_of

STEPS = (2, 64)
IMPORT = """
import time
start = time.perf_counter()
import bigbatch
print(time.perf_counter() - start)
"""


def run(settings: Settings) -> None:
    """Measure, and write `tracing.md`."""
    warm_up()
    rows = []
    for work in settings.works("tiny", "convolutional", "transformer"):
        for k in settings.some(STEPS):
            full = None
            for candidate in (FULL_BATCH, SPLIT, WINDOW, KERAS):
                seconds, traces = first_call(work, candidate, k)
                full = full or seconds
                rows.append([work.name, candidate, k, f"{seconds / full:.2f}", traces])
                print("  ".join(map(str, rows[-1])), flush=True)
    headings = ("work", "candidate", "k", "first epoch, to that of the full batch", "runs")
    times = [
        float(
            subprocess.run(
                [sys.executable, "-c", IMPORT], capture_output=True, check=True
            ).stdout
        )
        for _ in settings.some(range(10))
    ]
    lines = [
        *table(headings, rows),
        "",
        f"`import bigbatch` takes {1000 * np.median(times):.0f} ms (median of {len(times)}, "
        f"from {1000 * min(times):.0f} to {1000 * max(times):.0f} ms).",
    ]
    notes = [
        "One epoch of `fit` with a ragged last batch, in which everything is traced. What "
        "is counted is how often Python runs the forward pass: when Keras builds the model, in "
        "traces, and, with bigbatch, on a few samples of the first batch, to see whether the "
        "loss lets them meet."
    ]
    write(settings, "tracing", "Tracing", lines, notes)


def first_call(work: Work, name: str, k: int) -> tuple[float, Any]:
    """Return how long the first epoch takes, and how often the model was traced in it."""
    keras.utils.set_random_seed(0)
    candidate = IN_FIT[name](work, False)
    before = traces_of(candidate.model)
    seconds = candidate.run(*work.data(MICROBATCH * k + 5), k)
    return seconds, traces_of(candidate.model) - before
