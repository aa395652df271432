"""Where the gradients of a window are added up, variable by variable."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from bigbatch.backends.tensorflow.compat import under_xla
from bigbatch.backends.tensorflow.values import DENSE, LARGE, NOTHING, ROWS, widened
from bigbatch.backends.tensorflow.variables import (
    ANY_SHAPE,
    add_to,
    local_variable,
    subtract_from,
)
from bigbatch.core.window import UNTIL_FLUSH
from bigbatch.errors import ContextError, explain


class GradientBuffer:
    """The weighted sum of one variable's gradients over a window, on each replica its own.

    Dense gradients are added to one tensor. Rows (`IndexedSlices`) are appended to a list of
    rows, which grows with the rows touched, not with the table, and keeps repeated indices
    apart, as the full batch does. Neither takes memory before it is first needed: whether a
    variable's gradients are dense or sparse is seen only when they arrive, perhaps in the
    middle of a trace, where no variable can be created any more.
    """

    def __init__(self, variable: Any) -> None:
        self.shape = tf.TensorShape(variable.shape)
        self.dtype = widened(variable.dtype)
        self._strategy = tf.distribute.get_strategy()
        self._has_sum = False
        self._sum = local_variable(tf.zeros([0], self.dtype), ANY_SHAPE)
        self.rows_per_microbatch = 0
        """Rows that a compiled function appends, if there is one: see `_prepare_compiled`."""
        if self.shape.rank:
            inner = self.shape[1:]
            self._values = local_variable(
                tf.zeros([0, *inner], self.dtype), tf.TensorShape([None, *inner])
            )
            self._indices = local_variable(tf.zeros([0], tf.int64), tf.TensorShape([None]))
            self._used = local_variable(tf.zeros([], tf.int64))

    def ensured(self, gradient: Any) -> Any:
        """Return `gradient`, with an assertion of its shape if that is not known yet."""
        if isinstance(gradient, tf.IndexedSlices):
            if gradient.values.shape[1:].is_fully_defined():
                return gradient
            values = tf.ensure_shape(gradient.values, [None, *self.shape[1:]])
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        if gradient.shape.is_fully_defined():
            return gradient
        return tf.ensure_shape(gradient, self.shape)

    def add(
        self,
        gradient: Any,
        weight: Any = None,
        window_length: Any = UNTIL_FLUSH,
        *,
        is_repeated: bool = False,
    ) -> Any:
        """Add `weight * gradient`; a weight of zero adds nothing, even of a NaN.

        `window_length` is the variable that holds how many micro-batches a window has. Rows
        that are repeated in every micro-batch are added to those of the first.

        Returns:
            In a graph, its value when this is done.
        """
        rows = isinstance(gradient, tf.IndexedSlices)
        value = tf.cast(gradient.values if rows else gradient, self.dtype)
        weight = weight if weight is None else tf.cast(weight, self.dtype)
        if not rows and weight is not None and self.shape.num_elements() >= LARGE:
            self.allocate()
            # A weight of zero is skipped: times zero, a NaN would stay one.
            # `multiply_no_nan` is far slower.
            return tf.cond(weight > 0, lambda: self._add_times(value, weight), lambda: False)
        if weight is not None:
            value = tf.math.multiply_no_nan(value, weight)
        if rows:
            indices = tf.cast(gradient.indices, tf.int64)
            if not is_repeated:
                return self._append(value, indices, window_length)
            return tf.cond(
                tf.equal(self._used.read_value(), 0),
                lambda: _true_after(self._append(value, indices, window_length)),
                lambda: _true_after(self._add_to_first(value, indices)),
            )
        self.allocate()
        return add_to(self._sum, value)

    def _add_times(self, value: Any, weight: Any) -> bool:
        subtract_from(self._sum, -weight, value)
        return True

    def allocate(self) -> None:
        """Take the memory for dense gradients, on every replica of this process."""
        if not self._has_sum:
            with tf.init_scope():
                for local in self._strategy.experimental_local_results(self._sum):
                    local.assign(tf.zeros(self.shape, self.dtype))
            self._has_sum = True

    def value(self, kind: int) -> Any:
        """Return this replica's sum: a tensor, `IndexedSlices`, or `None` if there is none."""
        if kind == NOTHING:
            return None
        if kind == DENSE:
            return tf.ensure_shape(self._sum.read_value(), self.shape)
        used = self._used.read_value()
        capacity = tf.shape(self._indices.read_value(), tf.int64)[0]
        with tf.control_dependencies(
            [
                tf.debugging.assert_less_equal(
                    used,
                    capacity,
                    message="bigbatch: a function compiled with jit_compile=True accumulated "
                    "more micro-batches than accumulation_steps and lost sparse rows",
                )
            ]
        ):
            values = self._values.read_value()[:used]
        indices = self._indices.read_value()[:used]
        if kind == ROWS:
            return tf.IndexedSlices(values, indices)
        # Dense in one micro-batch and sparse in another is dense over the whole window.
        dense = tf.ensure_shape(self._sum.read_value(), self.shape)
        return tf.tensor_scatter_nd_add(dense, indices[:, tf.newaxis], values)

    def reset(self, kind: int = DENSE | ROWS) -> None:
        """Start over on this replica, from a sum of this kind.

        A NaN does not survive, as it would `sum * 0`.
        """
        if kind & DENSE:
            self._sum.assign(tf.zeros_like(self._sum.read_value()))
        if kind & ROWS:
            self.forget_rows()

    def forget_rows(self) -> None:
        """Have no rows on this replica."""
        if self.shape.rank:
            self._used.assign(0)

    def put(self, value: Any) -> None:
        """Make a tensor, or values and indices, this replica's sum; the buffer has no rows."""
        if isinstance(value, tuple):
            self._append(value[0], tf.cast(value[1], tf.int64), UNTIL_FLUSH)
        elif value is not None:
            self._has_sum = True
            self._sum.assign(value)

    def reserve(self, window_length: Any, rows: Any = 0) -> None:
        """Make room for `rows` more, and for a window of a function that cannot do so."""
        compiled = tf.cast(window_length, tf.int64) * self.rows_per_microbatch
        self._grow_to(self._used.read_value() + rows + compiled)

    def _append(self, values: Any, indices: Any, window_length: Any) -> Any:
        used = self._used.read_value()
        count = tf.shape(indices, tf.int64)[0]
        if under_xla():
            self._prepare_compiled(indices.shape[0], window_length)
        else:
            self.reserve(window_length, count)
        where = used + tf.range(count)
        changes = [
            tf.raw_ops.ResourceScatterUpdate(
                resource=variable.handle, indices=where, updates=rows
            )
            for variable, rows in ((self._values, values), (self._indices, indices))
        ]
        with tf.control_dependencies(changes if not tf.executing_eagerly() else []):
            return self._used.assign_add(count, read_value=False)

    def _add_to_first(self, values: Any, indices: Any) -> Any:
        """Add rows to those that the first micro-batch of the window has put down."""
        first = self._indices.read_value()[: tf.shape(indices)[0]]
        check = tf.debugging.assert_equal(
            first,
            indices,
            message="bigbatch: repeated_rows that are not those of the first "
            "micro-batch of the window",
        )
        with tf.control_dependencies([] if check is None else [check]):
            return tf.raw_ops.ResourceScatterAdd(
                resource=self._values.handle, indices=tf.range(tf.size(indices)), updates=values
            )

    def _prepare_compiled(self, rows: int | None, window_length: Any) -> None:
        """XLA cannot change the shape of a variable: make room while tracing."""
        with tf.init_scope():
            length = int(window_length.read_value())
            if rows is None or length == UNTIL_FLUSH:
                raise ContextError(
                    explain(
                        received="sparse gradients inside jit_compile=True, with "
                        + (
                            "an unknown number of rows" if length else "accumulation_steps=None"
                        ),
                        expected="a number of rows that is known: XLA cannot grow a buffer",
                        fix="return the gradients from the compiled function and call "
                        "accumulate() outside it",
                    )
                )
            self.rows_per_microbatch = max(self.rows_per_microbatch, rows)
            self.reserve(length)

    def _grow_to(self, rows: Any) -> None:
        capacity = tf.shape(self._indices.read_value(), tf.int64)[0]

        def grow() -> Any:
            # At least doubled, so that appending costs a constant per row on the whole.
            extra = tf.maximum(rows, 2 * capacity) - capacity
            for variable in (self._values, self._indices):
                old = variable.read_value()
                shape = tf.concat([[extra], tf.shape(old, tf.int64)[1:]], 0)
                variable.assign(tf.concat([old, tf.zeros(shape, old.dtype)], 0))
            return True

        tf.cond(rows > capacity, grow, lambda: False)


def _true_after(change: Any) -> Any:
    """Return what a branch returns that has changed something."""
    with tf.control_dependencies([] if tf.executing_eagerly() else [change]):
        return tf.constant(True)
