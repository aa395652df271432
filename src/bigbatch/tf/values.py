"""Gradient values: dense tensors and `IndexedSlices`, and the types they are added up in."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Iterable

import tensorflow as tf

from bigbatch.tf.compat import under_xla

WEIGHT_DTYPE = tf.float64
"""Weights are added up in float64: it counts tokens exactly, float32 stops at 2**24."""

LARGE = 4096
"""From so many numbers on, passes over them take longer than an operation more."""

NOTHING, DENSE, ROWS = 0, 1, 2
"""What a gradient is, or what a window holds; `DENSE | ROWS` if micro-batches gave both."""


def kind_of(value: Any) -> int:
    """Return what a gradient is: `NOTHING` for `None`, `ROWS` for `IndexedSlices`."""
    if value is None:
        return NOTHING
    return ROWS if isinstance(value, tf.IndexedSlices) else DENSE


def flattened(nest: Any) -> tuple[list[Any], Any]:
    """Return the tensors of a nest, in the type they are added up in, and its kinds.

    A dense tensor is one, `IndexedSlices` are two (values, indices), `None` is none.
    """
    tensors: list[Any] = []
    for leaf in tf.nest.flatten(nest):
        if isinstance(leaf, tf.IndexedSlices):
            tensors += [widen(leaf.values), leaf.indices]
        elif leaf is not None:
            tensors.append(widen(leaf))
    return tensors, tf.nest.map_structure(kind_of, nest)


def packed(tensors: list[Any], kinds: Any) -> Any:
    """Undo `flattened`."""
    left = iter(tensors)
    leaves = []
    for kind in tf.nest.flatten(kinds):
        if kind == ROWS:
            leaves.append(tf.IndexedSlices(next(left), next(left)))
        else:
            leaves.append(None if kind == NOTHING else next(left))
    return tf.nest.pack_sequence_as(kinds, leaves)


def after(results: Iterable[Any]) -> Any:
    """Return a block whose operations wait, in a graph, until `results` are there."""
    if tf.executing_eagerly():
        return contextlib.nullcontext()
    results = [r.values if isinstance(r, tf.IndexedSlices) else r for r in results]
    # One operation to wait for, not as many as there are results, times all that wait.
    return tf.control_dependencies([tf.group(*(r for r in results if r is not None))])


def zeros(shape: Any, dtype: Any) -> Any:
    """Return zeros that TensorFlow does not fold into a constant, which stays in memory."""
    if tf.executing_eagerly():
        return tf.zeros(shape, dtype)
    return tf.raw_ops.Empty(shape=shape, dtype=dtype, init=True)


def widened(dtype: Any) -> Any:
    """Return the type in which values of `dtype` are added up: at least float32."""
    dtype = tf.as_dtype(dtype)
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def widen(value: Any) -> Any:
    """Return a tensor or `IndexedSlices` in the type in which it is added up."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(widen(value.values), value.indices, value.dense_shape)
    return tf.cast(value, widened(value.dtype))


def joined(slices: list[Any]) -> Any:
    """Return several `IndexedSlices` as one with all their rows, in order."""
    return tf.IndexedSlices(
        tf.concat([part.values for part in slices], 0),
        tf.concat([part.indices for part in slices], 0),
        slices[0].dense_shape,
    )


def added(one: Any, other: Any) -> Any:
    """Return the sum of two gradients of one variable, each of any kind."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):
        return joined([one, other])
    return tf.convert_to_tensor(one) + tf.convert_to_tensor(other)


def shaped(gradient: Any, variable: Any) -> Any:
    """Give a gradient the static shape of its variable: some gradient functions lose it."""
    if isinstance(gradient, tf.IndexedSlices):
        gradient.values.set_shape([None, *variable.shape[1:]])
    elif gradient is not None:
        gradient.set_shape(variable.shape)
    return gradient


def as_gradient_of(variable: Any, value: Any, scale: Any = None) -> Any:
    """Return `value * scale` with the shape and type a tape gives a gradient of `variable`."""
    if value is None:
        return None
    if isinstance(value, tf.IndexedSlices):
        shape: Any = tf.TensorShape(variable.shape).as_list()
        return tf.IndexedSlices(
            _scaled(value.values, scale, variable.dtype),
            value.indices,
            tf.constant(shape, tf.int64),
        )
    return _scaled(value, scale, variable.dtype)


def divided(value: Any, by: Any) -> Any:
    """Return `value / by` in the type of `value`; zero if there is nothing."""
    return tf.math.divide_no_nan(value, tf.cast(by, value.dtype))


def times(value: Any, weight: Any) -> Any:
    """Return `value * weight` in the type of `value`, or as a weight if that is no float."""
    value = tf.convert_to_tensor(value)
    if not value.dtype.is_floating:
        value = tf.cast(value, WEIGHT_DTYPE)
    return value * tf.cast(weight, value.dtype)


def half_squared_norm(gradients: Iterable[Any], is_wanted: Any) -> Any:
    """Return half the squared norm of gradients together, as a weight, if it is wanted.

    If not, it is any number, and large ones are passed over. Rows of the same index count as
    their sum.
    """
    many = 4 * LARGE  # a branch takes several operations
    large: list[Any] = []
    small: dict[Any, list[Any]] = {}
    for gradient in gradients:
        if kind_of(gradient) == DENSE and (gradient.shape.num_elements() or many) < many:
            gradient = widen(gradient)
            rows = gradient if gradient.shape.rank else tf.reshape(gradient, [1])
            small.setdefault((gradient.dtype, *rows.shape[1:]), []).append(rows)
        elif gradient is not None:
            large.append(gradient)
    # Of many small ones it is the number of operations that takes time. Each large one is
    # looked at by itself, or all would be in memory until the last is there.
    halves = [
        _half_squared_norm(rows[0] if len(rows) == 1 else tf.concat(rows, 0))
        for rows in small.values()
    ]
    for one in large:
        norm = functools.partial(_half_squared_norm, one)
        halves.append(tf.cond(is_wanted, norm, lambda: tf.zeros([])))
    return tf.cast(tf.add_n(halves or [tf.zeros([])]), WEIGHT_DTYPE)


def _half_squared_norm(gradient: Any) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.cast(tf.nn.l2_loss(widen(gradient)), tf.float32)
    values = tf.reshape(widen(gradient.values), [tf.shape(gradient.indices)[0], -1])
    if under_xla():  # which needs to know how many different rows there are: at most all
        order = tf.argsort(gradient.indices)
        indices = tf.gather(gradient.indices, order)
        is_next = tf.concat([[0], tf.cast(indices[1:] != indices[:-1], tf.int32)], 0)
        sums = tf.math.unsorted_segment_sum(
            tf.gather(values, order), tf.cumsum(is_next), tf.size(indices)
        )
        return _half_squared_norm(sums)
    rows, where = tf.unique(gradient.indices)
    return _half_squared_norm(tf.math.unsorted_segment_sum(values, where, tf.size(rows)))


def _scaled(tensor: Any, scale: Any, dtype: Any) -> Any:
    if scale is not None:
        tensor = tensor * tf.cast(scale, tensor.dtype)
    return tf.cast(tensor, dtype)
