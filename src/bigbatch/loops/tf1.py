"""`GradientAccumulator` for TensorFlow 1.14, in eager code: plain Python, no graph."""

from __future__ import annotations

import io
from typing import Any, Iterable, List, NamedTuple

import numpy as np
import tensorflow as tf

from bigbatch.backends.tensorflow.plain_optimizers import checked_optimizer
from bigbatch.backends.tensorflow.replicas import refuse_elsewhere, refuse_inside, scope_now
from bigbatch.backends.tensorflow.v1_optimizers import apply_shares
from bigbatch.backends.tensorflow.values import (
    WEIGHT_DTYPE,
    added,
    as_gradient_of,
    kind_of,
    widen,
)
from bigbatch.core.window import AccumulationSteps, is_full, window_length
from bigbatch.errors import ContextError, explain
from bigbatch.loops.checks import (
    checked_gradients,
    checked_variables,
    checked_weight,
)
from bigbatch.loops.window_arrays import arrays_of, sums_of


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
        self._scope = scope_now()
        self._updates = 0
        self.reset()

    @property
    def step(self) -> int:
        """The number of micro-batches in the window so far, of the busiest replica."""
        return max((part.micro_batches for part in self._parts.values()), default=0)

    @property
    def total_weight(self) -> float:
        """The weight of the window so far, over all replicas."""
        refuse_inside(self._scope, "total_weight")
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
        refuse_inside(self._scope, "gradients")
        weight = self.total_weight
        # Zero if every micro-batch had weight zero: then so is the mean.
        scale = tf.constant(1 / weight if weight else 0.0, WEIGHT_DTYPE)
        return [
            as_gradient_of(variable, value, scale)
            for variable, value in zip(self._variables, self._sums())
        ]

    def accumulate(self, gradients: Iterable[Any], weight: Any = 1) -> None:
        """Add the gradients of one micro-batch to the window.

        Args:
            gradients: one for each variable: a tensor, `IndexedSlices` (kept sparse), or
                `None` if the micro-batch does not touch the variable.
            weight: what the micro-batch counts for: a number or a scalar tensor, not
                negative. With zero the gradients are ignored, even if they are NaN.
        """
        _refuse_graph("accumulate()")
        refuse_elsewhere(self._scope)
        gradients = checked_gradients(gradients, self._variables)
        weight = checked_weight(weight)
        replica = int(tf.distribute.get_replica_context().replica_id_in_sync_group)
        part = self._parts.get(replica) or self._empty()
        sums = [
            added(value, _weighted(gradient, weight, variable))
            for value, gradient, variable in zip(part.sums, gradients, self._variables)
        ]
        self._parts[replica] = _Part(sums, part.weight + float(weight), part.micro_batches + 1)

    def apply_when_full(self) -> bool:
        """Make one update and start over, if the window is full.

        Returns:
            Whether it did.
        """
        refuse_inside(self._scope, "apply_when_full()")
        return self._update_if(self.is_full)

    def flush(self) -> bool:
        """Make one update of what the window holds, and start over; nothing if it is empty.

        Returns:
            Whether there was anything.
        """
        refuse_inside(self._scope, "flush()")
        return self._update_if(self.step > 0)

    def reset(self) -> None:
        """Forget what the window holds."""
        refuse_inside(self._scope, "reset()")
        self._parts: dict[int, _Part] = {}

    def serialize(self) -> bytes:
        """Return the state as bytes; called by `tf.train.Checkpoint`."""
        file, sums = io.BytesIO(), self._sums()
        np.savez(
            file,
            updates=np.int64(self._updates),
            micro_batches=np.int64(self.step),
            weight=np.float64(self.total_weight),
            kinds=np.array([kind_of(value) for value in sums], np.int32),
            **arrays_of(sums),
        )
        return file.getvalue()

    def deserialize(self, string_value: bytes) -> None:
        """Restore the state from bytes; called by `tf.train.Checkpoint`."""
        with np.load(io.BytesIO(string_value)) as file:
            arrays = dict(file)
        sums = sums_of(arrays, self._variables)
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
            sums = [added(one, other) for one, other in zip(sums, part.sums)]
        return sums

    def _update_if(self, due: bool) -> bool:
        _refuse_graph("apply_when_full() or flush()")
        if not due:
            return False
        # A schedule that returns nonsense raises here, before anything has changed.
        length = window_length(self._accumulation_steps, self._updates + 1)
        gradients, variables = self.gradients, self._variables
        if self._scope is None:
            self._optimizer.apply_gradients(list(zip(gradients, variables)))
        else:
            apply_shares(self._scope, self._optimizer, gradients, variables)
        self._updates += 1
        self._length = length
        self.reset()
        return True


def _weighted(gradient: Any, weight: Any, variable: Any) -> Any:
    """Return `weight * gradient` in the type it is added up in, of one variable."""
    if gradient is None:
        return None
    wide = widen(gradient)
    rows = isinstance(wide, tf.IndexedSlices)
    values = wide.values if rows else wide
    # A weight of zero makes zeros: times zero, a NaN would stay one.
    values = values * tf.cast(weight, values.dtype) if float(weight) else tf.zeros_like(values)
    if not rows:
        return values
    return tf.IndexedSlices(values, wide.indices, tf.constant(variable.shape.as_list()))


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
