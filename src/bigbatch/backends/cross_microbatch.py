"""Sums over micro-batches, for custom layers that couple the samples of a batch."""

from __future__ import annotations

import importlib
from typing import Any


def cross_microbatch_sum(x: Any) -> Any:
    """Return the sum of a tensor over all micro-batches of a batch, and over replicas.

    Use it in a layer or a loss that needs numbers of the whole batch, in a model that trains
    with `accumulate(model, ..., batch_norm="exact")`. Its gradient is summed in the same
    way, so that the update equals the full batch. If batches are not cut, in plain training,
    evaluation and prediction, it returns the tensor itself.

    Args:
        x: a tensor that has the same shape in every micro-batch, such as a sum over samples.

    Example:
        >>> import keras
        >>> import bigbatch
        >>> class BatchMean(keras.layers.Layer):
        ...     def call(self, x):
        ...         count = keras.ops.cast(keras.ops.shape(x)[0], x.dtype)
        ...         total = bigbatch.cross_microbatch_sum(keras.ops.sum(x, axis=0))
        ...         return x - total / bigbatch.cross_microbatch_sum(count)
        >>> keras.ops.convert_to_numpy(BatchMean()(keras.ops.array([[1.0], [3.0]]))).tolist()
        [[-1.0], [1.0]]
    """
    implementation = _implementation()
    return x if implementation is None else implementation.cross_microbatch_sum(x)


def cross_microbatch_gather(x: Any) -> Any:
    """Return the rows of a tensor of all micro-batches of a batch, in the order of the batch.

    It works like `cross_microbatch_sum`, with the same rule for gradients. The result has a row
    for every sample of the batch, all in the memory of the device: use it for few numbers per
    sample, such as logits or embeddings.

    Args:
        x: a tensor with one row per sample.
    """
    implementation = _implementation()
    return x if implementation is None else implementation.cross_microbatch_gather(x)


def _implementation() -> Any:
    """Return the module that marks sums; `None` on backends where no batch runs in stages."""
    keras = importlib.import_module("keras")
    backend = keras.backend.backend() if hasattr(keras, "backend") else "tensorflow"
    name = {"tensorflow": "tensorflow.exact.markers", "jax": "jax.exact.sums"}.get(backend)
    return name and importlib.import_module(f"bigbatch.backends.{name}")
