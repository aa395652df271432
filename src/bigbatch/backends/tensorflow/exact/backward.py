"""Where the backward pass of a micro-batch begins, with what the micro-batch counts for.

In a layer that sums over micro-batches their gradients meet. So each must have its weight from
the beginning: weighted after the backward pass, it would be too late.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any, Callable, Iterator

import tensorflow as tf

from bigbatch.backends.tensorflow.exact.markers import markers_now
from bigbatch.backends.tensorflow.values import times

_lock = threading.Lock()
_local = threading.local()  # replicas are traced in threads
_gradient = tf.GradientTape.gradient
_open = 0


@contextlib.contextmanager
def weighted_gradients(weight: Callable[[], Any]) -> Iterator[None]:
    """Return a block in which tapes give gradients of variables times `weight()`.

    Gradients with respect to anything else, as for a gradient penalty, are as they are.
    """
    global _open
    before = getattr(_local, "weight", None)
    with _lock:
        _open += 1
        tf.GradientTape.gradient = functools.wraps(_gradient)(_weighted)
    _local.weight = weight
    try:
        yield
    finally:
        _local.weight = before
        with _lock:
            _open -= 1
            if not _open:
                tf.GradientTape.gradient = _gradient


def _weighted(
    tape: Any, target: Any, sources: Any, output_gradients: Any = None, **options: Any
) -> Any:
    """Do what `GradientTape.gradient` does, with a weight if this thread has one."""
    weight = getattr(_local, "weight", None)
    is_of_weights = any(hasattr(one, "trainable") for one in tf.nest.flatten(sources))
    if weight is None or not is_of_weights:
        return _gradient(tape, target, sources, output_gradients, **options)
    _local.weight = None  # inside of it are tapes of operations that compute once more
    try:
        if output_gradients is None:
            output_gradients = tf.nest.map_structure(tf.ones_like, target)
        seed = functools.partial(_seed, weight=weight())
        begin = tf.nest.map_structure(seed, output_gradients)
        return _gradient(tape, target, sources, begin, **options)
    finally:
        _local.weight = weight


def _seed(value: Any, weight: Any) -> Any:
    """Return the gradient of a loss, times a weight, as the beginning of a backward pass."""
    seed = tf.identity(times(value, weight), name="seed")
    markers = markers_now()
    if markers is not None:
        markers.seeds.add(seed.op.name)
    return seed
