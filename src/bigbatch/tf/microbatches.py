"""Add up a function over the micro-batches of a batch, one micro-batch in memory at a time.

Dense tensors are summed in at least float32, the rows of `IndexedSlices` are those of the batch
(see `sparse_rows`), `None` stays `None`, random draws are rows of the draws of the batch (see
`draws`), and state that does not depend on samples changes once: what one pass over the whole
batch would give.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable

import tensorflow as tf

from bigbatch.core.window import whole_and_rest
from bigbatch.tf.batch import Batch, sample_count
from bigbatch.tf.compat import under_xla
from bigbatch.tf.dependence import Dependence, changed_in
from bigbatch.tf.draws import MicrobatchRows, drawing
from bigbatch.tf.joined import Joined
from bigbatch.tf.sparse_rows import SparseRows, has_rows
from bigbatch.tf.values import DENSE, ROWS, flattened, joined, kind_of, packed, widen, zeros


@dataclass(frozen=True)
class _Told:
    """What a trace has told of a function that runs eagerly."""

    places: list[str | None] = field(default_factory=list)
    once: list[Any] = field(default_factory=list)


class Trace:
    """Traces a function that runs eagerly, and keeps what that tells for other batches.

    Args:
        tries: how often to try: what fails may be traced later, when more is known, and every
            replica is traced. None at all if the function may keep tensors of a graph.
    """

    def __init__(self, tries: int = 4) -> None:
        self._told: dict[Any, _Told] = {}
        self._rows: SparseRows | None = None
        self._tries = tries

    def of(self, rows: SparseRows, batch: Batch, kept: list[Any]) -> _Told:
        """Return what a trace tells of a function on this replica, and tell it `rows`.

        Nothing, if it holds Python code that cannot be traced, or draws in branches.
        """
        context = tf.distribute.get_replica_context()
        replica = context and int(context.replica_id_in_sync_group)
        if replica not in self._told and self._tries:
            self._tries -= 1
            with contextlib.suppress(Exception):
                traced = _Traced(rows, batch, None, None, kept)
                if traced.is_flat:
                    self._told[replica] = _Told(traced.places, traced.once)
                    self._rows = rows
        told = self._told.get(replica)
        rows.told_by(self._rows if told else None)
        return told or _Told()


def total(
    compute: Callable[..., Any],
    batch: Batch,
    microbatch_size: Any,
    *,
    jit_compile: bool | None = None,
    begin: Callable[[Any], None] = lambda _: None,
    kept: Iterable[Any] = (),
    trace: Trace | None = None,
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
    kept = list(kept)
    is_static = isinstance(batch.count, int) and isinstance(microbatch_size, int)
    if is_static and batch.count and tf.executing_eagerly():
        return _eager_total(compute, batch, microbatch_size, begin, kept, trace)
    joined = Joined(compute)
    rows = SparseRows(joined)
    add_up = _static_total if is_static else _dynamic_total
    sums, count = add_up(rows, batch, microbatch_size, jit_compile, begin, kept)
    return joined.parted(rows.together(sums, count))


def single(
    compute: SparseRows,
    batch: Batch,
    start: Any,
    *,
    jit_compile: bool | None = None,
    kept: Iterable[Any] = (),
    trace: Trace | None = None,
) -> tuple[Any, list[Any]]:
    """Run one micro-batch of a batch whose other micro-batches run at other times.

    Args:
        compute: as in `total`, but with its sparse rows in parts.
        batch: the samples of the micro-batch.
        start: the samples of its batch that came before it.
        jit_compile: as in `total`.
        kept: as in `total`.
        trace: as in `total`.

    Returns:
        What `compute` returns, and the variables that change once per batch.
    """
    if tf.executing_eagerly():
        told = _Told() if trace is None else trace.of(compute, batch, list(kept))
        with drawing(MicrobatchRows(start, batch.count, places=told.places)):
            results = compute(*batch.arguments(batch.leaves))
        results = tf.nest.map_structure(lambda r: None if r is None else widen(r), results)
        return results, told.once
    known = isinstance(batch.count, int)
    micro = _traced(compute, batch, batch.count if known else None, jit_compile, list(kept))

    def whole() -> list[Any]:
        return micro.results(start, batch.leaves)

    if not batch.may_be_empty or (known and batch.count):
        return micro.packed(whole()), micro.once
    return micro.packed(tf.cond(batch.count > 0, whole, micro.nothing)), micro.once


def _eager_total(
    compute: Callable[..., Any],
    batch: Batch,
    microbatch_size: int,
    begin: Callable[[Any], None],
    kept: list[Any],
    trace: Trace | None,
) -> Any:
    rows = SparseRows(compute)
    is_several = batch.count > microbatch_size
    told = trace.of(rows, batch, kept) if is_several and trace else _Told()
    begin(None)
    once = [(variable, variable.read_value()) for variable in told.once]
    structure: Any = None
    totals: list[Any] = []
    starts = range(0, batch.count, microbatch_size)
    for start in starts:
        size = min(microbatch_size, batch.count - start)
        for variable, value in once:
            variable.assign(value)
        with drawing(MicrobatchRows(start, size, places=told.places)):
            results = compute(*batch.arguments(batch.rows(start, size)))
        if trace is None and not start and is_several and has_rows(results):
            Trace().of(rows, batch, kept)
        results = rows.parted(results)
        structure = tf.nest.map_structure(kind_of, results)
        leaves = tf.nest.flatten(results)
        del results
        totals = totals or [None] * len(leaves)
        for index in range(len(leaves)):
            # Popped, so that no gradient is in memory after it has been added.
            totals[index] = _plus(totals[index], leaves.pop(0))
    totals = [joined(leaf) if isinstance(leaf, list) else leaf for leaf in totals]
    return rows.together(tf.nest.pack_sequence_as(structure, totals), len(starts))


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
    compute: SparseRows,
    batch: Batch,
    microbatch_size: int,
    jit_compile: bool | None,
    begin: Callable[[Any], None],
    kept: list[Any],
) -> tuple[Any, Any]:
    """Add up a batch whose size is known when the graph is traced."""
    whole, rest = whole_and_rest(batch.count, microbatch_size)
    size = microbatch_size if whole else rest
    # One micro-batch is the whole batch; of several the sizes may differ.
    trace = _Traced if whole + (rest > 0) == 1 else _traced
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
        tail = micro if micro.fits(rest) else _Traced(compute, batch, rest, jit_compile, kept)
        with tf.control_dependencies(totals):
            totals = micro.combined(totals, tail(whole * microbatch_size, rest))
    return micro.packed(totals), whole + (rest > 0)


def _dynamic_total(
    compute: SparseRows,
    batch: Batch,
    microbatch_size: Any,
    jit_compile: bool | None,
    begin: Callable[[Any], None],
    kept: list[Any],
) -> tuple[Any, Any]:
    """Add up a batch whose size is known only when the graph runs: one trace for all."""
    whole, rest = whole_and_rest(batch.count, microbatch_size)
    micro = _Traced(compute, batch, None, jit_compile, kept)
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


def _traced(
    compute: Callable[..., Any],
    batch: Batch,
    size: int | None,
    jit_compile: bool | None,
    kept: list[Any],
) -> _Traced:
    """Return `compute` traced for micro-batches of any size, or of `size` if it must know."""
    try:
        return _Traced(compute, batch, None, jit_compile, kept)
    except Exception:
        if size is None:
            raise
        return _Traced(compute, batch, size, jit_compile, kept)


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
        kept: list[Any],
    ) -> None:
        is_any_size = size is None  # of one size, nothing shows what depends on it
        self.places: list[str | None] = []
        """For each random draw in turn, where the samples are in its shape."""
        self.is_flat = True
        """Whether no draw stands in a branch, where it may not happen."""
        self._batch = batch
        self._size = size
        self._kinds: Any = None

        def flat(start: Any, leaves: list[Any]) -> list[Any]:
            if is_any_size:
                graph = tf.compat.v1.get_default_graph()
                here = MicrobatchRows(start, sample_count(leaves), Dependence(graph))
                with drawing(here):
                    results = compute(*batch.arguments(leaves))
                self.places, self.is_flat = here.places, here.is_flat
            else:
                results = compute(*batch.arguments(leaves))
            tensors, self._kinds = flattened(results)
            return tensors

        # A function of its own, so that the shapes of the results are known before the loop
        # that adds them up is built. TensorFlow inlines it.
        function = tf.function(flat, autograph=False, jit_compile=jit_compile)
        start = tf.TensorSpec([], tf.int64)
        self._function = function.get_concrete_function(start, batch.specs(size))
        self.graph = self._function.graph
        self.once: list[Any] = []
        """The variables that change once per batch: in the same way for any samples."""
        if is_any_size:
            apart = {id(variable) for variable in kept}
            changed = [v for v in changed_in(self.graph) if id(v) not in apart]
            self.once = Dependence(self.graph).independent_variables(changed)
        self._before: list[Any] = []
        self._specs = [tf.TensorSpec(t.shape, t.dtype) for t in self._function.outputs]
        self._is_rows = []
        for kind in tf.nest.flatten(self._kinds):
            self._is_rows += {DENSE: [False], ROWS: [True, True]}.get(kind, [])

    def fits(self, size: int) -> bool:
        """Say whether micro-batches may have `size` samples."""
        return self._size in (None, size)

    def open(self) -> None:
        """Begin a batch: every micro-batch starts from the state that there is now."""
        self._before = [variable.read_value() for variable in self.once]

    def __call__(self, start: Any, size: Any) -> list[Any]:
        """Return the results for the samples from `start` on."""
        for variable, value in zip(self.once, self._before):
            variable.assign(value)
        return self.results(start, self._batch.rows(start, size))

    def results(self, start: Any, leaves: list[Any]) -> list[Any]:
        """Return the results for the samples `leaves`, before which there are `start`."""
        leaves = [leaf for leaf in leaves if leaf is not None]
        tensors = tf.nest.flatten(leaves, expand_composites=True)
        return list(self._function(tf.cast(start, tf.int64), *tensors))

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
