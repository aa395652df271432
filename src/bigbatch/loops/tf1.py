"""`GradientAccumulator` for TensorFlow 1.14, in eager code: plain Python, no graph.

This file, with `core/`, is all of bigbatch that runs on TensorFlow 1 and on Python 3.7.
"""

from __future__ import annotations

import functools
import io
from typing import Any, Iterable, List, NamedTuple

import numpy as np
import tensorflow as tf

from bigbatch.core.loop_checks import (
    checked_gradients,
    checked_optimizer,
    checked_variables,
    checked_weight,
    refuse_elsewhere,
    refuse_inside,
)
from bigbatch.core.window import AccumulationSteps, is_full, window_length
from bigbatch.core.window_arrays import arrays_of, sums_of
from bigbatch.errors import ContextError, explain


class _Part(NamedTuple):
    """What one replica has accumulated since the last update."""

    sums: List[Any]
    weight: float
    micro_batches: int


class GradientAccumulator(tf.train.experimental.PythonState):
    r"""Adds up the gradients of micro-batches and makes one update of them.

    With g the gradient and w the weight of each micro-batch i on each replica r of a window,
    the optimizer gets

        Σ_ir w_ir · g_ir / Σ_ir w_ir

    once per window: the gradient of the full batch, if g is the gradient of a micro-batch's
    *mean* loss and w what that mean divides by (samples, valid tokens, summed weights).

    This is the class for TensorFlow 1.14 after `tf.enable_eager_execution()`. It does what
    that for TensorFlow 2 does, and its checkpoints can be restored there; it cannot be called
    inside `tf.function`, and what it counts are Python numbers.

    Under `tf.distribute.MirroredStrategy` build it in `strategy.scope()`, call `accumulate`
    inside `strategy.experimental_run_v2` and `apply_when_full` and `flush` outside. g is then
    the gradient of the replica's own mean. The optimizer sums over the replicas once more: it
    gets shares.

    Args:
        optimizer: any object with `apply_gradients(pairs)`: those of `tf.train` and of
            `tf.keras.optimizers`. It is not changed.
        variables: the variables to update, in the order of the gradients.
        accumulation_steps: micro-batches per update: a positive integer, a function from
            the number of updates made to one (a batch-size schedule), or `None`: only
            `flush` updates.
    """

    def __init__(
        self,
        optimizer: Any,
        variables: Iterable[Any],
        *,
        accumulation_steps: AccumulationSteps = None,
    ) -> None:
        _refuse_graph("GradientAccumulator()")
        self._length = window_length(accumulation_steps, updates=0)
        self._accumulation_steps = accumulation_steps
        self._variables = checked_variables(variables)
        self._optimizer = checked_optimizer(optimizer)
        strategy = tf.distribute.get_strategy()
        self._scope = strategy if tf.distribute.has_strategy() else None
        self._updates = 0
        self.reset()

    @property
    def step(self) -> int:
        """The number of micro-batches in the window so far, of the busiest replica."""
        return max((part.micro_batches for part in self._parts.values()), default=0)

    @property
    def total_weight(self) -> float:
        """The weight of the window so far, over all replicas."""
        self._refuse_replica_context("total_weight")
        return sum((part.weight for part in self._parts.values()), 0.0)

    @property
    def is_full(self) -> bool:
        """Whether the window holds `accumulation_steps` micro-batches."""
        return is_full(self.step, self._length)

    @property
    def gradients(self) -> list[Any]:
        """The weighted mean of the window so far: what an update now would hand over.

        A variable that had no gradient in this window has `None`.
        """
        self._refuse_replica_context("gradients")
        weight = self.total_weight
        # Zero if every micro-batch had weight zero: then so is the mean.
        scale = 1 / weight if weight else 0.0
        pairs = zip(self._sums(), self._variables)
        return [scaled(value, scale, variable, variable.dtype) for value, variable in pairs]

    def accumulate(self, gradients: Iterable[Any], weight: Any = 1) -> None:
        """Add the gradients of one micro-batch to the window.

        Args:
            gradients: one for each variable: a tensor, `IndexedSlices` (kept sparse), or
                `None` if the micro-batch does not touch the variable.
            weight: what the micro-batch counts for: a number or a scalar tensor, not
                negative. With zero the gradients are ignored, even if they are NaN.
        """
        _refuse_graph("accumulate()")
        context = tf.distribute.get_replica_context()
        refuse_elsewhere(context, self._scope)
        gradients = checked_gradients(gradients, self._variables, tf.convert_to_tensor)
        # Python counts in float64: it counts tokens exactly, float32 stops at 2**24.
        to_tensor = functools.partial(tf.convert_to_tensor, dtype_hint=tf.float64)
        _, number = checked_weight(weight, to_tensor, tf.get_static_value)
        replica = int(context.replica_id_in_sync_group)
        part = self._parts.get(replica) or self._empty()
        sums = [
            _added(value, scaled(gradient, number, variable))
            for value, gradient, variable in zip(part.sums, gradients, self._variables)
        ]
        self._parts[replica] = _Part(sums, part.weight + number, part.micro_batches + 1)

    def apply_when_full(self) -> bool:
        """Make one update and start over, if the window is full; return whether it is."""
        self._refuse_replica_context("apply_when_full()")
        return self._update_if(self.is_full)

    def flush(self) -> bool:
        """Make one update of what the window holds, and start over; `False` if it is empty."""
        self._refuse_replica_context("flush()")
        return self._update_if(self.step > 0)

    def reset(self) -> None:
        """Forget what the window holds."""
        self._refuse_replica_context("reset()")
        self._parts: dict[int, _Part] = {}

    def serialize(self) -> bytes:
        """Return the state as bytes; called by `tf.train.Checkpoint`."""
        file = io.BytesIO()
        np.savez(
            file,
            updates=np.int64(self._updates),
            micro_batches=np.int64(self.step),
            weight=np.float64(self.total_weight),
            **arrays_of(self._sums()),
        )
        return file.getvalue()

    def deserialize(self, string_value: bytes) -> None:
        """Restore the state from bytes; called by `tf.train.Checkpoint`."""
        with np.load(io.BytesIO(string_value)) as file:
            arrays = dict(file)
        sums = sums_of(arrays, self._variables, tf.constant)
        sums = [
            _rows(*value, variable) if isinstance(value, tuple) else value
            for value, variable in zip(sums, self._variables)
        ]
        # The sum over all replicas goes to the first.
        weight, micro_batches = float(arrays["weight"]), int(arrays["micro_batches"])
        self._parts = {0: _Part(sums, weight, micro_batches)} if micro_batches else {}
        self._updates = int(arrays["updates"])
        self._length = window_length(self._accumulation_steps, self._updates)

    def _empty(self) -> _Part:
        return _Part([None] * len(self._variables), 0.0, 0)

    def _sums(self) -> list[Any]:
        """Return the sums of the window over all replicas."""
        sums = self._empty().sums
        for _, part in sorted(self._parts.items()):
            sums = [_added(one, other) for one, other in zip(sums, part.sums)]
        return sums

    def _update_if(self, due: bool) -> bool:
        _refuse_graph("apply_when_full() or flush()")
        if not due:
            return False
        # A schedule that returns nonsense raises here, before anything has changed.
        length = window_length(self._accumulation_steps, self._updates + 1)
        self._apply(self.gradients)
        self._updates += 1
        self._length = length
        self.reset()
        return True

    def _apply(self, gradients: list[Any]) -> None:
        """Make one update of gradients that are those of all replicas."""
        if self._scope is None:
            self._optimizer.apply_gradients(list(zip(gradients, self._variables)))
            return
        # Optimizers sum over the replicas, whatever they are told: each gets its share.
        share = 1 / self._scope.num_replicas_in_sync

        def on_each_replica() -> None:
            pairs = zip(gradients, self._variables)
            self._optimizer.apply_gradients(
                [(scaled(gradient, share, v, v.dtype), v) for gradient, v in pairs]
            )

        with self._scope.scope():
            self._scope.extended.call_for_each_replica(on_each_replica)

    def _refuse_replica_context(self, name: str) -> None:
        """Raise if the calling code runs inside `experimental_run_v2`."""
        refuse_inside(tf.distribute.get_replica_context(), self._scope, name)


def scaled(value: Any, factor: float, variable: Any, dtype: Any = None) -> Any:
    """Return `factor * value`, a gradient of `variable`, in `dtype` or in at least float32.

    A factor of zero makes zeros, even of a NaN.
    """
    if value is None:
        return None
    if isinstance(value, tf.IndexedSlices):
        return _rows(scaled(value.values, factor, variable, dtype), value.indices, variable)
    own = tf.as_dtype(variable.dtype)
    wide = tf.cast(value, tf.float32 if own.size < 4 else own)
    product = wide * tf.constant(factor, wide.dtype) if factor else tf.zeros_like(wide)
    return tf.cast(product, dtype or wide.dtype)


def _added(one: Any, other: Any) -> Any:
    """Return the sum of two gradients of one variable, each of any kind."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):
        indices = tf.concat([one.indices, tf.cast(other.indices, one.indices.dtype)], 0)
        values = tf.concat([one.values, other.values], 0)
        return tf.IndexedSlices(values, indices, one.dense_shape)
    return tf.convert_to_tensor(one) + tf.convert_to_tensor(other)


def _rows(values: Any, indices: Any, variable: Any) -> Any:
    """Return rows of a gradient of `variable`, which can be made dense."""
    shape = tf.constant(variable.shape.as_list(), tf.int64)
    return tf.IndexedSlices(values, indices, shape)


def _refuse_graph(name: str) -> None:
    """Raise unless the calling code runs eagerly."""
    if not tf.executing_eagerly():
        raise ContextError(
            explain(
                received=f"{name} with TensorFlow {tf.__version__} in a graph",
                expected="eager code: with TensorFlow 1 there is no accumulation in graphs",
                fix="call tf.enable_eager_execution() at the start and stay outside "
                "tf.function, or use TensorFlow 2.10 or newer",
            )
        )
