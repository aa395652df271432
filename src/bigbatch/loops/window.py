"""The state of a window: what has been accumulated since the last update."""

from __future__ import annotations

import functools
import operator
from typing import Any, Mapping

import numpy as np
import tensorflow as tf

from bigbatch.backends.tensorflow import replicas
from bigbatch.backends.tensorflow.compat import outside_strategy_scope
from bigbatch.backends.tensorflow.values import (
    DENSE,
    ROWS,
    WEIGHT_DTYPE,
    as_gradient_of,
    kind_of,
)
from bigbatch.core.loop_checks import refuse_elsewhere, refuse_inside
from bigbatch.core.window_arrays import arrays_of, sums_of
from bigbatch.loops.buffers import GradientBuffer, local_variable


class GradientWindow:
    """Sums of weighted gradients, their weight and their number, kept replica by replica.

    Args:
        variables: the variables whose gradients are accumulated.
        length: micro-batches in the first window.
    """

    def __init__(self, variables: list[Any], length: int) -> None:
        self.strategy = tf.distribute.get_strategy()
        self._scope = self.strategy if tf.distribute.has_strategy() else None
        self._variables = variables
        self._buffers = [GradientBuffer(variable) for variable in variables]
        self._micro_batches = local_variable(tf.zeros([], tf.int64), summed=False)
        self._weight = local_variable(tf.zeros([], WEIGHT_DTYPE))
        self._kinds = local_variable(tf.zeros([len(variables)], tf.int32), summed=False)
        self.updates = _global_variable(0)
        self.length = _global_variable(length)
        self._kinds_seen: set[tuple[int, ...]] = set()
        # Reductions over replicas are packed only in a graph.
        self._compiled_sums = tf.function(self._sums, autograph=False)
        self._compiled_reset = tf.function(self._reset, autograph=False)
        self._compiled_reserve = tf.function(self._reserve_rows, autograph=False)

    def refuse_replica_context(self, name: str) -> None:
        """Raise if the calling code runs inside `strategy.run`."""
        refuse_inside(tf.distribute.get_replica_context(), self._scope, name)

    def refuse_wrong_replica(self) -> None:
        """Raise if the calling code is not where this window's gradients come from."""
        refuse_elsewhere(tf.distribute.get_replica_context(), self._scope)

    def add(self, gradients: list[Any], weight: Any, repeated: list[bool]) -> None:
        """Add one micro-batch on this replica; the arguments have been checked.

        Args:
            gradients: one for each variable.
            weight: what the micro-batch counts for.
            repeated: for each variable, whether every micro-batch has the same rows.
        """
        kinds = tuple(kind_of(gradient) for gradient in gradients)
        self._kinds_seen.add(kinds)
        pairs = list(zip(self._buffers, gradients))
        gradients = [None if g is None else buffer.ensured(g) for buffer, g in pairs]
        # What is asserted when the graph runs, the weight and shapes that were not known when
        # it was traced, comes before every change.
        asserted = [] if tf.executing_eagerly() else [weight]
        # By one, the default, nothing has to be multiplied.
        factor = None if tf.get_static_value(weight) == 1 else weight
        for given, ensured in zip((g for _, g in pairs), gradients):
            if ensured is not given:
                asserted.append(ensured.values if kind_of(ensured) == ROWS else ensured)
        with tf.control_dependencies(asserted):
            changes = [
                buffer.add(gradient, factor, self.length, is_repeated=is_repeated)
                for buffer, gradient, is_repeated in zip(self._buffers, gradients, repeated)
                if gradient is not None
            ]
            self._kinds.assign(tf.bitwise.bitwise_or(self._kinds.read_value(), list(kinds)))
            self._weight.assign_add(weight)
        # Last: who reads it in a graph finds the micro-batch added.
        with tf.control_dependencies([] if tf.executing_eagerly() else changes):
            self._micro_batches.assign_add(1)

    def total_weight(self) -> Any:
        """Return the weight of the window, over all replicas."""
        with outside_strategy_scope():
            return self._weight.read_value()

    def micro_batches(self) -> Any:
        """Return the number of micro-batches; outside `strategy.run` of the busiest replica."""
        return tf.reduce_max(self._on_each_replica(self._micro_batches), axis=0)

    def micro_batches_now(self) -> int:
        """Return the number of micro-batches of the busiest replica; called eagerly."""
        return max(int(value) for value in self._values_now(self._micro_batches))

    def length_now(self) -> int:
        """Return how many micro-batches the window is to have; called eagerly."""
        return int(self._values_now(self.length)[0])

    def updates_now(self) -> int:
        """Return the number of updates made; called eagerly."""
        return int(self._values_now(self.updates)[0])

    def kinds(self) -> Any:
        """Return what the window holds for each variable, as a tensor.

        A replica may have skipped a micro-batch, or had no gradient for a variable; what
        counts is what any replica of this process has.
        """
        kinds, *others = self._on_each_replica(self._kinds)
        for other in others:
            kinds = tf.bitwise.bitwise_or(kinds, other)
        return kinds

    def kinds_now(self) -> tuple[int, ...]:
        """Return what the window holds for each variable; called eagerly."""
        kinds = self._values_now(self._kinds)
        return tuple(functools.reduce(operator.or_, kinds).tolist())

    def _values_now(self, variable: Any) -> list[Any]:
        """Return the values of a variable on all replicas of this process; called eagerly.

        Not by its `numpy()`, which takes several times as long.
        """
        return [
            tf.raw_ops.ReadVariableOp(resource=local.handle, dtype=local.dtype).numpy()
            for local in self.strategy.experimental_local_results(variable)
        ]

    def foreseen_kinds(self) -> list[tuple[int, ...]]:
        """Return what windows are likely to hold, while a graph is traced.

        Each set of variables that micro-batches had gradients for, and all of them together.
        """
        with tf.init_scope():
            seen = {kinds for kinds in (*self._kinds_seen, self.kinds_now()) if any(kinds)}
        together = tuple(functools.reduce(operator.or_, kinds) for kinds in zip(*seen))
        return sorted(seen | {together} if together else seen)

    def holds(self, kinds: tuple[int, ...]) -> Any:
        """Say whether the window holds just `kinds`, as a boolean tensor."""
        return tf.reduce_all(self.kinds() == list(kinds))

    def _on_each_replica(self, variable: Any) -> list[Any]:
        """Return the values of a variable on this replica, or on all of this process."""
        context = tf.distribute.get_replica_context()
        if context is not None and context.strategy is self.strategy:
            return [variable.read_value()]
        local = self.strategy.experimental_local_results(variable)
        return [replica.read_value() for replica in local]

    def mean(self, kinds: tuple[int, ...]) -> list[Any]:
        """Return the weighted mean over micro-batches and replicas, as a tape would give it."""
        weight, *sums = self._sums(kinds)
        # Zero if every micro-batch had weight zero: then so is the mean.
        scale = tf.math.reciprocal_no_nan(weight)
        return [
            as_gradient_of(variable, value, scale)
            for variable, value in zip(self._variables, sums)
        ]

    def open(self, kinds: tuple[int, ...], length: Any) -> None:
        """Begin the next window, after an update of one that held these kinds, in a graph."""
        self._reset(kinds)
        self.updates.assign_add(1)
        self.length.assign(length)

    def reserve(self) -> None:
        """Make room on every replica for functions that XLA has compiled."""
        rows = tuple(buffer.rows_per_microbatch for buffer in self._buffers)
        if any(rows):
            with outside_strategy_scope():
                self._compiled_reserve(rows)

    def reset(self) -> None:
        """Forget what the window holds."""
        with outside_strategy_scope():
            self._compiled_reset()

    def snapshot(self) -> dict[str, Any]:
        """Return the window as arrays, summed over the replicas."""
        with outside_strategy_scope():
            kinds = self.kinds_now()
            weight, *sums = self._compiled_sums(kinds)
            return {
                "updates": self.updates.read_value().numpy(),
                "micro_batches": self.micro_batches().numpy(),
                "weight": weight.numpy(),
                **arrays_of(sums),
                "kinds": np.array(kinds, np.int32),
            }

    def restore(self, arrays: Mapping[str, np.ndarray], length: int) -> None:
        """Make the window what `snapshot` returned, whatever the number of replicas was."""
        sums = sums_of(arrays, self._variables, tf.constant)
        self.reset()
        for buffer, value in zip(self._buffers, sums):
            if isinstance(value, tf.Tensor):
                with outside_strategy_scope():
                    buffer.allocate()

        def put() -> None:
            self._kinds.assign(arrays["kinds"])
            self._micro_batches.assign(arrays["micro_batches"])
            # The sum over all replicas goes to the first; the others hold zero.
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            if tf.get_static_value(replica) == 0:
                self._weight.assign(arrays["weight"])
                for buffer, value in zip(self._buffers, sums):
                    buffer.put(value)

        with outside_strategy_scope():
            tf.function(lambda: self.strategy.run(put), autograph=False)()
            self.updates.assign(arrays["updates"])
            self.length.assign(length)
            self.reserve()

    def _sums(self, kinds: tuple[int, ...]) -> list[Any]:
        """Return the weight and the sums of the window over all replicas."""

        def local() -> list[Any]:
            values = (buffer.value(kind) for buffer, kind in zip(self._buffers, kinds))
            return [self._weight.read_value(), *values]

        return replicas.sum_from_outside(self.strategy, self._variables, local)

    def _reserve_rows(self, rows: tuple[int, ...]) -> None:
        def local() -> None:
            for buffer, count in zip(self._buffers, rows):
                if count:
                    buffer.reserve(self.length)

        self.strategy.run(local)

    def _reset(self, kinds: tuple[int, ...] | None = None) -> None:
        def local() -> None:
            for buffer, kind in zip(
                self._buffers, kinds or [DENSE | ROWS] * len(self._buffers)
            ):
                buffer.reset(kind)
            self._kinds.assign(tf.zeros_like(self._kinds.read_value()))
            self._weight.assign(0)
            self._micro_batches.assign(0)

        self.strategy.run(local)


def _global_variable(value: int) -> Any:
    return tf.Variable(
        tf.constant(value, tf.int64),
        trainable=False,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )
