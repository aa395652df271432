"""The statistics of batch normalisation over the whole batch."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from bigbatch.backends.jax.exact.sums import cross_microbatch_sum
from bigbatch.backends.jax.ops import weight_dtype


def moments_of_batch(inputs: Any, axes: list[int], mask: Any, epsilon: float) -> Any:
    """Return mean and variance of the whole batch, given the inputs of a micro-batch.

    The squares are about the mean, which has to be known first: of two sums about zero, in
    float32, nothing would be left at a mean of 1000.

    Args:
        inputs: what is normalised.
        axes: the axes that statistics are taken over.
        mask: what counts, of the shape of `inputs` without the last axis; or `None`.
        epsilon: what Keras adds to the count of elements if there is a mask.
    """
    wide = inputs.astype(weight_dtype())
    counted = True if mask is None else mask[..., None].astype(bool)
    counts = jnp.broadcast_to(jnp.asarray(counted), wide.shape)
    count = cross_microbatch_sum(jnp.sum(counts, axes, dtype=wide.dtype))
    divisor = count if mask is None else count + epsilon
    mean = cross_microbatch_sum(jnp.sum(jnp.where(counts, wide, 0), axes)) / divisor
    shape = [1 if axis in axes else size for axis, size in enumerate(inputs.shape)]
    distance = jnp.where(counts, wide - mean.reshape(shape), 0)
    squares = cross_microbatch_sum(jnp.sum(distance * distance, axes))
    return mean.astype(inputs.dtype), (squares / divisor).astype(inputs.dtype)
