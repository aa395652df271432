"""Add up a function over the micro-batches of a batch, one micro-batch in memory at a time.

Dense tensors are summed in at least float32, `IndexedSlices` are concatenated in the order
of the batch, `None` stays `None`: what the gradient of a sum over the whole batch would be.
"""

from __future__ import annotations

from typing import Any, Callable

import tensorflow as tf

from bigbatch.core.window import whole_and_rest
from bigbatch.tf.batch import Batch
from bigbatch.tf.compat import under_xla
from bigbatch.tf.joined import Joined
from bigbatch.tf.values import DENSE, ROWS, flattened, joined, kind_of, packed, widen, zeros


def total(
    compute: Callable[..., Any],
    batch: Batch,
    microbatch_size: Any,
    *,
    jit_compile: bool | None = None,
    begin: Callable[[Any], None] = lambda _: None,
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

    Returns:
        The nest that `compute` returns. Half-precision leaves come back as float32, and
        `IndexedSlices` without a `dense_shape`.
    """
    is_static = isinstance(batch.count, int) and isinstance(microbatch_size, int)
    if is_static and batch.count and tf.executing_eagerly():
        begin(None)
        return _eager_total(compute, batch, microbatch_size)
    joined = Joined(compute)
    add_up = _static_total if is_static else _dynamic_total
    return joined.parted(add_up(joined, batch, microbatch_size, jit_compile, begin))


def single(
    compute: Callable[..., Any], batch: Batch, *, jit_compile: bool | None = None
) -> Any:
    """Return what `total` would if the whole batch were one micro-batch."""
    if tf.executing_eagerly():
        results = compute(*batch.arguments(batch.leaves))
        return tf.nest.map_structure(lambda r: None if r is None else widen(r), results)
    known = isinstance(batch.count, int)
    micro = _Traced(compute, batch, batch.count if known else None, jit_compile)
    if not batch.may_be_empty or (known and batch.count):
        return micro.packed(micro.whole())
    return micro.packed(tf.cond(batch.count > 0, micro.whole, micro.nothing))


def _eager_total(compute: Callable[..., Any], batch: Batch, microbatch_size: int) -> Any:
    structure: Any = None
    totals: list[Any] = []
    for start in range(0, batch.count, microbatch_size):
        size = min(microbatch_size, batch.count - start)
        results = compute(*batch.arguments(batch.rows(start, size)))
        structure = tf.nest.map_structure(kind_of, results)
        leaves = tf.nest.flatten(results)
        del results
        totals = totals or [None] * len(leaves)
        for index in range(len(leaves)):
            # Popped, so that no gradient is in memory after it has been added.
            totals[index] = _plus(totals[index], leaves.pop(0))
    totals = [joined(leaf) if isinstance(leaf, list) else leaf for leaf in totals]
    return tf.nest.pack_sequence_as(structure, totals)


def _plus(so_far: Any, part: Any) -> Any:
    """Add `part`; rows are only listed, and joined once at the end."""
    if part is None:
        return so_far
    rows = isinstance(part, tf.IndexedSlices)
    part = widen(part)
    if so_far is None:
        return [part] if rows else part
    if rows and isinstance(so_far, list):
        return [*so_far, part]
    # Dense in one micro-batch and sparse in another is dense over the whole batch.
    dense = tf.convert_to_tensor(joined(so_far) if isinstance(so_far, list) else so_far)
    return dense + tf.convert_to_tensor(part)


def _static_total(
    compute: Callable[..., Any],
    batch: Batch,
    microbatch_size: int,
    jit_compile: bool | None,
    begin: Callable[[Any], None],
) -> Any:
    """Add up with static shapes: the batch size is known. The rest costs a second trace."""
    whole, rest = whole_and_rest(batch.count, microbatch_size)
    micro = _Traced(compute, batch, microbatch_size if whole else rest, jit_compile)
    begin(micro.graph)
    if whole > 1:
        totals = micro.loop(whole, microbatch_size)
    elif batch.count:
        totals = micro(0, microbatch_size if whole else rest)
    else:
        totals = micro.nothing()
    if whole and rest:
        tail = _Traced(compute, batch, rest, jit_compile)
        with tf.control_dependencies(totals):
            totals = micro.combined(totals, tail(whole * microbatch_size, rest))
    return micro.packed(totals)


def _dynamic_total(
    compute: Callable[..., Any],
    batch: Batch,
    microbatch_size: Any,
    jit_compile: bool | None,
    begin: Callable[[Any], None],
) -> Any:
    """Add up a batch whose size is known only when the graph runs: one trace for all."""
    whole, rest = whole_and_rest(batch.count, microbatch_size)
    micro = _Traced(compute, batch, None, jit_compile)
    begin(micro.graph)
    # XLA also compiles the loop that a batch smaller than a micro-batch never enters.
    totals = micro.loop(whole, tf.minimum(microbatch_size, batch.count))
    # The rest stands apart from the loop: XLA compiles no slice whose size changes in one.
    with tf.control_dependencies(totals):
        totals = tf.cond(
            rest > 0,
            lambda: micro.combined(totals, micro(whole * microbatch_size, rest)),
            lambda: totals,
        )
    return micro.packed(totals)


class _Traced:
    """`compute` traced once; its results as a flat list of tensors.

    A dense result is one tensor, `IndexedSlices` are two (values, indices), `None` is none.
    """

    def __init__(
        self,
        compute: Callable[..., Any],
        batch: Batch,
        size: int | None,
        jit_compile: bool | None,
    ) -> None:
        self._batch = batch
        self._kinds: Any = None

        def flat(leaves: list[Any]) -> list[Any]:
            tensors, self._kinds = flattened(compute(*batch.arguments(leaves)))
            return tensors

        # A function of its own, so that the shapes of the results are known before the loop
        # that adds them up is built. TensorFlow inlines it.
        function = tf.function(flat, autograph=False, jit_compile=jit_compile)
        self._function = function.get_concrete_function(batch.specs(size))
        self.graph = self._function.graph
        self._specs = [tf.TensorSpec(t.shape, t.dtype) for t in self._function.outputs]
        self._is_rows = []
        for kind in tf.nest.flatten(self._kinds):
            self._is_rows += {DENSE: [False], ROWS: [True, True]}.get(kind, [])

    def __call__(self, start: Any, size: Any) -> list[Any]:
        """Return the results for the samples from `start` on."""
        return self._results(self._batch.rows(start, size))

    def whole(self) -> list[Any]:
        """Return the results for the whole batch."""
        return self._results(self._batch.leaves)

    def _results(self, leaves: list[Any]) -> list[Any]:
        leaves = [leaf for leaf in leaves if leaf is not None]
        return list(self._function(*tf.nest.flatten(leaves, expand_composites=True)))

    def nothing(self) -> list[Any]:
        """Return the results of no samples."""
        return [
            tf.zeros([0, *spec.shape[1:]], spec.dtype)
            if is_rows
            else zeros(spec.shape, spec.dtype)
            for spec, is_rows in zip(self._specs, self._is_rows)
        ]

    def combined(self, totals: list[Any], tail: list[Any]) -> list[Any]:
        """Return the results of two parts of the batch as one."""
        return [
            tf.concat([so_far, part], 0) if is_rows else so_far + part
            for so_far, part, is_rows in zip(totals, tail, self._is_rows)
        ]

    def packed(self, totals: list[Any]) -> Any:
        """Return `totals` in the structure of the results of `compute`."""
        return packed(totals, self._kinds)

    def loop(self, whole: Any, size: Any) -> list[Any]:
        """Return the sum of the results over `whole` micro-batches of `size` samples."""

        def body(index: Any, so_far: list[Any]) -> tuple[Any, list[Any]]:
            # A micro-batch waits until the one before it is added up, or two would be in
            # memory at the same time.
            with tf.control_dependencies([t for t in so_far if tf.is_tensor(t)]):
                parts = self(index * size, size)
            return index + 1, [
                total.write(index, part) if is_rows else total + part
                for total, part, is_rows in zip(so_far, parts, self._is_rows)
            ]

        # XLA also compiles what a loop of no micro-batches would write: there is room for it.
        room = tf.maximum(whole, 1) if under_xla() else whole
        start = [
            tf.TensorArray(spec.dtype, room, infer_shape=False, element_shape=spec.shape)
            if is_rows
            else empty
            for spec, empty, is_rows in zip(self._specs, self.nothing(), self._is_rows)
        ]
        _, totals = tf.while_loop(
            lambda index, _: index < whole, body, (tf.constant(0), start), parallel_iterations=1
        )
        return [
            _rows(total.concat(), whole, room) if is_rows else total
            for total, is_rows in zip(totals, self._is_rows)
        ]


def _rows(rows: Any, whole: Any, room: Any) -> Any:
    """Return the rows of `whole` micro-batches, of those of `room` of them."""
    return rows if room is whole else rows[: tf.shape(rows)[0] // room * whole]
