"""One micro-batch traced into a graph: what it returns, and what depends on its samples."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Sequence

import tensorflow as tf

from bigbatch.backends.tensorflow.batch import Batch, sample_count
from bigbatch.backends.tensorflow.compat import under_xla
from bigbatch.backends.tensorflow.dependence import Dependence, changed_in, effects_in
from bigbatch.backends.tensorflow.draws import MicrobatchRows, drawing
from bigbatch.backends.tensorflow.sparse_rows import SparseRows
from bigbatch.backends.tensorflow.values import DENSE, ROWS, flattened, packed, zeros
from bigbatch.backends.tensorflow.variables import this_replica


class TracedMicrobatch:
    """A function of a micro-batch, traced once; its results as a flat list of tensors.

    A dense result is one tensor, `IndexedSlices` are two (values, indices), `None` is none.

    Args:
        rows: a function, which is called with `constants` and the arguments of a micro-batch,
            and its sparse results.
        batch: the batch; only its types matter.
        size: the samples per micro-batch, or `None`: any number, which alone shows what
            depends on it.
        jit_compile: whether XLA compiles it.
        kept: returns the variables that every micro-batch changes, whatever their new value
            depends on; the trace may make some.
        constants: types of tensors that are the same for every micro-batch.
        total: returns the samples of the batch, given `constants`, if they may be needed.
        in_blocks: whether draws of several rows for each sample are in blocks.
    """

    def __init__(
        self,
        rows: SparseRows,
        batch: Batch,
        size: int | None,
        jit_compile: bool | None,
        kept: Callable[[], Iterable[Any]],
        constants: Sequence[tf.TensorSpec] = (),
        total: Callable[[list[Any]], Any] | None = None,
        *,
        in_blocks: bool = False,
    ) -> None:
        self.is_any_size = size is None
        """Whether micro-batches may have any number of samples."""
        self.places: list[str | None] = []
        """For each random draw in turn, where the samples are in its shape."""
        self.is_flat = True
        """Whether no draw stands in a branch, where it may not happen."""
        self.needs_total = False
        """Whether a random draw depends on the samples of the batch."""
        self._batch = batch
        self._size = size
        self.kinds: Any = None
        """What each result is, in their structure."""
        same: list[Any] = []

        def flat(start: Any, constants: list[Any], leaves: list[Any]) -> list[Any]:
            same[:] = constants
            if self.is_any_size:
                dependence = Dependence(tf.compat.v1.get_default_graph(), constants=same)
                here = MicrobatchRows(
                    start,
                    sample_count(leaves),
                    dependence,
                    total=None if total is None else total(constants),
                    in_blocks=in_blocks,
                    is_compiled=bool(jit_compile),
                )
                with drawing(here):
                    results = rows.parted(rows.compute(*constants, *batch.arguments(leaves)))
                self.places, self.is_flat = here.places, here.is_flat
                self.needs_total = here.needs_total
            else:
                results = rows.parted(rows.compute(*constants, *batch.arguments(leaves)))
            tensors, self.kinds = flattened(results)
            return tensors

        # A function of its own, so that the shapes of the results are known before what adds
        # them up is built. TensorFlow inlines it.
        function = tf.function(flat, autograph=False, jit_compile=jit_compile)
        types = tf.TensorSpec([], tf.int64), list(constants), batch.specs(size)
        self._function = function.get_concrete_function(*types)
        self.graph = self._function.graph
        self._sort_variables(kept, same)
        self._before: list[Any] = []
        self.specs = [tf.TensorSpec(t.shape, t.dtype) for t in self._function.outputs]
        """The types of the results."""
        parts = {DENSE: [False], ROWS: [True, True]}
        self.is_rows = [one for k in tf.nest.flatten(self.kinds) for one in parts.get(k, [])]
        """For each result, whether its rows are listed, not added up."""

    def _sort_variables(self, kept: Callable[[], Iterable[Any]], same: list[Any]) -> None:
        """Note which variables a micro-batch changes; `same` is the same in all of them."""
        self.once: list[Any] = []
        """The variables that change once per batch: in the same way for any samples."""
        apart, changed = {id(variable) for variable in kept()}, changed_in(self.graph)
        self.kept = [v for v in changed if id(v) in apart]
        """The variables that it changes of those that are kept."""
        self.changed = [v for v in changed if id(v) not in apart]
        """The other variables that it changes, whatever their new value depends on."""
        if self.is_any_size:
            dependence = Dependence(self.graph, constants=same)
            self.once = dependence.independent_variables(self.changed)

    def fits(self, size: int | None) -> bool:
        """Say whether micro-batches may have `size` samples (`None`: any number)."""
        return self._size in (None, size)

    def open(self) -> None:
        """Begin a batch: every micro-batch starts from the state that there is now."""
        self._before = [variable.read_value() for variable in self.once]

    def __call__(self, start: Any, size: Any) -> list[Any]:
        """Return the results for the samples from `start` on."""
        for variable, value in zip(self.once, self._before):
            variable.assign(value)
        return self.results(start, self._batch.rows(start, size))

    def results(
        self, start: Any, leaves: list[Any], constants: Sequence[Any] = ()
    ) -> list[Any]:
        """Return the results for the samples `leaves`, before which there are `start`."""
        leaves = [leaf for leaf in leaves if leaf is not None]
        tensors = tf.nest.flatten(leaves, expand_composites=True)
        return list(self._function(tf.cast(start, tf.int64), *constants, *tensors))

    def nothing(self) -> list[Any]:
        """Return the results of no samples."""
        return [
            _no_rows(spec) if is_rows else zeros(spec.shape, spec.dtype)
            for spec, is_rows in zip(self.specs, self.is_rows)
        ]

    def combined(self, totals: list[Any], tail: list[Any]) -> list[Any]:
        """Return the results of two parts of the batch as one."""
        return [
            tf.concat([_shaped_like(part, so_far), part], 0) if is_rows else so_far + part
            for so_far, part, is_rows in zip(totals, tail, self.is_rows)
        ]

    def packed(self, totals: list[Any]) -> Any:
        """Return `totals` in the structure of the results of the function."""
        return packed(totals, self.kinds)

    def loop(self, whole: Any, size: Any) -> list[Any]:
        """Return the sum of the results over `whole` micro-batches of `size` samples."""

        def body(index: Any, so_far: list[Any]) -> tuple[Any, list[Any]]:
            # A micro-batch waits until the one before it is added up, or two would be in
            # memory at the same time.
            with tf.control_dependencies([t for t in so_far if tf.is_tensor(t)]):
                parts = self(index * size, size)
            return index + 1, [
                total.write(index, part) if is_rows else total + part
                for total, part, is_rows in zip(so_far, parts, self.is_rows)
            ]

        # XLA also compiles what a loop of no micro-batches would write: there is room for it.
        room = tf.maximum(whole, 1) if under_xla() else whole
        start = [
            tf.TensorArray(spec.dtype, room, infer_shape=False, element_shape=spec.shape)
            if is_rows
            else empty
            for spec, empty, is_rows in zip(self.specs, self.nothing(), self.is_rows)
        ]
        _, totals = tf.while_loop(
            lambda index, _: index < whole, body, (tf.constant(0), start), parallel_iterations=1
        )
        return [
            _rows(total, spec, whole, room) if is_rows else total
            for total, spec, is_rows in zip(totals, self.specs, self.is_rows)
        ]


def _rows(array: Any, spec: tf.TensorSpec, whole: Any, room: Any) -> Any:
    """Return the rows of `whole` micro-batches, of those of `room` of them."""
    if room is not whole:
        rows = array.concat()
        return rows[: tf.shape(rows)[0] // room * whole]
    if spec.shape[1:].is_fully_defined():
        return array.concat()
    # Of no micro-batches TensorFlow does not know how long rows are.
    return tf.cond(tf.convert_to_tensor(whole > 0), array.concat, lambda: _no_rows(spec))


def _no_rows(spec: tf.TensorSpec) -> Any:
    return tf.zeros([0, *(length or 0 for length in spec.shape[1:])], spec.dtype)


def _shaped_like(other: Any, rows: Any) -> Any:
    """Return rows that are as long as others, which they are if there are any."""
    if rows.shape[1:].is_fully_defined():
        return rows
    return tf.reshape(rows, tf.concat([tf.shape(rows)[:1], tf.shape(other)[1:]], 0))


def traced(
    rows: SparseRows,
    batch: Batch,
    size: int | None,
    jit_compile: bool | None,
    kept: Callable[[], Iterable[Any]],
    constants: Sequence[tf.TensorSpec] = (),
    total: Callable[[list[Any]], Any] | None = None,
    *,
    in_blocks: bool = False,
) -> TracedMicrobatch:
    """Return a function traced for micro-batches of any size, or of `size` if it must know."""
    known = rows, batch, None, jit_compile, kept, constants, total
    try:
        return TracedMicrobatch(*known, in_blocks=in_blocks)
    except Exception:
        if size is None:
            raise
        return TracedMicrobatch(rows, batch, size, jit_compile, kept, constants)


@dataclass(frozen=True)
class Told:
    """What a trace has told of a function that runs eagerly."""

    places: list[str | None] = field(default_factory=list)
    once: list[Any] = field(default_factory=list)
    changed: list[Any] = field(default_factory=list)
    """All variables that it changes, but those that are kept."""
    effects: set[str] = field(default_factory=set)


class EagerTrace:
    """Traces a function that runs eagerly, and keeps what that tells for other batches.

    Args:
        unharmed: returns a block for the trace, which undoes what it does to attributes.
        tries: how often to try: what fails may be traced later, when more is known, and every
            replica is traced.
    """

    def __init__(
        self, unharmed: Callable[[], Any] = contextlib.nullcontext, tries: int = 4
    ) -> None:
        self.told: dict[Any, Told] = {}
        """What is known, by replica."""
        self._unharmed = unharmed
        self._rows: SparseRows | None = None
        self._tries = tries

    def of(
        self,
        rows: SparseRows,
        batch: Batch,
        kept: Callable[[], Iterable[Any]],
        constants: Sequence[tf.TensorSpec] = (),
    ) -> Told:
        """Return what a trace tells of a function on this replica, and tell it `rows`.

        Nothing, if it holds Python code that cannot be traced, or draws in branches.
        """
        replica = this_replica()
        if replica not in self.told and self._tries:
            self._tries -= 1
            with contextlib.suppress(Exception), self._unharmed():
                traced = TracedMicrobatch(rows, batch, None, None, kept, constants)
                if traced.is_flat:
                    self.told[replica] = Told(
                        traced.places, traced.once, traced.changed, effects_in(traced.graph)
                    )
                    self._rows = rows
        told = self.told.get(replica)
        rows.told_by(self._rows if told else None)
        return told or Told()
