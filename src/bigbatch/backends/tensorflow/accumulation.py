"""Run a function on the micro-batches of `fit`, and add up what it returns, replica by replica.

The sums are kept in variables between calls, so that the micro-batches of one batch may come in
one call (slices of a batch) or in several (batches of the data set).
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import Any, Callable, Iterator

import tensorflow as tf

from bigbatch.backends.tensorflow.batch import Batch, includes
from bigbatch.backends.tensorflow.compat import per_replica_types
from bigbatch.backends.tensorflow.data import type_of
from bigbatch.backends.tensorflow.dependence import changed_in, effects_in
from bigbatch.backends.tensorflow.draws import MicrobatchRows, drawing
from bigbatch.backends.tensorflow.exact.microbatch import MarkedFunction, StagedMicrobatch
from bigbatch.backends.tensorflow.rollback import unchanged
from bigbatch.backends.tensorflow.sparse_rows import SparseRows
from bigbatch.backends.tensorflow.sums import PythonSums, StoredSums
from bigbatch.backends.tensorflow.tracing import EagerTrace, Told, TracedMicrobatch, traced
from bigbatch.backends.tensorflow.values import WEIGHT_DTYPE
from bigbatch.backends.tensorflow.variables import (
    local_variable,
    on_this_replica,
    this_replica,
)
from bigbatch.core.exact import Storage

_CONTEXT = tf.TensorSpec([None], WEIGHT_DTYPE)


class Accumulation:
    """The sum of `compute` over the micro-batches of a batch.

    `clear`, `add` and `value` are called on each replica, in a graph or eagerly.

    Args:
        strategy: the strategy on whose replicas it runs.
        compute: called with a vector of numbers that are the same for the whole batch, and the
            data of a micro-batch; returns a nest of tensors, `IndexedSlices` and `None`.
        run_eagerly: whether to leave everything to Python.
        jit_compile: whether XLA compiles `compute`.
        kept: returns the variables that every micro-batch changes, whatever their new value
            depends on.
        before: returns the value that a variable had before the batch.
        unharmed: returns a block in which `compute`, run eagerly otherwise, may be traced.
        exact: what is stored if micro-batches run in stages, with sums over them all between
            stages; `None`: they run one after the other.
    """

    def __init__(
        self,
        strategy: Any,
        compute: Callable[[Any, Any], Any],
        *,
        run_eagerly: bool,
        jit_compile: bool,
        kept: Callable[[], list[Any]],
        before: Callable[[Any], Any],
        unharmed: Callable[[], Any],
        exact: Storage | None = None,
    ) -> None:
        self._strategy = strategy
        self._exact = exact
        self._staged: dict[int, StagedMicrobatch] = {}
        self._marked = MarkedFunction(compute, strategy.num_replicas_in_sync)
        self._rows = SparseRows(compute if exact is None else self._marked)
        self._jit_compile = jit_compile
        self._kept = kept
        self._draws_in_blocks = False
        self._before = before
        self._traces: dict[int, list[tuple[TracedMicrobatch, list[Any]]]] = {}
        self._known_size: int | None = None
        self._stored: StoredSums | None = None
        self._python = PythonSums() if run_eagerly else None
        self._eager_trace, self._of_step = EagerTrace(unharmed), Told()
        self._empty: dict[int, Batch] = {}
        self.once: dict[int, Any] = {}
        """The variables that change once per batch: the same for any samples. By `id`."""
        self.changed: dict[int, Any] = {}
        """Those, and others that every micro-batch changes, but for `kept`."""
        with strategy.scope():
            self._samples = local_variable(tf.zeros([], tf.int64))
            self._microbatches = local_variable(tf.zeros([], tf.int64))

    def prepare(self, types: Any, size: int | None) -> None:
        """Trace `compute` for data of such types, and make room for its sum."""
        self._known_size = size
        if self._python is not None:
            return

        def local(data: Any) -> Any:
            # Where it is to be cut, that is checked when it is.
            self._traced(self._batch(data, is_whole=True), size)
            return tf.zeros([])

        function = tf.function(lambda data: self._strategy.run(local, (data,)), autograph=False)
        function.get_concrete_function(types)
        if self._stored is None:
            micro = self._first_trace()
            with self._strategy.scope():
                self._stored = StoredSums(micro.specs, micro.is_rows)

    def can_run(self, types: Any) -> bool:
        """Say whether `compute` takes data of such types."""
        function = tf.function(lambda data: self._rows.compute(None, data), autograph=False)
        with contextlib.suppress(Exception):
            function.get_concrete_function(tf.nest.map_structure(_type_on_one_replica, types))
            return True
        return False

    def learn(self, told: Told) -> None:
        """Use what a trace of the whole `train_step` has told, where this shows less."""
        self._of_step = told

    def look_at(self, data: Any) -> Told:
        """Trace a micro-batch, which has run eagerly, if it can be."""
        return self._told(self._batch(data, is_whole=True))

    def _told(self, batch: Batch) -> Told:
        """Return what a trace tells of micro-batches that run eagerly."""
        told = self._eager_trace.of(self._rows, batch, self._kept, [_CONTEXT])
        told = told if this_replica() in self._eager_trace.told else self._of_step
        here = functools.partial(on_this_replica, self._strategy)
        once, changed = list(map(here, told.once)), list(map(here, told.changed))
        self.once.update((id(variable), variable) for variable in once)
        self.changed.update((id(variable), variable) for variable in changed)
        return replace(told, once=once, changed=changed)

    @property
    def is_any_size(self) -> bool:
        """Whether micro-batches may have any number of samples; known once traced."""
        return all(micro.is_any_size for micro in self._micros())

    @property
    def draws_by_sample(self) -> bool:
        """Whether each sample has random numbers of its own, by its place in the batch."""
        told = self._eager_trace.told.values()
        return any(place for one in (*self._micros(), *told) for place in one.places)

    @property
    def draws_by_total(self) -> bool:
        """Whether random numbers depend on the samples of the batch; known once traced."""
        return any(micro.needs_total for micro in self._micros())

    draws_several_rows = False
    """Whether a draw is known to have several rows for each sample: nothing tells."""

    def draw_in_blocks(self, is_so: bool) -> bool:
        """Say whether draws of several rows for each sample can be in blocks, or not again.

        If they can, they are so in what is traced from now on.
        """
        is_possible = self._strategy.num_replicas_in_sync == 1 and not self._jit_compile
        is_possible = is_possible and self._exact is None and self._python is None
        self._draws_in_blocks = is_so and is_possible
        return is_possible and self.draws_by_sample

    def remarks(self) -> list[str]:
        """Return what to say of the stages of micro-batches, if they run in stages."""
        deepest = max(self._staged.values(), key=lambda one: one.sums, default=None)
        xla = "; they are not compiled by XLA" if self._jit_compile else ""
        return [] if deepest is None else [f"bigbatch: stages: {deepest}{xla}"]

    def assigned(self) -> list[Any]:
        """Return the variables that a micro-batch may change, sums and metrics left out."""
        apart = {id(variable) for variable in self._kept()}
        found = {id(v): v for micro in self._micros() for v in changed_in(micro.graph)}
        found.update(
            (id(v), v) for told in self._eager_trace.told.values() for v in told.changed
        )
        return [variable for key, variable in found.items() if key not in apart]

    def effects(self) -> set[str]:
        """Return the operations of a micro-batch that reach out of TensorFlow."""
        found = [told.effects for told in self._eager_trace.told.values()]
        return set().union(*found, *(effects_in(micro.graph) for micro in self._micros()))

    def run_eagerly(self, context: Any, data: Any, start: int) -> Any:
        """Return what `compute` does for one micro-batch, run by Python, to be looked at."""
        batch = self._batch(data, is_whole=True)
        micro = next(self._micros(), None)
        places = micro.places if micro is not None else self._told(batch).places
        total, in_blocks = _samples_of_batch([context]), self._draws_in_blocks
        here = MicrobatchRows(
            start, int(batch.count), places=places, total=total, in_blocks=in_blocks
        )
        with drawing(here):
            return self._rows.compute(context, *batch.arguments(batch.leaves))

    def _micros(self) -> Iterator[TracedMicrobatch]:
        return (micro for traces in self._traces.values() for micro, _ in traces)

    def forget(self) -> None:
        """Forget what was traced, as other variables are there now."""
        self._traces.clear()
        self._stored = None

    def release(self) -> None:
        """Give back the memory of a sum that has been read."""
        if self._python is not None:
            self._python.clear()
        elif self._stored is not None:
            self._stored.release()

    def clear(self) -> None:
        """Begin a batch."""
        for variable in (self._samples, self._microbatches):
            variable.assign(tf.zeros([], tf.int64))
        if self._python is not None:
            self._python.clear()
        elif self._stored is not None:
            self._stored.clear()

    def add(self, context: Any, data: Any, size: Any = None) -> None:
        """Run micro-batches of `size` samples, or one of all of them, and add them up."""
        batch = self._batch(data, is_whole=size is None)
        if self._python is not None:
            self._add_eagerly(context, batch, size)
            return
        assert self._stored is not None
        stored, micro = self._stored, self._traced(batch, self._known_size)
        count = tf.convert_to_tensor(batch.count)
        before = self._samples.read_value()
        each = tf.maximum(count, 1) if size is None else tf.cast(size, count.dtype)
        if self._exact is not None:
            staged = self._staged[id(micro)]
            staged.run(
                context, batch, before, tf.minimum(each, tf.maximum(count, 1)), stored.add
            )
            self._count(count, each)
            return

        def run(micro: TracedMicrobatch, start: Any, leaves: list[Any]) -> None:
            for variable in micro.once:
                variable.assign(self._before(variable))
            first = before + tf.cast(start, tf.int64)
            stored.add(micro.results(first, leaves, [context]))

        def body(start: Any) -> Any:
            rows = tf.minimum(each, count - start)
            run(micro, start, batch.leaves if size is None else batch.rows(start, rows))
            return start + rows

        if not micro.is_any_size:
            most = batch.count if size is None else self._known_size or batch.count
            for start in range(0, batch.count, most):
                rows = min(most, batch.count - start)
                run(self._traced(batch, rows), start, batch.rows(start, rows))
        elif size is None and not batch.may_be_empty:
            run(micro, 0, batch.leaves)
        else:
            # Of one micro-batch, too, on a replica that may have no samples.
            tf.while_loop(
                lambda start: start < count,
                body,
                [tf.zeros([], count.dtype)],
                parallel_iterations=1,  # or two of them would be in memory at the same time
            )
        self._count(count, each)

    def _count(self, count: Any, each: Any) -> None:
        """Note that samples have been added up, in micro-batches of `each`."""
        self._samples.assign_add(tf.cast(count, tf.int64))
        self._microbatches.assign_add(tf.cast((count - 1) // each + 1, tf.int64))

    def change_once(self, context: Any, data: Any, size: Any = None) -> None:
        """Run one micro-batch, and keep only what changes once per batch."""
        batch = self._batch(data, is_whole=size is None)
        if self._python is not None:
            self._change_once_eagerly(context, batch, size)
            return
        micro = self._traced(batch, self._known_size)
        count = tf.convert_to_tensor(batch.count)
        rows = count if size is None else tf.minimum(tf.cast(size, count.dtype), count)
        once = {id(variable) for variable in micro.once}
        others = [one for one in (*micro.changed, *micro.kept) if id(one) not in once]
        values = [(one, one.read_value()) for one in others]
        for variable in micro.once:
            variable.assign(self._before(variable))
        leaves = batch.leaves if size is None else batch.rows(0, rows)
        micro.results(tf.zeros([], tf.int64), leaves, [context])
        for variable, value in values:
            variable.assign(value)

    def _change_once_eagerly(self, context: Any, batch: Batch, size: int | None) -> None:
        if not int(batch.count):
            return
        told = self._told(batch)
        once = {id(variable) for variable in told.once}
        others = [one for one in (*told.changed, *self._kept()) if id(one) not in once]
        rows = min(size or int(batch.count), int(batch.count))
        with unchanged(others), drawing(MicrobatchRows(0, rows, places=told.places)):
            for variable in told.once:
                variable.assign(self._before(variable))
            arguments = batch.arguments(batch.rows(0, rows))
            self._rows.compute(context, *arguments)

    def value(self) -> Any:
        """Return the sum so far, in the structure that `compute` returns."""
        if self._python is not None:
            sums = self._python.value()
            if sums is None:  # no samples on this replica: as many zeros as others have sums
                micro = self._traced(self._empty[this_replica()], None)
                sums = micro.packed(micro.nothing())
        else:
            assert self._stored is not None
            micro = self._first_trace()
            sums = micro.packed(self._stored.values())
        return self._rows.together(sums, self._microbatches.read_value())

    def _batch(self, data: Any, *, is_whole: bool) -> Batch:
        several = self._strategy.num_replicas_in_sync > 1
        return Batch((data,), may_be_empty=several, is_whole=is_whole)

    def _first_trace(self) -> TracedMicrobatch:
        """Return a trace that tells what `compute` returns."""
        return next(iter(self._traces.values()))[0][0]

    def _traced(self, batch: Batch, size: int | None) -> TracedMicrobatch:
        """Return `compute` traced on this replica, for any number of samples if it can be."""
        known = batch.count if isinstance(batch.count, int) else None
        known = min(known, size) if known and size else known
        types = batch.specs(None)
        traces = self._traces.setdefault(this_replica(), [])
        for micro, its_types in traces:
            if micro.fits(known) and includes(its_types, types):
                return micro
        if self._exact is None:
            # Replicas draw by themselves: the samples of each are not known.
            total = _samples_of_batch if self._strategy.num_replicas_in_sync == 1 else None
            settings = known, self._jit_compile, self._kept, [_CONTEXT], total
            micro = traced(self._rows, batch, *settings, in_blocks=self._draws_in_blocks)
        else:
            micro = TracedMicrobatch(self._rows, batch, None, None, self._kept, [_CONTEXT])
            markers, kept = self._marked.markers[id(micro.graph)], self._kept()
            self._staged[id(micro)] = StagedMicrobatch(micro.graph, markers, kept, self._exact)
        here = functools.partial(on_this_replica, self._strategy)
        micro.once, micro.changed = list(map(here, micro.once)), list(map(here, micro.changed))
        micro.kept = list(map(here, micro.kept))
        traces.append((micro, types))
        self.once.update((id(variable), variable) for variable in micro.once)
        self.changed.update((id(variable), variable) for variable in micro.changed)
        return micro

    def _add_eagerly(self, context: Any, batch: Batch, size: int | None) -> None:
        assert self._python is not None
        count = int(batch.count)
        if not count:
            self._empty[this_replica()] = batch
        size = size or max(count, 1)
        told = Told()
        if count:
            told = self._told(batch)
        before = int(self._samples.read_value())
        for start in range(0, count, size):
            rows = min(size, count - start)
            for variable in told.once:
                variable.assign(self._before(variable))
            with drawing(MicrobatchRows(before + start, rows, places=told.places)):
                leaves = batch.leaves if rows == count else batch.rows(start, rows)
                arguments = batch.arguments(leaves)
                results = self._rows.parted(self._rows.compute(context, *arguments))
            self._python.add(results)
            del results
        self._samples.assign_add(count)
        self._microbatches.assign_add(-(-count // size))


def _samples_of_batch(constants: list[Any]) -> Any:
    """Return the samples of the batch, given what micro-batches know of it."""
    return constants[0][1]


def _type_on_one_replica(leaf: Any) -> Any:
    leaf = type_of(leaf)
    return next(iter(per_replica_types(leaf)), leaf)
