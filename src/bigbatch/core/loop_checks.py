"""Checks of what a training loop passes in and where it does: for TensorFlow 1 and 2."""

from __future__ import annotations

import math
from typing import Any, Callable, Iterable

from bigbatch.errors import ArgumentError, ContextError, explain


def checked_optimizer(optimizer: Any) -> Any:
    """Return the optimizer, if it is one."""
    if not callable(getattr(optimizer, "apply_gradients", None)):
        raise ArgumentError(
            explain(
                received=f"optimizer={optimizer!r} ({type(optimizer).__name__})",
                expected="an object with a method apply_gradients(pairs)",
                fix="pass a Keras optimizer, for example keras.optimizers.Adam()",
            )
        )
    return optimizer


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


def checked_gradients(
    gradients: Iterable[Any], variables: list[Any], to_tensor: Callable[[Any], Any]
) -> list[Any]:
    """Return the gradients as a list of tensors, `IndexedSlices` and `None` that fits.

    What is none of these is made a tensor by `to_tensor`.
    """
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
    return [_checked_gradient(*pair, to_tensor) for pair in zip(gradients, variables)]


def _checked_gradient(gradient: Any, variable: Any, to_tensor: Callable[[Any], Any]) -> Any:
    if gradient is None:
        return None
    rows = hasattr(gradient, "indices")
    gradient = gradient if rows else to_tensor(gradient)
    shape = gradient.values.shape if rows else gradient.shape
    expected = variable.shape
    fits = shape.is_compatible_with(expected)
    if rows:  # of any number, in a variable that has rows; those of a sparse tensor are pairs
        fits = len(expected) > 0 and shape.is_compatible_with([None, *expected[1:]])
        fits = fits and gradient.indices.shape.is_compatible_with([None])
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


def checked_weight(
    weight: Any, to_tensor: Callable[[Any], Any], value_of: Callable[[Any], Any]
) -> tuple[Any, Any]:
    """Return the weight as a tensor, and as a finite number that is not negative.

    `value_of` returns the value of a tensor; while that is not known, so is the number.
    """
    try:
        tensor = to_tensor(weight)
    except (TypeError, ValueError):
        raise _bad_weight(repr(weight)) from None
    is_number = tensor.dtype.is_floating or tensor.dtype.is_integer
    if tensor.shape.rank not in (0, None) or not is_number:
        raise _bad_weight(f"{tensor.dtype.name} of shape {tensor.shape}")
    value = value_of(tensor)
    if value is None:
        return tensor, None
    if not 0 <= float(value) < math.inf:
        raise _bad_weight(str(float(value)))
    return tensor, float(value)


def _bad_weight(received: str) -> ArgumentError:
    return ArgumentError(
        explain(
            received=f"weight: {received}",
            expected="a finite number or scalar tensor, zero or more",
            fix="pass what the mean loss divides by, for example weight=tf.shape(x)[0]",
        )
    )


def refuse_inside(context: Any, scope: Any, name: str) -> None:
    """Raise if code that runs in this replica context, if any, is inside `strategy.run`.

    `scope` is the strategy in whose scope the accumulator was built, if any.
    """
    if context is not None and (context.strategy is scope or context.num_replicas_in_sync > 1):
        raise ContextError(
            explain(
                received=f"{name} inside strategy.run",
                expected=f"{name} outside strategy.run: it concerns all replicas at once",
                fix="call accumulate inside strategy.run and this after it, for example "
                f"strategy.run(micro_batch, args=(x, y)); accumulator.{name}",
            )
        )


def refuse_elsewhere(context: Any, scope: Any) -> None:
    """Raise if code in this replica context is not where an accumulator's gradients are."""
    if scope is not None:
        if context is None or context.strategy is not scope:
            raise ContextError(
                explain(
                    received="accumulate() outside strategy.run",
                    expected="accumulate() on each replica, inside strategy.run",
                    fix="strategy.run(micro_batch, args=(x, y)) with accumulate() in "
                    "micro_batch",
                )
            )
    elif context is not None and context.num_replicas_in_sync > 1:
        raise ContextError(
            explain(
                received="accumulate() inside strategy.run of an accumulator that was "
                "built outside strategy.scope()",
                expected="an accumulator that knows the strategy",
                fix="with strategy.scope(): accumulator = GradientAccumulator(...)",
            )
        )
