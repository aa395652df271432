"""Peak memory of an update, in allocator bytes: the same to the byte every time."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from benchmarks import plots
from benchmarks.candidates import (
    BATCHES,
    BY_HAND,
    FULL_BATCH,
    IN_FIT,
    IN_LOOPS,
    KERAS,
    MICROBATCH,
    SPLIT,
    WINDOW,
)
from benchmarks.measuring import Settings, peak_bytes, table, write
from benchmarks.work import TABLE

STEPS = (1, 4, 16, 64)
CANDIDATES = (FULL_BATCH, SPLIT, WINDOW, KERAS, BATCHES, BY_HAND)
MIB = 2**20


def run(settings: Settings) -> None:
    """Measure, and write `memory.md` and `memory.png`."""
    if not settings.is_smoke:
        tf.config.threading.set_inter_op_parallelism_threads(1)  # the same order every time
    rows = []
    peaks: dict[str, dict[str, list[float]]] = {}
    steps = settings.some(STEPS, 2)
    for work in settings.works("tiny", "convolutional", "transformer", "wide", "embedding"):
        name, model = work.name, work.make_model()
        gradients = sum(4 * weight.shape.num_elements() for weight in _shapes(model))
        step = None
        for candidate in CANDIDATES:
            keras.utils.set_random_seed(0)
            made = {**IN_FIT, **IN_LOOPS}[candidate](work, False)
            found = []
            for k in steps:
                data = batches(work, made.batch_size(k), k)
                found.append(peak_bytes(functools.partial(made.run, data, None, k)))
            # The first, of k = 1: the plain step of one micro-batch.
            step = step or found[0]
            peaks.setdefault(name, {})[candidate] = [peak / MIB for peak in found]
            beyond = max(0, found[-1] - step)
            cells = [f"{peak / MIB:.1f}" for peak in found]
            sets = f"{beyond / gradients:.2f}"
            rows.append([name, candidate, *cells, f"{beyond / MIB:.1f}", sets])
            print("  ".join(rows[-1]), flush=True)
            del made
    headings = [
        "work",
        "candidate",
        *(f"k = {k} (MiB)" for k in steps),
        "beyond one step (MiB)",
        "in gradient sets",
    ]
    notes = [
        f"Micro-batches of {MICROBATCH}, Adam; the peak of an update beyond what is there "
        "before it. One step is that of a plain update with one micro-batch; beyond it, at the "
        "largest k. A gradient set of the embedding would be "
        f"{TABLE[0] * TABLE[1] * 4 / MIB:.0f} MiB if it were dense. Keras' own and the loop by "
        "hand keep their sums from update to update: one dense gradient set more, which is "
        "there before and not counted."
    ]
    write(settings, "memory", "Peak memory of an update", table(headings, rows), notes)
    plots.memory(steps, peaks, settings.results / "memory.png")


def batches(work: Any, size: int, k: int) -> Any:
    """Return one update's worth of batches, which are in memory before it."""
    x, y = work.data(size)
    return tf.data.Dataset.from_tensors((tf.constant(x), tf.constant(y))).repeat(
        MICROBATCH * k // size
    )


def _shapes(model: Any) -> list[Any]:
    return [weight.value for weight in model.trainable_weights]
