"""A few samples of a batch, to compare what they do whole and cut, on JAX."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator, Sequence

import jax
import numpy as np
from keras import tree

from bigbatch.backends.few_samples import different_rows
from bigbatch.backends.jax import data as batches
from bigbatch.backends.jax.ops import noted
from bigbatch.backends.jax.state import unchanged
from bigbatch.backends.keras import layers_of
from bigbatch.core.patching import replaced

ALSO_COMPUTES_IN: set[str] = set()
"""Types in which layers compute, whatever their own is."""


def obstacle(model: Any) -> str | None:
    """Return why samples of a model cannot be tried: there is no reason."""
    del model
    return None


@contextlib.contextmanager
def undone(
    model: Any, runs: Any, count: int, touched: list[Any]
) -> Iterator[Callable[[], None]]:
    """Return a block after which nothing has happened; it gives a way to go back sooner.

    Args:
        model: a Keras model.
        runs: what runs its micro-batches.
        count: how many samples are tried.
        touched: the variables that samples may change.
    """
    del model, count
    with unchanged(touched) as put_back, runs.trying():
        yield put_back


def picked(model: Any, data: Any, count: int) -> Any:
    """Return `count` samples of a batch that differ; `None` if it has fewer."""
    data = batches.as_tensors(data)
    total = min(leaf.shape[0] for leaf in batches.leaves_of(data))
    if total < count:
        return None

    def arrays_of(rows: list[int]) -> Iterator[np.ndarray]:
        for leaf in batches.leaves_of(rows_on_replicas(model, data, rows)):
            if jax.numpy.issubdtype(leaf.dtype, np.number):
                yield leaf

    return rows_on_replicas(model, data, different_rows(total, count, arrays_of))


def rows_on_replicas(model: Any, data: Any, rows: Sequence[int]) -> Any:
    """Return samples of a batch by their numbers, in the memory of the host."""
    del model
    chosen = list(rows)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[chosen], data)


def arrays(values: Any) -> Any:
    """Return tensors as arrays in the memory of the host."""
    return tree.map_structure(
        lambda value: np.asarray(value) if isinstance(value, jax.Array) else value, values
    )


@contextlib.contextmanager
def watching_layers(model: Any) -> Iterator[list[Any]]:
    """Return a block in which calls of layers are listed: inputs, outputs and losses."""
    calls: list[Any] = []

    def call(layer: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(*args, **kwargs)
        seen = [_values_of(nest) for nest in ((args, kwargs), outputs, list(layer.losses))]
        # In a function of the user's that is compiled there are no values to look at.
        if all(one is not None for one in seen):
            calls.append((layer, *seen))
        return outputs

    with contextlib.ExitStack() as stack:
        for layer in (*layers_of(model), model):
            watched = functools.partial(call, layer, layer.call)
            stack.enter_context(replaced(layer, call=watched))
        yield calls


def _values_of(nest: Any) -> list[Any] | None:
    """Return the arrays of a nest without their gradients; `None` if they have no values."""
    values = [noted(leaf) for leaf in tree.flatten(nest) if isinstance(leaf, jax.Array)]
    if any(isinstance(value, jax.core.Tracer) for value in values):
        return None
    return [np.asarray(value) for value in values]
