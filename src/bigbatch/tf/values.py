"""Gradient values: dense tensors and `IndexedSlices`, and the types they are added up in."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

WEIGHT_DTYPE = tf.float64
"""Weights are added up in float64: it counts tokens exactly, float32 stops at 2**24."""


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
        return tf.IndexedSlices(
            _scaled(value.values, scale, variable.dtype),
            value.indices,
            tf.constant(list(variable.shape), tf.int64),
        )
    return _scaled(value, scale, variable.dtype)


def _scaled(tensor: Any, scale: Any, dtype: Any) -> Any:
    if scale is not None:
        tensor = tensor * tf.cast(scale, tensor.dtype)
    return tf.cast(tensor, dtype)
