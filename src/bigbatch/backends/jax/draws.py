"""Random draws of the full batch, row by row, in each micro-batch.

On JAX a random number of a draw depends on the key and on the number of its element alone
(threefry, `jax_threefry_partitionable`). So the rows [s, s + n) of a draw of r numbers per row
are drawn with the same key and s·r added to the number of every element. That is a kind of key
of its own: two words of the key and two of the offset.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from typing import Any, Callable, Iterator

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl, threefry2x32_p

from bigbatch.backends.jax.compat import DRAWING_MODULE
from bigbatch.core.patching import replaced

BY_ROW = ("bernoulli", "normal", "randint", "truncated_normal", "uniform")
"""Draws in which every element comes from the bits of its number."""

FIRST, ELSEWHERE = "first", "elsewhere"
_local = threading.local()  # data is prepared in threads, which draw, too


class MicrobatchRows:
    """Where a micro-batch stands in its batch.

    Args:
        start: the samples of the batch before this micro-batch.
        samples: the samples of this micro-batch.
        places: for each draw in turn, where the samples are in its shape; `None`: in the first
            dimension if that is as long.
    """

    def __init__(self, start: Any, samples: int, places: list[str | None] | None) -> None:
        self.start = start
        self.samples = samples
        self._places = places
        self.drawn: list[tuple[int, ...]] = []
        """The shapes of the draws so far."""

    def place_of(self, shape: tuple[int, ...]) -> str | None:
        """Say where the samples are in the shape of the next draw."""
        number = len(self.drawn)
        self.drawn.append(shape)
        if self._places is not None and number < len(self._places):
            return self._places[number]
        return FIRST if shape[:1] == (self.samples,) else None


def places_of(
    shapes: list[tuple[int, ...]], others: list[tuple[int, ...]], samples: int
) -> list[str | None] | None:
    """Return where the samples are in the shapes of draws.

    Args:
        shapes: those with as many samples.
        others: those with one more.
        samples: how many.

    Returns:
        Nothing if it cannot be told.
    """
    if len(shapes) != len(others) or shapes is others:
        return None

    def place(one: tuple[int, ...], other: tuple[int, ...]) -> str | None:
        if one == other:
            return None
        is_first = one[1:] == other[1:] and one[0] % samples == 0
        return FIRST if is_first else ELSEWHERE

    return [place(*pair) for pair in zip(shapes, others)]


@contextlib.contextmanager
def drawing(rows: MicrobatchRows) -> Iterator[None]:
    """Return a block in which draws that follow the samples are rows of the full batch's."""
    before = getattr(_local, "rows", None)
    _local.rows = rows
    try:
        with replaced(DRAWING_MODULE, jax=_Jax()):
            yield
    finally:
        _local.rows = before


class _Jax:
    """Stands in for the package `jax` where Keras draws."""

    def __getattr__(self, name: str) -> Any:
        return _Random() if name == "random" else getattr(jax, name)


class _Random:
    """Stands in for `jax.random`."""

    def __getattr__(self, name: str) -> Any:
        return functools.partial(_draw, name, getattr(jax.random, name))


def _draw(name: str, draw: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Do what a function of `jax.random` does, in this thread for a micro-batch."""
    rows: MicrobatchRows | None = getattr(_local, "rows", None)
    if rows is None:
        return draw(*args, **options)
    if "key" not in options:
        options["key"], args = args[0], args[1:]
    key = options.pop("key")
    shape = args[0].shape if name == "permutation" else options["shape"]
    shape = tuple(map(int, shape))
    place = rows.place_of(shape)
    if place is None:
        return draw(key, *args, **options)
    if place is FIRST and name in BY_ROW and _is_threefry(key):
        per_sample = math.prod(shape) // rows.samples
        key = jax.random.wrap_key_data(
            jnp.stack([*key, *_product(rows.start, per_sample)]), impl=_ROWS
        )
    else:
        # Other numbers than the full batch's, but not the same in every micro-batch.
        key = jnp.where(rows.start == 0, key, jax.random.fold_in(key, rows.start))
    return draw(key, *args, **options)


def _is_threefry(key: Any) -> bool:
    is_raw = key.dtype == jnp.uint32 and key.shape == (2,)
    return is_raw and bool(jax.config.jax_threefry_partitionable)


def _product(one: Any, other: int) -> tuple[Any, Any]:
    """Return the upper and lower 32 bits of a product of two numbers of 32 bits."""
    one = jnp.asarray(one, jnp.uint32)
    low, high = one & 0xFFFF, one >> 16
    other_low, other_high = (jnp.uint32(part) for part in (other & 0xFFFF, other >> 16))
    cross, cross_too = low * other_high, high * other_low
    middle = (low * other_low >> 16) + (cross & 0xFFFF) + (cross_too & 0xFFFF)
    upper = high * other_high + (cross >> 16) + (cross_too >> 16) + (middle >> 16)
    return upper, (low * other_low & 0xFFFF) | (middle << 16)


def _bits(key: Any, width: int, shape: Any) -> Any:
    """Return random bits for elements that are numbered from an offset on."""
    number = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    lower = number + key[3]
    upper = key[2] + (lower < number).astype(jnp.uint32)
    one, two = threefry2x32_p.bind(
        *(jnp.broadcast_to(part, shape) for part in (key[0], key[1], upper)), lower
    )
    dtype = jnp.dtype(f"uint{width}")
    if width == 64:
        return (one.astype(dtype) << jnp.asarray(32, dtype)) | two.astype(dtype)
    return (one ^ two).astype(dtype)


def _with_offset(keys: Any, key: Any) -> Any:
    offset = jnp.broadcast_to(key[2:], (*keys.shape[:-1], 2))
    return jnp.concatenate([keys, offset], -1)


_ROWS: Any = define_prng_impl(
    key_shape=(4,),
    seed=lambda seed: _with_offset(jax.random.PRNGKey(seed), jnp.zeros(4, jnp.uint32)),
    split=lambda key, shape: _with_offset(jax.random.split(key[:2], shape), key),
    random_bits=_bits,
    fold_in=lambda key, data: _with_offset(jax.random.fold_in(key[:2], data), key),
    name="rows of a batch",
    tag="rows",
)
