"""Rows of a full batch's normal draw, as XLA makes it.

XLA draws uniform numbers for the shape of the whole draw, padded to an even size in one
dimension, and makes normal numbers of neighbours in that dimension: of the pair (u, v) the
first is sin(2πv)·√(−2·ln u), the second the cosine (Box and Muller). The dimension is the first
one of even size, else the largest. If it is that of the samples, two samples share a pair, and
which dimension it is depends on the number of samples in the batch. Decision 0017 has the
experiment.
"""

from __future__ import annotations

import math
from typing import Any, Callable

import tensorflow as tf

Uniform = Callable[[Any, Any], Any]
"""Returns uniform numbers of the draw: from which one on, and how many."""
_LEAST = 1e-7  # the smallest number that XLA takes the logarithm of


def normal_rows(
    uniform: Uniform, shape: Any, inner: list[int], first: Any, total: Any, dtype: Any
) -> Any:
    """Return the rows of a normal draw from row `first` on.

    Args:
        uniform: draws uniform numbers of the same key and counter.
        shape: the shape of the rows wanted.
        inner: its dimensions, but for the first.
        first: the rows before them.
        total: the rows of the whole draw.
        dtype: the type of the numbers.
    """

    def across_samples() -> Any:
        odd = first % 2
        count = tf.cast(shape[0], tf.int64)
        even = count + 2 - count % 2
        flat = uniform((first - odd) * math.prod(inner), even * math.prod(inner))
        rows = _normal(tf.reshape(flat, [even, *inner]), 0, dtype)
        return tf.reshape(rows[odd : odd + count], shape)

    def inside_samples(dimension: int) -> Any:
        padded = list(inner)
        padded[dimension] += padded[dimension] % 2
        numbers = math.prod(padded)
        flat = uniform(first * numbers, tf.cast(shape[0], tf.int64) * numbers)
        rows = _normal(tf.reshape(flat, [-1, *padded]), dimension + 1, dtype)
        return tf.reshape(tf.slice(rows, [0] * (1 + len(inner)), [-1, *inner]), shape)

    if not inner:
        return across_samples()
    even = [number for number, size in enumerate(inner) if size % 2 == 0]
    largest = max(inner)
    is_across = tf.equal(total % 2, 0)
    if not even:
        is_across |= total >= largest
    inside = even[0] if even else inner.index(largest)
    return tf.cond(is_across, across_samples, lambda: inside_samples(inside))


def _normal(uniform: Any, dimension: int, dtype: Any) -> Any:
    """Return normal numbers, made of neighbours in a dimension of even size."""
    shape = tf.shape(uniform)
    pairs = tf.concat([shape[:dimension], [-1, 2], shape[dimension + 1 :]], 0)
    one, other = tf.unstack(tf.reshape(uniform, pairs), num=2, axis=dimension + 1)
    radius = tf.sqrt(
        tf.constant(-2, dtype) * tf.math.log(tf.maximum(one, tf.constant(_LEAST, dtype)))
    )
    angle = tf.constant(2 * math.pi, dtype) * other
    normal = tf.stack([tf.sin(angle) * radius, tf.cos(angle) * radius], dimension + 1)
    return tf.reshape(normal, shape)
