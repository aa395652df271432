"""Sums over the micro-batches of a batch, marked in the trace of one of them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from typing import Any, Callable, Iterator

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from bigbatch.backends.jax.steps import current_step
from bigbatch.errors import ContextError, explain

SUM = Primitive("cross_microbatch_sum")
"""Stands for a sum over micro-batches; `gradient_of` is the key of the sum it belongs to."""
SEED = Primitive("seed")
"""Marks where the backward pass of a micro-batch begins."""

for _primitive in (SUM, SEED):
    _primitive.def_abstract_eval(lambda value, **_: value)

_local = threading.local()


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """Return a block in which a micro-batch is traced, and its sums are marked."""
    before = getattr(_local, "keys", None)
    _local.keys = itertools.count()
    try:
        yield
    finally:
        _local.keys = before


def cross_microbatch_sum(value: Any) -> Any:
    """Return the sum of an array over the micro-batches of a batch."""
    value, keys = jnp.asarray(value), getattr(_local, "keys", None)
    if keys is not None:
        return _marked(value, next(keys))
    if current_step() is not None:
        raise ContextError(
            explain(
                received="cross_microbatch_sum in a model whose micro-batches run one after "
                "the other",
                expected="micro-batches that run in stages, with sums between them",
                fix='bigbatch.accumulate(model, ..., batch_norm="exact"), also if the model '
                "has no BatchNormalization",
            )
        )
    return value


def cross_microbatch_gather(value: Any) -> Any:
    """Raise while micro-batches run: how many rows a batch has is not known in its programs."""
    if current_step() is None:
        return value
    raise ContextError(
        explain(
            received="cross_microbatch_gather, or a loss that compares samples together with "
            'batch_norm="exact", on JAX',
            expected="sums over micro-batches, of a shape that is known",
            fix="use cross_microbatch_sum, or TensorFlow",
        )
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _marked(value: Any, key: int) -> Any:
    return SUM.bind(value, key=key, gradient_of=None)


def _marked_forward(value: Any, key: int) -> Any:
    return SUM.bind(value, key=key, gradient_of=None), None


def _marked_backward(key: int, _: Any, gradient: Any) -> Any:
    return (SUM.bind(gradient, key=None, gradient_of=key),)


_marked.defvjp(_marked_forward, _marked_backward)


@jax.custom_vjp
def _weighted(loss: Any, weight: Any) -> Any:
    del weight
    return loss


def _weighted_backward(weight: Any, gradient: Any) -> Any:
    begin = SEED.bind(gradient * weight.astype(gradient.dtype))
    return begin, jnp.zeros_like(weight)


_weighted.defvjp(lambda loss, weight: (loss, weight), _weighted_backward)


@contextlib.contextmanager
def weighted_gradients(weight: Callable[[], Any]) -> Iterator[None]:
    """Return a block in which gradients with respect to weights are those of loss · `weight()`.

    In a layer that sums over micro-batches their gradients meet. So each must have its weight
    from the beginning: weighted after the backward pass, it would be too late.
    """
    before = jax.grad, jax.value_and_grad

    def weighing(differentiate: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(differentiate)
        def of(fun: Any, argnums: Any = 0, has_aux: bool = False, **options: Any) -> Any:
            @functools.wraps(fun)
            def weighted(*args: Any, **kwargs: Any) -> Any:
                result = fun(*args, **kwargs)
                loss, *rest = result if has_aux else (result,)
                loss = _weighted(loss, jax.lax.stop_gradient(jnp.asarray(weight())))
                return (loss, *rest) if has_aux else loss

            options = {"argnums": argnums, "has_aux": has_aux, **options}
            plain, other = differentiate(fun, **options), differentiate(weighted, **options)

            @functools.wraps(fun)
            def gradient(*args: Any, **kwargs: Any) -> Any:
                first = args[argnums if isinstance(argnums, int) else argnums[0]]
                step = current_step()
                is_of_weights = step is not None and step.has_any(jax.tree.leaves(first))
                return (other if is_of_weights else plain)(*args, **kwargs)

            return gradient

        return of

    jax.grad, jax.value_and_grad = map(weighing, before)
    try:
        yield
    finally:
        jax.grad, jax.value_and_grad = before
