"""The sum of what a function returns, call by call: micro-batches that come one by one."""

from __future__ import annotations

from typing import Any, Callable, Iterable

import tensorflow as tf

from bigbatch.tf.batch import Batch
from bigbatch.tf.buffers import GradientBuffer, local_variable
from bigbatch.tf.joined import Joined
from bigbatch.tf.microbatches import Trace, single
from bigbatch.tf.sparse_rows import SparseRows
from bigbatch.tf.values import flattened, packed


class RunningTotal:
    """Adds up `compute(data)` over calls, kept replica by replica between them.

    `prepare` traces `compute` before the variables that hold its sum are made, so that they
    fit it, and before anything that uses them is traced: one trace of `compute` for all.

    Args:
        strategy: the strategy on whose replicas `compute` runs.
        compute: takes data, returns a nest of tensors, `IndexedSlices` and `None`.
        run_eagerly: whether to leave everything to Python.
        jit_compile: whether XLA compiles `compute`.
        kept: variables that every call changes, whatever their new value depends on.
        trace: traces `compute` if it runs eagerly.
    """

    def __init__(
        self,
        strategy: Any,
        compute: Callable[[Any], Any],
        *,
        run_eagerly: bool,
        jit_compile: bool | None,
        kept: Iterable[Any] = (),
        trace: Trace | None = None,
    ) -> None:
        self._strategy = strategy
        self._kinds: Any = None
        self._specs: Any = None
        self._buffers: Any = None
        self._joined = Joined(compute)
        self._rows = rows = SparseRows(self._joined)
        self.once: dict[int, Any] = {}
        """The variables that change once per sum: in the same way for any data. By `id`."""
        with strategy.scope():
            self._samples = local_variable(tf.zeros([], tf.int64))
            self._calls = local_variable(tf.zeros([], tf.int64))
        kept = list(kept)

        def local(data: Any) -> list[Any]:
            batch = Batch((data,), may_be_empty=strategy.num_replicas_in_sync > 1)
            start = self._samples.read_value()
            results, once = single(
                rows, batch, start, jit_compile=jit_compile, kept=kept, trace=trace
            )
            self.once.update((id(variable), variable) for variable in once)
            count = tf.cast(batch.count, tf.int64)
            self._samples.assign_add(count)
            self._calls.assign_add(tf.sign(count))
            tensors, self._kinds = flattened(results)
            self._specs = tf.nest.map_structure(_spec, results)
            return tensors

        def on_replicas(data: Any) -> Any:
            return strategy.run(local, args=(data,))

        self._compute = on_replicas
        self._compiled: Any = None
        if not run_eagerly:
            self._compute = self._compiled = tf.function(
                on_replicas, reduce_retracing=True, autograph=False
            )

    @property
    def size(self) -> int:
        """The number of leaves `compute` returns."""
        return len(tf.nest.flatten(self._kinds["rest"]))

    def prepare(self, data: Any) -> None:
        """Trace `compute` for such data (or types of data), and make room for its sum."""
        if self._compiled is not None:
            self._compiled.get_concrete_function(data)
            self._make_buffers()

    def add(self, data: Any, *, is_first: bool) -> None:
        """Add `compute(data)`, or start over with it. Called outside `strategy.run`."""
        if is_first:
            self._strategy.run(self._begin)
        tensors = self._compute(data)
        self._make_buffers()

        def local(tensors: list[Any]) -> None:
            leaves = tf.nest.flatten(packed(tensors, self._kinds))
            for buffer, leaf in zip(tf.nest.flatten(self._buffers), leaves):
                if buffer is None:
                    continue
                if is_first:
                    buffer.forget_rows()
                    buffer.put(leaf)
                else:
                    buffer.add(leaf)

        self._strategy.run(local, args=(tensors,))

    def value(self, *names: str) -> Any:
        """Return this replica's sum, or some of it by name; called on each replica."""
        buffers, kinds = self._buffers, self._kinds
        if names:
            buffers, kinds = (
                {**nest, "rest": {name: nest["rest"][name] for name in names}}
                for nest in (buffers, kinds)
            )
        sums = tf.nest.map_structure(lambda b, kind: b and b.value(kind), buffers, kinds)
        if not names:  # which are of numbers, not of rows
            sums = self._rows.together(sums, self._calls.read_value())
        return self._joined.parted(sums, *names)

    def _begin(self) -> None:
        for variable in (self._samples, self._calls):
            variable.assign(tf.zeros([], tf.int64))

    def _make_buffers(self) -> None:
        if self._buffers is None:
            with self._strategy.scope():
                self._buffers = tf.nest.map_structure(
                    lambda spec: spec and GradientBuffer(spec), self._specs
                )


def _spec(leaf: Any) -> Any:
    if leaf is None:
        return None
    value = leaf.values if isinstance(leaf, tf.IndexedSlices) else leaf
    return tf.TensorSpec(value.shape, value.dtype)
