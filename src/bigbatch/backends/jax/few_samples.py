"""A few samples of a batch, to compare what they do whole and cut, on JAX."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Iterator, Sequence

import jax
import numpy as np
from keras import tree

from bigbatch.backends.few_samples import candidates, columns_of, far_apart
from bigbatch.backends.jax import data as batches
from bigbatch.backends.jax.ops import noted
from bigbatch.backends.keras import layers_of
from bigbatch.core.patching import replaced


def picked(model: Any, data: Any, count: int) -> Any:
    """Return `count` samples of a batch that differ; `None` if it has fewer."""
    data = batches.as_tensors(data)
    total = min(leaf.shape[0] for leaf in batches.leaves_of(data))
    if total < count:
        return None
    rows = candidates(total)
    arrays_of_rows = batches.leaves_of(rows_on_replicas(model, data, rows))
    columns = [
        column
        for leaf in arrays_of_rows
        if jax.numpy.issubdtype(leaf.dtype, np.number)
        for column in columns_of(leaf)
    ]
    chosen = far_apart(columns, len(rows), count)
    return rows_on_replicas(model, data, [rows[one] for one in chosen])


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
