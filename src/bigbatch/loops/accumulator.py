"""`GradientAccumulator`: gradient accumulation for custom training loops."""

from __future__ import annotations

import functools
import io
from typing import Any, Callable, Iterable

import numpy as np
import tensorflow as tf

from bigbatch.backends.tensorflow.compat import eagerly, outside_strategy_scope, under_xla
from bigbatch.backends.tensorflow.optimizers import adapted
from bigbatch.backends.tensorflow.sparse_rows import has_repeated_rows
from bigbatch.core.loop_checks import checked_gradients, checked_variables
from bigbatch.core.window import is_full, window_length
from bigbatch.errors import ContextError, explain
from bigbatch.loops.checks import checked_among, checked_weight
from bigbatch.loops.window import GradientWindow

_unconverted = tf.autograph.experimental.do_not_convert


class GradientAccumulator(tf.train.experimental.PythonState):
    r"""Adds up the gradients of micro-batches and makes one update of them.

    With g the gradient and w the weight of each micro-batch i on each replica r of a window,
    the optimizer gets

        Σ_ir w_ir · g_ir / Σ_ir w_ir

    once per window: the gradient of the full batch, if g is the gradient of a micro-batch's
    *mean* loss and w what that mean divides by (samples, valid tokens, summed weights).

    Under a `tf.distribute` strategy build it in `strategy.scope()`, call `accumulate` inside
    `strategy.run` (it communicates nothing) and `apply_when_full` and `flush` outside (they
    reduce once). g is then the gradient of the replica's own mean. With `replicas =
    strategy.num_replicas_in_sync` and `samples` this replica's part of the micro-batch:

    - `tf.reduce_mean(per_sample)`: differentiate `loss`; `weight=samples`;
    - a Keras loss object, which divides by `replicas`: differentiate `loss * replicas`;
      `weight=samples`;
    - `tf.nn.compute_average_loss(per_sample, global_batch_size=n)`, n counting the
      micro-batch on all replicas: differentiate `loss * replicas`; `weight=n / replicas`.

    Pass what `optimizer.apply_gradients` would get. With a `LossScaleOptimizer` of Keras 3
    these are the gradients of `optimizer.scale_loss(loss)`, scaled; with one of Keras 2 those
    of `optimizer.get_scaled_loss(loss)` after `optimizer.get_unscaled_gradients`. An infinity
    or NaN in any micro-batch on any replica skips the whole update and lowers the scale.

    It can be saved in the middle of a window: `tf.train.Checkpoint(accumulator=accumulator)`.

    Args:
        optimizer: an optimizer of Keras 3, `tf_keras` or `tf.keras`, `legacy` ones too, a
            `tf.compat.v1.train.Optimizer`, or any object with `apply_gradients(pairs)`. It is
            not changed, but its state is created if it is not yet. Those of Keras are run in
            a graph, others as plain Python, unless the calling code is in a graph itself.
        variables: the variables to update, in the order of the gradients.
        accumulation_steps: micro-batches per update: a positive integer, a function from
            the number of updates made to one (a batch-size schedule), or `None`: only
            `flush` updates.
        repeated_rows: variables whose sparse gradients have the same rows in every micro-batch,
            such as a table of positions, looked up by numbers that do not come from the data.
            Such rows are summed; rows that samples have looked up are listed, one for each, as
            the full batch has them. Inside a `tf.function` whose arguments have a batch size of
            `None` the graph shows it, and this is not needed. Eagerly nothing shows it: equal
            rows prove nothing, as micro-batches may hold the same tokens.

    Example:
        >>> import tensorflow as tf
        >>> import keras
        >>> import bigbatch
        >>> w = tf.Variable(1.0)
        >>> optimizer = keras.optimizers.SGD(learning_rate=1.0)
        >>> accumulator = bigbatch.GradientAccumulator(optimizer, [w], accumulation_steps=2)
        >>> accumulator.accumulate([tf.constant(0.25)], weight=3)  # the mean of 3 samples
        >>> accumulator.apply_when_full()
        False
        >>> accumulator.accumulate([tf.constant(0.75)], weight=1)  # a short micro-batch
        >>> accumulator.apply_when_full()
        True
        >>> float(w)  # 1 - (3 * 0.25 + 1 * 0.75) / 4
        0.625
    """

    def __init__(
        self,
        optimizer: Any,
        variables: Iterable[Any],
        *,
        accumulation_steps: int | Callable[[int], int] | None = None,
        repeated_rows: Iterable[Any] = (),
    ) -> None:
        first_length = window_length(accumulation_steps, updates=0)
        self._accumulation_steps = accumulation_steps
        self._variables = checked_variables(variables)
        self._optimizer = adapted(optimizer, self._variables)
        self._repeated = checked_among(repeated_rows, self._variables)
        self._window = GradientWindow(self._variables, first_length)
        self._graphs: dict[Any, Any] = {}

    def __repr__(self) -> str:
        """Say what is accumulated, for whom, and how far the window is."""
        steps = getattr(self._accumulation_steps, "__name__", self._accumulation_steps)
        count = len(self._variables)
        numbers = sum(tf.TensorShape(one.shape).num_elements() for one in self._variables)
        window = ""
        if tf.executing_eagerly():
            done, length = self._window.micro_batches_now(), self._window.length_now()
            of = f"{done} of {length}" if length else f"{done}"
            window = f", {of} micro-batch{'es' * ((length or done) != 1)}"
        return (
            f"<{type(self).__name__} for {self._optimizer.name}, accumulation_steps={steps}, "
            f"{count} variable{'s' * (count != 1)} ({numbers:,} numbers){window}>"
        )

    @property
    def step(self) -> Any:
        """The number of micro-batches in the window so far, a scalar tensor."""
        return self._window.micro_batches()

    @property
    def total_weight(self) -> Any:
        """The weight of the window so far, over all replicas, a scalar tensor."""
        self._window.refuse_replica_context("total_weight")
        return self._window.total_weight()

    @property
    def is_full(self) -> Any:
        """Whether the window holds `accumulation_steps` micro-batches, a boolean tensor."""
        return is_full(self.step, self._window.length.read_value())

    @property
    @_unconverted
    def gradients(self) -> list[Any]:
        """The weighted mean of the window so far: what an update now would hand over.

        A variable that had no gradient in this window has `None`.
        """
        self._window.refuse_replica_context("gradients")
        with outside_strategy_scope():
            if tf.executing_eagerly():
                return list(self._graph(self._window.mean, self._window.kinds_now())())
            foreseen = self._window.foreseen_kinds()
            if len(foreseen) != 1:
                raise ContextError(
                    explain(
                        received=f"gradients inside tf.function, with {len(foreseen)} sets of "
                        "variables that may have gradients in a window",
                        expected="one set: a graph cannot return a tensor or None",
                        fix="read gradients outside tf.function, or call apply_when_full() or "
                        "flush() after the first accumulate()",
                    )
                )
            message = "bigbatch: this tf.function was traced for other gradients"
            check = tf.debugging.Assert(self._window.holds(foreseen[0]), [message])
            with tf.control_dependencies([check]):
                return self._window.mean(foreseen[0])

    @_unconverted
    def accumulate(self, gradients: Iterable[Any], weight: Any = 1) -> None:
        """Add the gradients of one micro-batch to the window.

        Args:
            gradients: one for each variable: a tensor, `IndexedSlices` (kept sparse), or
                `None` if the micro-batch does not touch the variable.
            weight: what the micro-batch counts for: a number or a scalar tensor, not
                negative. With zero the gradients are ignored, even if they are NaN.
        """
        self._window.refuse_wrong_replica()
        gradients = checked_gradients(gradients, self._variables, tf.convert_to_tensor)
        repeated = [
            given or has_repeated_rows(gradient)
            for given, gradient in zip(self._repeated, gradients)
        ]
        self._window.add(gradients, checked_weight(weight), repeated)

    @_unconverted
    def apply_when_full(self) -> Any:
        """Make one update and start over, if the window is full.

        Returns:
            Whether it did: a `bool`, or a boolean tensor inside `tf.function`.
        """
        self._window.refuse_replica_context("apply_when_full()")
        if tf.executing_eagerly():
            return self._update_if(self._is_full_now())
        return self._update_if(self.is_full)

    @_unconverted
    def flush(self) -> Any:
        """Make one update of what the window holds, and start over; nothing if it is empty.

        Returns:
            Whether there was anything: a `bool`, or a boolean tensor inside `tf.function`.
        """
        self._window.refuse_replica_context("flush()")
        return self._update_if(self.step > 0)

    @_unconverted
    def reset(self) -> None:
        """Forget what the window holds."""
        self._window.refuse_replica_context("reset()")
        self._window.reset()

    def serialize(self) -> bytes:
        """Return the state as bytes; called by `tf.train.Checkpoint`."""
        file = io.BytesIO()
        with eagerly():  # `tf.saved_model.save` asks while it builds a graph
            np.savez(file, **self._window.snapshot())
        return file.getvalue()

    def deserialize(self, string_value: bytes) -> None:
        """Restore the state from bytes; called by `tf.train.Checkpoint`."""
        with np.load(io.BytesIO(string_value)) as file:
            arrays = dict(file)
        self._window.restore(arrays, self._length_after(arrays["updates"]))

    def _is_full_now(self) -> bool:
        """Say whether the window is full; called eagerly, often: it runs few operations."""
        steps = self._accumulation_steps
        length = self._window.length_now() if callable(steps) else window_length(steps, 0)
        return is_full(self._window.micro_batches_now(), length)

    def _update_if(self, due: Any) -> Any:
        is_eager = tf.executing_eagerly()
        if is_eager and not due:
            return False
        with outside_strategy_scope():
            if not is_eager:
                return self._traced_update(due)
            self._update_now()
            return True

    def _update_now(self) -> None:
        """Update, eagerly, with what the window holds."""
        # A schedule that returns nonsense raises here, before anything has changed.
        updates = self._window.updates_now() + 1 if callable(self._accumulation_steps) else 0
        length = self._length_after(updates)
        kinds = self._window.kinds_now()
        if self._optimizer.is_traced:
            # A change of the optimizer's settings calls for a new trace.
            update = self._graph(self._update_and_open, kinds, self._optimizer.settings())
        else:
            self._apply(self._graph(self._window.mean, kinds)())
            update = self._graph(self._window.open, kinds)
        update(tf.convert_to_tensor(length, tf.int64))
        self._window.reserve()

    def _traced_update(self, due: Any) -> Any:
        """Update, if it is due, inside the caller's graph.

        What the window holds is not yet known. What was foreseen is traced; anything else is
        left to Python, when the graph runs.
        """
        foreseen = self._window.foreseen_kinds()
        branches = [functools.partial(self._foreseen_update, kinds) for kinds in foreseen]
        matches = [self._window.holds(kinds) for kinds in foreseen]
        # One choice, not one inside another: every variable has to pass through each.
        index = tf.argmax([~due, *matches, True], output_type=tf.int32)
        return tf.switch_case(index, [lambda: False, *branches, self._unforeseen_update])

    def _foreseen_update(self, kinds: tuple[int, ...]) -> Any:
        if callable(self._accumulation_steps):
            if under_xla():
                raise ContextError(
                    explain(
                        received="a schedule as accumulation_steps inside jit_compile=True",
                        expected="a number: XLA cannot call the schedule, which is Python",
                        fix="call apply_when_full() after the compiled function, not in it",
                    )
                )
            updates = self._window.updates.read_value() + 1
            length = tf.numpy_function(self._length_after, [updates], tf.int64)
        else:
            length = tf.constant(self._length_after(0))
        with tf.control_dependencies([length]):
            self._update_and_open(kinds, length)
            self._window.reserve()
        return True

    def _unforeseen_update(self) -> Any:
        if under_xla():
            # Which can neither call Python nor fail: the window is left for a call outside.
            return tf.constant(False)
        if self._window.strategy.num_replicas_in_sync > 1:
            message = (
                "bigbatch: the window holds gradients of variables that had none when this "
                "tf.function was traced. Call apply_when_full() and flush() outside it."
            )
            with tf.control_dependencies([tf.debugging.Assert(False, [message])]):
                return tf.constant(True)

        def update() -> Any:
            with tf.init_scope(), outside_strategy_scope():
                self._update_now()
            return True

        # What the window holds has to be there before Python looks at it.
        with tf.control_dependencies([self._window.micro_batches()]):
            return tf.py_function(update, [], tf.bool)

    def _graph(
        self, function: Callable[..., Any], kinds: tuple[int, ...], settings: Any = None
    ) -> Any:
        """Return `function` of `kinds` and of tensors, traced once for a set of kinds.

        TensorFlow, too, could look it up by its arguments, and takes milliseconds for many;
        and for every call a quarter of one, for the variables of a graph.
        """
        key = (function.__name__, kinds, settings)
        if key in self._graphs:
            return self._graphs[key]
        traced = tf.function(functools.partial(function, kinds), autograph=False)

        def first(*tensors: Any) -> Any:
            result = traced(*tensors)  # may create variables: some optimizers do
            self._graphs[key] = traced.get_concrete_function(*tensors)
            return result

        return first

    def _update_and_open(self, kinds: tuple[int, ...], length: Any) -> None:
        """Update with a window that holds these kinds and begin the next, in a graph."""
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        self._apply(self._window.mean(kinds))
        changes = [op for op in graph.get_operations()[before:] if not op.outputs]
        # Zeros for the next window come when the sums of this one have been used: before, they
        # would be one more gradient set in memory.
        with tf.control_dependencies([tf.group(*changes)]):
            self._window.open(kinds, length)

    def _apply(self, gradients: list[Any]) -> None:
        self._optimizer.apply(self._window.strategy, gradients)

    def _length_after(self, updates: Any) -> Any:
        return np.int64(window_length(self._accumulation_steps, int(updates)))
