"""The operations on tensors that the engine is written with."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Sequence

import keras
import torch

WEIGHT_DTYPE = torch.float64
"""Weights are added up in float64: it counts tokens exactly, float32 stops at 2**24."""

flatten: Callable[..., Any] = keras.tree.flatten
map_structure: Callable[..., Any] = keras.tree.map_structure
pack = keras.tree.pack_sequence_as
is_tensor = torch.is_tensor
ceil = torch.ceil
sum = torch.sum  # noqa: A001


def native(value: Any) -> Any:
    """Return the tensor in a variable of Keras, and anything else as it is."""
    return value.value if isinstance(value, keras.Variable) else value


def tensor(value: Any) -> Any:
    """Return a value as a tensor; of a variable it is a copy, which does not change with it."""
    if isinstance(value, keras.Variable):
        return value.value.detach().clone()
    return value if torch.is_tensor(value) else keras.ops.convert_to_tensor(value)


def numpy(value: Any) -> Any:
    """Return a tensor or variable as an array in the memory of the host, others as they are."""
    value = native(value)
    if not torch.is_tensor(value):
        return value
    value = value.detach()
    # NumPy has no bfloat16.
    return (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()


def as_type(array: Any, other: Any) -> Any:
    """Return an array as a tensor of the type of another."""
    return torch.as_tensor(array).to(other.device, other.dtype)


def take(value: Any, positions: Sequence[int]) -> Any:
    """Return copies of some rows of a tensor."""
    return value[torch.as_tensor(list(positions), device=value.device)]


class Rows:
    """Tensors whose rows, one per sample, are listed and not added."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def detach(self) -> Rows:
        """Return the rows without what they were computed from."""
        return Rows([part.detach() for part in self.parts])

    def __add__(self, other: Rows) -> Rows:
        return Rows([*self.parts, *other.parts])


def rows(value: Any) -> Rows:
    """Return a value whose rows, one per sample, are listed and not added."""
    return Rows([value])


def rows_together(listed: Rows, dtype: Any) -> Any:
    """Return the rows of a whole batch."""
    return torch.cat(listed.parts).to(dtype)


def noted(value: Any) -> Any:
    """Return a value so that it can be kept after the loss has been differentiated."""
    return value


def shaped_like(value: Any, other: Any) -> Any:
    """Return a value in the shape and the type of another."""
    return value.to(other.dtype).reshape(other.shape)


def dense(value: Any) -> Any:
    """Return a gradient as it is: none is sparse."""
    return value


def weight(value: Any) -> Any:
    """Return a number in the type that weights are added up in."""
    if isinstance(value, (int, float)):
        return keras.ops.convert_to_tensor(value, "float64")
    return native(value).detach().to(WEIGHT_DTYPE)


def ones() -> Any:
    """Return the weight one."""
    return weight(1)


def stack(values: Iterable[Any]) -> Any:
    """Return numbers as one vector of weights."""
    return torch.stack([weight(value) for value in values])


def like(value: Any, other: Any) -> Any:
    """Return a value in the type of another."""
    return value.to(native(other).dtype)


def rank(value: Any) -> int:
    """Return how many dimensions a tensor has."""
    return value.dim()


def size(value: Any) -> Any:
    """Return how many elements a tensor has, as a weight."""
    return weight(native(value).numel())


def squeeze_last(value: Any) -> Any:
    """Return a tensor without its last dimension, of one."""
    return value.squeeze(-1)


def mean(value: Any) -> Any:
    """Return the mean of all elements."""
    return torch.mean(tensor(value))


def maximum(value: Any, least: float) -> Any:
    """Return a value, or `least` if it is smaller."""
    return torch.clamp(value, min=least)


def where(condition: Any, value: Any, other: Any) -> Any:
    """Return `value` where a condition holds, else `other`."""
    return torch.where(condition, value, other)


def stop_gradient(value: Any) -> Any:
    """Return a tensor through which no gradient goes."""
    return value.detach()


def divided(value: Any, by: Any) -> Any:
    """Return `value / by` in the type of `value`; zero if there is nothing."""
    by = by.to(value.dtype)
    return torch.where(by == 0, torch.zeros_like(value), value / by)


def times(value: Any, by: Any) -> Any:
    """Return `value * by` in the type of `value`, or as a weight if that is no float."""
    value = tensor(value)
    if not value.is_floating_point():
        value = value.to(WEIGHT_DTYPE)
    return value * (by.to(value.dtype) if torch.is_tensor(by) else by)


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which values of `dtype` are added up: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def added(one: Any, other: Any) -> Any:
    """Return the sum of two gradients of one variable, each may be `None`."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


def as_gradient_of(variable: Any, value: Any, scale: Any = None) -> Any:
    """Return `value * scale` in the type of a variable, with no copy if there is no need."""
    if value is None:
        return None
    if scale is not None:
        value = value * scale.to(value.dtype)
    return value.to(native(variable).dtype)


def scaled_unless_one(
    gradients: list[list[Any]], variables: list[list[Any]], scale: Any
) -> list[list[Any]]:
    """Return `scale * gradient` for each, in place."""
    del variables
    if float(scale) != 1:
        for gradient in flatten(gradients):
            if gradient is not None:
                gradient.mul_(scale.to(gradient.dtype))
    return gradients


def squared_norm(gradients: Iterable[Any]) -> Any:
    """Return the squared norm of gradients together, as a weight."""
    norms = [
        torch.linalg.vector_norm(gradient, dtype=widened(gradient.dtype)).to(WEIGHT_DTYPE) ** 2
        for gradient in gradients
        if gradient is not None
    ]
    return torch.stack(norms).sum() if norms else weight(0)
