"""The operations on tensors that the engine is written with, on JAX.

`bigbatch.backends.tensorflow.ops` says what each of them does.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from keras import tree

from bigbatch.backends.jax.exact.sums import weighted_gradients as weighted_gradients

ceil = jnp.ceil
flatten = tree.flatten
map_structure = tree.map_structure
pack = tree.pack_sequence_as
stop_gradient = jax.lax.stop_gradient
noted = jax.lax.stop_gradient
"""Without a gradient a value may leave the function that is differentiated."""
mean = jnp.mean
maximum = jnp.maximum
sum = jnp.sum  # noqa: A001
where = jnp.where


def weight_dtype() -> Any:
    """Return the type that weights are added up in: float64 if JAX has it."""
    return jax.dtypes.canonicalize_dtype(np.float64)


def widened(dtype: Any) -> Any:
    """Return the type in which values of `dtype` are added up: at least float32."""
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype("float32") if is_narrow else jnp.dtype(dtype)


def is_tensor(value: Any) -> bool:
    """Say whether a value is an array of JAX."""
    return isinstance(value, jax.Array)


def tensor(value: Any) -> Any:
    """Return a value as a tensor."""
    return jnp.asarray(getattr(value, "value", value))


def weight(value: Any) -> Any:
    """Return a number in the type that weights are added up in."""
    return jnp.asarray(value, weight_dtype())


def numpy(value: Any) -> Any:
    """Return the value of a tensor or variable as an array."""
    return np.asarray(tensor(value))


def as_type(array: Any, other: Any) -> Any:
    """Return an array as a tensor of the type of another."""
    return jnp.asarray(array).astype(other.dtype)


def take(value: Any, positions: Sequence[int]) -> Any:
    """Return some rows of a tensor."""
    return jnp.take(jnp.asarray(value), jnp.asarray(list(positions), jnp.int32), axis=0)


@jax.tree_util.register_pytree_node_class
class Rows:
    """What has one row per sample: rows of micro-batches are listed, not added."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        """Return the values, for JAX."""
        return (self.values,), None

    @classmethod
    def tree_unflatten(cls, _: None, values: tuple[Any]) -> Rows:
        """Undo `tree_flatten`."""
        return cls(*values)


def rows(value: Any) -> Rows:
    """Return a value whose rows, one per sample, are listed and not added."""
    return Rows(value)


def rows_together(listed: Rows, dtype: Any) -> Any:
    """Return the rows of a whole batch, in the type that they had in `rows`."""
    return listed.values.astype(dtype)


def when(condition: Any, function: Callable[[], None]) -> None:
    """Call a function if a condition holds: on several replicas, which there are not."""
    raise NotImplementedError(condition, function)


def like(value: Any, other: Any) -> Any:
    """Return a value in the type of another."""
    return jnp.asarray(value).astype(other.dtype)


def shaped_like(value: Any, other: Any) -> Any:
    """Return a value in the shape and the type of another."""
    return jnp.reshape(value, other.shape).astype(other.dtype)


def dense(value: Any) -> Any:
    """Return a gradient as it is: there are no sparse ones."""
    return value


def ones() -> Any:
    """Return the weight one."""
    return weight(1)


def stack(values: Iterable[Any]) -> Any:
    """Return numbers as one vector of weights."""
    return jnp.stack([weight(value) for value in values])


def rank(value: Any) -> int:
    """Return how many dimensions a tensor has."""
    return jnp.ndim(value)


def size(value: Any) -> Any:
    """Return how many elements a tensor has, as a weight."""
    return weight(jnp.size(value))


def squeeze_last(value: Any) -> Any:
    """Return a tensor without its last dimension, of one."""
    return jnp.squeeze(value, -1)


def times(value: Any, by: Any) -> Any:
    """Return `value * by` in the type of `value`, or as a weight if that is no float."""
    value = tensor(value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        value = weight(value)
    return value * jnp.asarray(by).astype(value.dtype)


def divided(value: Any, by: Any) -> Any:
    """Return `value / by` in the type of `value`; zero if there is nothing."""
    value = jnp.asarray(value)
    by = jnp.asarray(by).astype(value.dtype)
    nothing = by == 0
    return jnp.where(nothing, jnp.zeros_like(value), value / jnp.where(nothing, 1, by))


def added(one: Any, other: Any) -> Any:
    """Return the sum of two gradients of one variable; one may be missing."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


def as_gradient_of(variable: Any, value: Any, scale: Any = None) -> Any:
    """Return `value * scale` in the type of a gradient of `variable`."""
    if value is None:
        return None
    if scale is not None:
        value = value * jnp.asarray(scale).astype(value.dtype)
    return value.astype(variable.dtype)


def scaled_unless_one(
    gradients: list[list[Any]], variables: list[list[Any]], scale: Any
) -> list[list[Any]]:
    """Return `scale * gradient` for each."""
    return [
        [as_gradient_of(variable, gradient, scale) for variable, gradient in zip(*some)]
        for some in zip(variables, gradients)
    ]


def squared_norm(gradients: Iterable[Any]) -> Any:
    """Return the squared norm of gradients together, as a weight."""
    total = weight(0)
    for gradient in gradients:
        if gradient is not None:
            total += weight(jnp.sum(jnp.square(gradient.astype(widened(gradient.dtype)))))
    return total
