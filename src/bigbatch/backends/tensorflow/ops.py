"""The operations on tensors that the engine is written with."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Sequence

import numpy as np
import tensorflow as tf

from bigbatch.backends.tensorflow.compat import under_xla
from bigbatch.backends.tensorflow.exact.backward import weighted_gradients
from bigbatch.backends.tensorflow.values import (
    WEIGHT_DTYPE,
    added,
    as_gradient_of,
    divided,
    flattened,
    packed,
    times,
    widen,
)

__all__ = [
    "added",
    "as_gradient_of",
    "as_type",
    "ceil",
    "dense",
    "divided",
    "flatten",
    "is_tensor",
    "like",
    "map_structure",
    "maximum",
    "mean",
    "noted",
    "numpy",
    "ones",
    "pack",
    "rank",
    "rows",
    "rows_together",
    "scaled_unless_one",
    "shaped_like",
    "size",
    "squared_norm",
    "squeeze_last",
    "stack",
    "stop_gradient",
    "sum",
    "take",
    "tensor",
    "times",
    "weight",
    "weighted_gradients",
    "when",
    "where",
]

ceil = tf.math.ceil
flatten = tf.nest.flatten
map_structure = tf.nest.map_structure
pack = tf.nest.pack_sequence_as
is_tensor = tf.is_tensor
stop_gradient = tf.stop_gradient
mean = tf.reduce_mean
maximum = tf.maximum
sum = tf.reduce_sum  # noqa: A001
where = tf.where


def tensor(value: Any) -> Any:
    """Return a value as a tensor."""
    return tf.convert_to_tensor(value)


def numpy(value: Any) -> Any:
    """Return the value of a tensor or variable as an array."""
    return np.asarray(tf.convert_to_tensor(value))


def as_type(array: Any, other: Any) -> Any:
    """Return an array as a tensor of the type of another."""
    return tf.cast(tf.convert_to_tensor(array), other.dtype)


def take(value: Any, positions: Sequence[int]) -> Any:
    """Return copies of some rows of a tensor, which may be sparse."""
    rows = tf.constant(list(positions), tf.int32)
    if isinstance(value, tf.SparseTensor):
        dense = tf.sparse.to_dense(tf.sparse.reorder(value))
        return tf.sparse.from_dense(tf.gather(dense, rows))
    return tf.gather(value, rows)


def rows(value: Any) -> Any:
    """Return a value whose rows, one per sample, are listed and not added."""
    return tf.IndexedSlices(value, tf.range(tf.shape(value)[0]))


def rows_together(slices: Any, dtype: Any) -> Any:
    """Return the rows of a whole batch, in the type that they had in `rows`."""
    return tf.cast(slices.values, dtype)


def when(condition: Any, function: Callable[[], None]) -> None:
    """Call a function if a condition holds, in a graph or eagerly."""

    def called() -> Any:
        function()
        return tf.constant(0)

    tf.cond(condition, called, lambda: tf.constant(0))


def weight(value: Any) -> Any:
    """Return a number in the type that weights are added up in."""
    # A Python number would become float32 first.
    value = tf.constant(value, WEIGHT_DTYPE) if isinstance(value, (int, float)) else value
    return tf.cast(value, WEIGHT_DTYPE)


def noted(value: Any) -> Any:
    """Return a value so that it can be kept after the loss has been differentiated."""
    return value


def like(value: Any, other: Any) -> Any:
    """Return a value in the type of another."""
    return tf.cast(value, other.dtype)


def shaped_like(value: Any, other: Any) -> Any:
    """Return a value in the shape and the type of another."""
    return tf.reshape(tf.cast(value, other.dtype), tf.shape(other))


def dense(value: Any) -> Any:
    """Return a gradient as one tensor, and `None` as it is."""
    return None if value is None else tf.convert_to_tensor(value)


def ones() -> Any:
    """Return the weight one."""
    return tf.ones([], WEIGHT_DTYPE)


def stack(values: Iterable[Any]) -> Any:
    """Return numbers as one vector of weights."""
    return tf.stack([weight(value) for value in values])


def rank(value: Any) -> int | None:
    """Return how many dimensions a tensor has, if that is known."""
    return value.shape.rank


def size(value: Any) -> Any:
    """Return how many elements a tensor has, as a weight."""
    return tf.cast(tf.size(value), WEIGHT_DTYPE)


def squeeze_last(value: Any) -> Any:
    """Return a tensor without its last dimension, of one."""
    return tf.squeeze(value, -1)


def scaled_unless_one(
    gradients: list[list[Any]], variables: list[list[Any]], scale: Any
) -> list[list[Any]]:
    """Return `scale * gradient` for each, without a copy if, as in a full window, it is one."""

    def scaled() -> list[list[Any]]:
        return [
            [as_gradient_of(*pair, scale) for pair in zip(*some)]
            for some in zip(variables, gradients)
        ]

    _, kinds = flattened(gradients)
    tensors = tf.cond(
        scale == 1, lambda: flattened(gradients)[0], lambda: flattened(scaled())[0]
    )
    return packed(tensors, kinds)


def squared_norm(gradients: Iterable[Any]) -> Any:
    """Return the squared norm of gradients together, as a weight.

    Rows of the same index count as their sum.
    """
    norms = [_squared_norm(gradient) for gradient in gradients if gradient is not None]
    return tf.add_n(norms) if norms else tf.zeros([], WEIGHT_DTYPE)


def _squared_norm(gradient: Any) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return 2 * tf.cast(tf.nn.l2_loss(widen(gradient)), WEIGHT_DTYPE)
    values = tf.reshape(widen(gradient.values), [tf.shape(gradient.indices)[0], -1])
    if under_xla():  # which needs to know how many different rows there are: at most all
        order = tf.argsort(gradient.indices)
        indices = tf.gather(gradient.indices, order)
        is_next = tf.concat([[0], tf.cast(indices[1:] != indices[:-1], tf.int32)], 0)
        sums = tf.math.unsorted_segment_sum(
            tf.gather(values, order), tf.cumsum(is_next), tf.size(indices)
        )
        return _squared_norm(sums)
    rows, where = tf.unique(gradient.indices)
    return _squared_norm(tf.math.unsorted_segment_sum(values, where, tf.size(rows)))
