"""Checks of gradients and weights, before anything is changed by them."""

from __future__ import annotations

import functools
from typing import Any, Iterable

import tensorflow as tf

from bigbatch.backends.tensorflow.values import WEIGHT_DTYPE
from bigbatch.core import loop_checks
from bigbatch.errors import ArgumentError, explain


def checked_among(some: Iterable[Any], variables: list[Any]) -> list[bool]:
    """Return for each of `variables` whether it is one of `some`, which all must be."""
    some = list(some)
    known = {id(variable) for variable in variables}
    unknown = [one for one in some if id(one) not in known]
    if unknown:
        raise ArgumentError(
            explain(
                received=f"repeated_rows with {unknown[0]!r}",
                expected="some of the variables whose gradients are accumulated",
                fix="pass the same objects as in variables, for example "
                "repeated_rows=[positions.embeddings]",
            )
        )
    return [any(variable is one for one in some) for variable in variables]


def checked_weight(weight: Any) -> Any:
    """Return the weight as a scalar tensor that is finite and not negative.

    What is known is checked now. In a graph an assertion does it when the graph runs (under
    `jit_compile=True` XLA leaves assertions out).
    """
    to_tensor = functools.partial(tf.convert_to_tensor, dtype_hint=WEIGHT_DTYPE)
    tensor, known = loop_checks.checked_weight(weight, to_tensor, tf.get_static_value)
    tensor = tf.cast(tensor, WEIGHT_DTYPE)
    if known is not None:
        return tensor
    valid = tf.logical_and(tensor >= 0, tf.math.is_finite(tensor))
    message = "bigbatch: the weight of a micro-batch must be finite and not negative; received"
    with tf.control_dependencies([tf.debugging.Assert(valid, [message, tensor])]):
        return tf.ensure_shape(tensor, [])


def checked_loss(value: Any) -> tuple[Any, Any]:
    """Return what `loss_fn` gave as `(mean, None)` or `(sum, weight)`, checked."""
    pair = value if isinstance(value, (tuple, list)) else (value,)
    tensors = [tf.convert_to_tensor(part) for part in pair] if len(pair) in (1, 2) else []
    if (
        not tensors
        or not tensors[0].dtype.is_floating
        or any(tensor.shape.rank not in (0, None) for tensor in tensors)
    ):
        raise ArgumentError(
            explain(
                received=f"loss_fn returned {value!r}",
                expected="a scalar mean loss, or a pair of scalars (sum, weight)",
                fix="reduce the loss over the micro-batch, for example with tf.reduce_mean",
            )
        )
    loss = tf.ensure_shape(tensors[0], [])
    return loss, checked_weight(tensors[1]) if len(tensors) == 2 else None
