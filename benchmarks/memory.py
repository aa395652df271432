"""Peak memory of an update, in allocator bytes."""

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
from benchmarks.measuring import (
    REPLICAS,
    Settings,
    in_new_process,
    mirrored,
    peak_bytes,
    table,
    write,
)
from benchmarks.work import DEEP, TABLE, WIDE, Work
from bigbatch.core.sparse_gradients import CHOICES

STEPS = (1, 4, 16, 64)
CANDIDATES = (FULL_BATCH, SPLIT, WINDOW, KERAS, BATCHES, BY_HAND)
K = 8
MIB = 2**20


def run(settings: Settings) -> None:
    """Measure, and write `memory.md` and `memory.png`."""
    _in_one_order(settings)
    peaks: dict[str, dict[str, list[float]]] = {}
    lines = ["## With k", "", *_with_k(settings, peaks)]
    lines += ["", "## Rows of embedding tables, or dense sums", "", *sparse(settings)]
    lines += ["", "## With the number of variables", ""]
    lines += _sizes("variables", settings.some(DEEP.items()))
    lines += ["", "## With the bytes of the variables", ""]
    lines += _sizes("parameters", settings.some(WIDE.items()))
    lines += ["", "## With replicas", ""]
    rows = [
        [count, *in_new_process(_on_replicas, count, settings)]
        for count in settings.some((1, *REPLICAS))
    ]
    lines += table(("replicas", *_HEADINGS), rows)
    notes = [
        f"Micro-batches of {MICROBATCH}, Adam; the peak of an update beyond what is there "
        "before it, the median of three: TensorFlow changes the order of operations a little, "
        "and so how many temporary tensors of Adam are there at once. One step is that of a "
        "plain update with one micro-batch. A gradient set of the embedding would be "
        f"{TABLE[0] * TABLE[1] * 4 / MIB:.0f} MiB if it were dense. "
        "Keras' own and the loop by hand keep their sums from update to update: one dense "
        "gradient set, which counts though it is there before. Replicas: the transformer, "
        "`MirroredStrategy` on logical CPUs, all replicas together, each with micro-batches of "
        f"{MICROBATCH}."
    ]
    write(settings, "memory", "Peak memory of an update", lines, notes)
    plots.memory(settings.some(STEPS, 2), peaks, settings.results / "memory.png")


def batches(work: Work, size: int, k: int) -> Any:
    """Return one update's worth of batches, which are in memory before it."""
    x, y = work.data(size)
    return tf.data.Dataset.from_tensors((tf.constant(x), tf.constant(y))).repeat(
        MICROBATCH * k // size
    )


def _in_one_order(settings: Settings) -> None:
    """Let operations run one by one, in nearly the same order every time."""
    if not settings.is_smoke:
        tf.config.threading.set_inter_op_parallelism_threads(1)


def _with_k(settings: Settings, peaks: dict[str, dict[str, list[float]]]) -> list[str]:
    """Return a table of all candidates; note what is in it in `peaks`."""
    rows = []
    steps = settings.some(STEPS, 2)
    for work in settings.works("tiny", "convolutional", "transformer", "wide", "embedding"):
        gradients = _gradient_bytes(work)
        step = None
        for candidate in CANDIDATES:
            found = _peaks(work, candidate, steps)
            # The first, of k = 1: the plain step of one micro-batch.
            step = step or found[0]
            peaks.setdefault(work.name, {})[candidate] = [peak / MIB for peak in found]
            beyond = max(0, found[-1] - step)
            cells = [f"{peak / MIB:.1f}" for peak in found]
            sets = f"{beyond / gradients:.2f}"
            rows.append([work.name, candidate, *cells, f"{beyond / MIB:.1f}", sets])
            print("  ".join(rows[-1]), flush=True)
    at = (f"k = {k} (MiB)" for k in steps)
    headings = ("work", "candidate", *at, f"k = {steps[-1]}, beyond one step (MiB)")
    return table((*headings, "in gradient sets"), rows)


def sparse(settings: Settings) -> list[str]:
    """Return a table of what `sparse_gradients` makes of the transformer's embedding table."""
    steps = settings.some((STEPS[0], STEPS[-1]))
    rows = []
    for work in settings.works("transformer"):
        for candidate in (SPLIT, WINDOW):
            for choice in CHOICES:
                found = _peaks(work, candidate, steps, sparse_gradients=choice)
                rows.append([candidate, choice, *(f"{peak / MIB:.1f}" for peak in found)])
                print("  ".join(rows[-1]), flush=True)
    headings = ("candidate", "sparse_gradients", *(f"k = {k} (MiB)" for k in steps))
    return table(headings, rows)


_HEADINGS = (
    "one step (MiB)",
    f"split, k = {K}, beyond it (MiB)",
    "in gradient sets",
    "window, beyond it (MiB)",
    "in gradient sets",
)


def _sizes(what: str, works: Any) -> list[str]:
    rows = [[size, *_beyond_one_step(work)] for size, work in works]
    return table((what, *_HEADINGS), rows)


def _on_replicas(count: int, settings: Settings) -> list[str]:
    _in_one_order(settings)
    with mirrored(count).scope():
        (work,) = settings.works("transformer")
        return _beyond_one_step(work, count)


def _beyond_one_step(work: Work, replicas: int = 1) -> list[str]:
    """Return what one step of all replicas takes, and what K micro-batches take beyond it."""
    (step,) = _peaks(work, FULL_BATCH, [replicas])
    gradients = replicas * _gradient_bytes(work)
    cells = [f"{step / MIB:.2f}"]
    for candidate in (SPLIT, WINDOW):
        (peak,) = _peaks(work, candidate, [K * replicas])
        beyond = max(0, peak - step)
        cells += [f"{beyond / MIB:.2f}", f"{beyond / gradients:.2f}"]
    print("  ".join(cells), flush=True)
    return cells


def _peaks(work: Work, candidate: str, steps: Any, **options: Any) -> list[int]:
    """Return the peak of an update of k micro-batches, for each k."""
    keras.utils.set_random_seed(0)
    made = {**IN_FIT, **IN_LOOPS}[candidate](work, False, **options)

    def peak(k: int) -> int:
        data = batches(work, made.batch_size(k), k)
        return peak_bytes(functools.partial(made.run, data, None, k)) + _bytes(made.kept())

    return list(map(peak, steps))


def _gradient_bytes(work: Work) -> int:
    return _bytes(work.make_model().trainable_weights)


def _bytes(variables: Any) -> int:
    return sum(4 * tf.TensorShape(one.shape).num_elements() for one in variables)
