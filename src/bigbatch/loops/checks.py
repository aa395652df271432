"""Checks of gradients and weights, before anything is changed by them."""

from __future__ import annotations

import math
from typing import Any, Iterable

import tensorflow as tf

from bigbatch.backends.tensorflow.values import WEIGHT_DTYPE
from bigbatch.errors import ArgumentError, explain


def checked_variables(variables: Iterable[Any]) -> list[Any]:
    """Return the variables as a list of at least one."""
    is_one = hasattr(variables, "assign") or isinstance(variables, (str, dict))
    found = [] if is_one else list(variables)
    if not found or not all(hasattr(variable, "assign") for variable in found):
        raise ArgumentError(
            explain(
                received=f"variables={variables!r}",
                expected="a list of the variables to update",
                fix="build the model first, then pass model.trainable_variables",
            )
        )
    return found


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


def checked_gradients(gradients: Iterable[Any], variables: list[Any]) -> list[Any]:
    """Return the gradients as a list of tensors, `IndexedSlices` and `None` that fits."""
    received = "None" if gradients is None else ""
    gradients = [] if gradients is None else list(gradients)
    if len(gradients) != len(variables):
        raise ArgumentError(
            explain(
                received=received or f"{len(gradients)} gradients",
                expected=f"one for each of the {len(variables)} variables, in their order",
                fix="pass tape.gradient(loss, variables) with the variables given at the start",
            )
        )
    if all(gradient is None for gradient in gradients):
        raise ArgumentError(
            explain(
                received="no gradient for any variable (all None)",
                expected="a gradient for at least one variable",
                fix="compute the loss inside the tape, from the variables given at the start",
            )
        )
    return [_checked_gradient(*pair) for pair in zip(gradients, variables)]


def _checked_gradient(gradient: Any, variable: Any) -> Any:
    if gradient is None:
        return None
    if not isinstance(gradient, tf.IndexedSlices):
        gradient = tf.convert_to_tensor(gradient)
    rows = isinstance(gradient, tf.IndexedSlices)
    shape = gradient.values.shape if rows else gradient.shape
    expected = tf.TensorShape(variable.shape)
    fits = shape.is_compatible_with(expected)
    if rows:  # of any number, in a variable that has rows
        fits = expected.rank and shape.is_compatible_with([None, *expected[1:]])
    if not gradient.dtype.is_floating or not fits:
        raise ArgumentError(
            explain(
                received=f"a gradient of shape {shape} and type {gradient.dtype.name} for the "
                f"variable {variable.name!r}",
                expected=f"{'rows of ' if rows else ''}shape {expected}, a floating-point type",
                fix="pass the gradients in the order of the variables, as the tape gave them",
            )
        )
    return gradient


def checked_weight(weight: Any) -> Any:
    """Return the weight as a scalar tensor that is finite and not negative.

    What is known is checked now. In a graph an assertion does it when the graph runs (under
    `jit_compile=True` XLA leaves assertions out).
    """
    try:
        tensor = tf.convert_to_tensor(weight, dtype_hint=WEIGHT_DTYPE)
    except (TypeError, ValueError):
        raise _bad_weight(repr(weight)) from None
    if tensor.shape.rank not in (0, None) or not (
        tensor.dtype.is_floating or tensor.dtype.is_integer
    ):
        raise _bad_weight(f"{tensor.dtype.name} of shape {tensor.shape}")
    known = tf.get_static_value(tensor)
    tensor = tf.cast(tensor, WEIGHT_DTYPE)
    if known is not None:
        if not 0 <= float(known) < math.inf:
            raise _bad_weight(str(float(known)))
        return tensor
    valid = tf.logical_and(tensor >= 0, tf.math.is_finite(tensor))
    message = "bigbatch: the weight of a micro-batch must be finite and not negative; received"
    with tf.control_dependencies([tf.debugging.Assert(valid, [message, tensor])]):
        return tf.ensure_shape(tensor, [])


def _bad_weight(received: str) -> ArgumentError:
    return ArgumentError(
        explain(
            received=f"weight: {received}",
            expected="a finite number or scalar tensor, zero or more",
            fix="pass what the mean loss divides by, for example weight=tf.shape(x)[0]",
        )
    )


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
