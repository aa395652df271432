"""Gradient values: dense tensors and `IndexedSlices`, and the types they are added up in."""

from __future__ import annotations

import contextlib
from typing import Any, Iterable

import tensorflow as tf

from bigbatch.core.window_arrays import DENSE, NOTHING, ROWS

WEIGHT_DTYPE = tf.float64
"""Weights are added up in float64: it counts tokens exactly, float32 stops at 2**24."""

LARGE = 4096
"""From so many numbers on, passes over them take longer than an operation more."""


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


def plus(so_far: Any, part: Any) -> Any:
    """Add `part` to a sum so far; rows are only listed, to be joined once at the end."""
    if part is None:
        return so_far
    rows = isinstance(part, tf.IndexedSlices)
    part = widen(part)
    if so_far is None:
        return [part] if rows else part
    if rows and isinstance(so_far, list):
        return [*so_far, part]
    # Dense in one micro-batch and sparse in another is dense over the whole batch.
    dense = tf.convert_to_tensor(joined(so_far) if isinstance(so_far, list) else so_far)
    return dense + tf.convert_to_tensor(part)


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


def _scaled(tensor: Any, scale: Any, dtype: Any) -> Any:
    if scale is not None:
        tensor = tensor * tf.cast(scale, tensor.dtype)
    return tf.cast(tensor, dtype)
