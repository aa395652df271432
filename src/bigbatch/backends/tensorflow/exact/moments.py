"""The statistics of batch normalisation over the whole batch."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from bigbatch.backends.tensorflow.exact.markers import cross_microbatch_sum
from bigbatch.backends.tensorflow.values import WEIGHT_DTYPE


def moments_of_batch(
    inputs: Any, axes: list[int], mask: Any, shift: Any, epsilon: float
) -> tuple[Any, Any]:
    """Return mean and variance of the whole batch, given the inputs of a micro-batch.

    With n the elements of a micro-batch, m their mean and M the sum of their squared distances
    from it, and d = m − shift: N = Σn, S = Σnd, Q = Σ(M + nd²) are added up over micro-batches,
    and the mean is shift + S/N, the variance (Q − S²/N)/N. The sums are of float64, about a
    `shift` near the mean: about zero in float32, at a mean of 1000 nothing would be left.

    Args:
        inputs: what is normalised.
        axes: the axes that statistics are taken over.
        mask: what counts, of the shape of `inputs` without the last axis; or `None`.
        shift: a vector near the mean, the same for all micro-batches.
        epsilon: what Keras adds to the count of elements if there is a mask.
    """
    shift = tf.stop_gradient(tf.cast(shift, WEIGHT_DTYPE))
    if mask is None:
        mean, variance = tf.nn.moments(inputs, axes)
        variance = tf.cast(variance, WEIGHT_DTYPE)
        count = tf.cast(tf.size(inputs), WEIGHT_DTYPE) / tf.cast(tf.size(mean), WEIGHT_DTYPE)
        squares = count * variance
    else:
        counts = tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(inputs))
        count = tf.reduce_sum(tf.cast(counts, WEIGHT_DTYPE), axes)
        total = tf.reduce_sum(tf.where(counts, inputs, tf.zeros_like(inputs)), axes)
        mean = tf.math.divide_no_nan(total, tf.cast(count, total.dtype))
        near = tf.stop_gradient(mean)[(None,) * len(axes)]
        distance = tf.where(counts, inputs - near, tf.zeros_like(inputs))
        squares = tf.cast(tf.reduce_sum(tf.square(distance), axes), WEIGHT_DTYPE)
    distance = tf.cast(mean, WEIGHT_DTYPE) - shift
    count_of_batch = cross_microbatch_sum(count)
    first = cross_microbatch_sum(count * distance)
    second = cross_microbatch_sum(squares + count * tf.square(distance))
    divisor = count_of_batch if mask is None else count_of_batch + epsilon
    mean = (first + count_of_batch * shift) / divisor
    moved = mean - shift
    squares = second - 2 * moved * first + count_of_batch * tf.square(moved)
    variance = tf.maximum(squares / divisor, 0)
    return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)
