"""Add up a function over the micro-batches of a batch, one micro-batch in memory at a time.

Dense tensors are summed in at least float32, the rows of `IndexedSlices` are those of the batch
(see `sparse_rows`), `None` stays `None`, random draws are rows of the draws of the batch (see
`draws`), and state that does not depend on samples changes once: what one pass over the whole
batch would give.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable

import tensorflow as tf

from bigbatch.backends.tensorflow.batch import Batch
from bigbatch.backends.tensorflow.draws import MicrobatchRows, drawing
from bigbatch.backends.tensorflow.sparse_rows import SparseRows, has_rows
from bigbatch.backends.tensorflow.sums import PythonSums
from bigbatch.backends.tensorflow.tracing import EagerTrace, Told, TracedMicrobatch, traced
from bigbatch.core.window import whole_and_rest


def total(
    compute: Callable[..., Any],
    batch: Batch,
    microbatch_size: Any,
    *,
    jit_compile: bool | None = None,
    begin: Callable[[Any], None] = lambda _: None,
    kept: Iterable[Any] = (),
    trace: EagerTrace | None = None,
) -> Any:
    """Return the sum of `compute(*micro_batch)` over the micro-batches of `batch`.

    In a graph the loop is part of the graph. Eagerly it is a Python loop, so that `compute`
    can be debugged.

    Args:
        compute: takes the arguments of a micro-batch, returns a nest of tensors,
            `IndexedSlices` and `None`.
        batch: the samples.
        microbatch_size: samples per micro-batch, an `int` or a tensor; the last one may be
            smaller.
        jit_compile: whether XLA compiles `compute`, in a graph. The loop stays outside:
            XLA runs loops on a CPU several times slower than TensorFlow does.
        begin: called with the graph of `compute` (eagerly: `None`) before it runs.
        kept: variables that every micro-batch changes, whatever their new value depends on.
        trace: traces `compute` if it runs eagerly. Without it random draws are those of each
            micro-batch, and `compute` is traced only if it gives sparse rows.

    Returns:
        The nest that `compute` returns. Half-precision leaves come back as float32, and
        `IndexedSlices` without a `dense_shape`.
    """
    variables = list(kept)
    is_static = isinstance(batch.count, int) and isinstance(microbatch_size, int)
    if is_static and batch.count and tf.executing_eagerly():
        return _eager_total(compute, batch, microbatch_size, begin, lambda: variables, trace)
    rows = SparseRows(compute)
    add_up = _static_total if is_static else _dynamic_total
    sums, count = add_up(rows, batch, microbatch_size, jit_compile, begin, lambda: variables)
    return rows.together(sums, count)


def _eager_total(
    compute: Callable[..., Any],
    batch: Batch,
    microbatch_size: int,
    begin: Callable[[Any], None],
    kept: Callable[[], list[Any]],
    trace: EagerTrace | None,
) -> Any:
    rows = SparseRows(compute)
    is_several = batch.count > microbatch_size
    told = trace.of(rows, batch, kept) if is_several and trace else Told()
    begin(None)
    once = [(variable, variable.read_value()) for variable in told.once]
    sums = PythonSums()
    sums.clear()
    starts = range(0, batch.count, microbatch_size)
    for start in starts:
        size = min(microbatch_size, batch.count - start)
        for variable, value in once:
            variable.assign(value)
        with drawing(MicrobatchRows(start, size, places=told.places)):
            results = compute(*batch.arguments(batch.rows(start, size)))
        if trace is None and not start and is_several and has_rows(results):
            EagerTrace().of(rows, batch, kept)
        results = rows.parted(results)
        sums.add(results)
        del results
    return rows.together(sums.value(), len(starts))


def _static_total(
    compute: SparseRows,
    batch: Batch,
    microbatch_size: int,
    jit_compile: bool | None,
    begin: Callable[[Any], None],
    kept: Callable[[], list[Any]],
) -> tuple[Any, Any]:
    """Add up a batch whose size is known when the graph is traced."""
    whole, rest = whole_and_rest(batch.count, microbatch_size)
    size = microbatch_size if whole else rest
    # One micro-batch is the whole batch; of several the sizes may differ.
    trace = TracedMicrobatch if whole + (rest > 0) == 1 else traced
    micro = trace(compute, batch, size, jit_compile, kept)
    begin(micro.graph)
    micro.open()
    if whole > 1:
        totals = micro.loop(whole, microbatch_size)
    elif batch.count:
        totals = micro(0, size)
    else:
        totals = micro.nothing()
    if whole and rest:
        tail = (
            micro
            if micro.fits(rest)
            else TracedMicrobatch(compute, batch, rest, jit_compile, kept)
        )
        with tf.control_dependencies(totals):
            totals = micro.combined(totals, tail(whole * microbatch_size, rest))
    return micro.packed(totals), whole + (rest > 0)


def _dynamic_total(
    compute: SparseRows,
    batch: Batch,
    microbatch_size: Any,
    jit_compile: bool | None,
    begin: Callable[[Any], None],
    kept: Callable[[], list[Any]],
) -> tuple[Any, Any]:
    """Add up a batch whose size is known only when the graph runs: one trace for all."""
    whole, rest = whole_and_rest(batch.count, microbatch_size)
    micro = TracedMicrobatch(compute, batch, None, jit_compile, kept)
    begin(micro.graph)
    micro.open()
    # XLA also compiles the loop that a batch smaller than a micro-batch never enters.
    totals = micro.loop(whole, tf.minimum(microbatch_size, batch.count))
    # The rest stands apart from the loop: XLA compiles no slice whose size changes in one.
    with tf.control_dependencies(totals):
        totals = tf.cond(
            rest > 0,
            lambda: micro.combined(totals, micro(whole * microbatch_size, rest)),
            lambda: totals,
        )
    return micro.packed(totals), whole + tf.cast(rest > 0, whole.dtype)
