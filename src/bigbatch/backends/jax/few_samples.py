"""A few samples of a batch, to compare what they do whole and cut, on JAX."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, Sequence

import jax
import numpy as np
from keras import tree

from bigbatch.backends.few_samples import different_rows, is_label, listed_calls
from bigbatch.backends.jax import data as batches
from bigbatch.backends.jax.ops import noted
from bigbatch.backends.jax.processes import samples_of_all
from bigbatch.backends.jax.state import unchanged
from bigbatch.backends.keras import backend_of

ALSO_COMPUTES_IN = {"float32"}
"""Types in which layers compute, whatever their own is: `keras.ops.tanh` of float64."""


def obstacle(model: Any) -> str | None:
    """Return why samples of a model cannot be tried, if so."""
    backend = backend_of(model)
    if backend.runs_eagerly(model) and backend.has_custom_train_step(model):
        return "a custom train_step that runs eagerly may do what cannot be undone"
    return None


@contextlib.contextmanager
def undone(
    model: Any, runs: list[Any], count: int, touched: list[Any]
) -> Iterator[Callable[[], None]]:
    """Return a block after which nothing has happened; it gives a way to go back sooner.

    Args:
        model: a Keras model.
        runs: what runs its micro-batches, pass by pass.
        count: how many samples are tried.
        touched: the variables that samples may change.
    """
    del model, count
    with unchanged(touched) as put_back, contextlib.ExitStack() as stack:
        for one in runs:
            stack.enter_context(one.trying())
        yield put_back


def picked(model: Any, data: Any, count: int) -> Any:
    """Return `count` samples of a batch that differ; `None` if it has fewer."""
    data = batches.as_tensors(data)
    total = min(leaf.shape[0] for leaf in batches.leaves_of(data))
    own = rows_on_replicas(model, data, range(total)) if total < count else None
    together = samples_of_all(_different(model, data, count) if own is None else own)
    total = batches.sample_count(together)
    if total < count:
        return None
    return together if total == count else _different(model, together, count)


def _different(model: Any, data: Any, count: int) -> Any:
    """Return samples that differ in labels, masks and weights, as far as there are such."""

    def numbers(rows: list[int]) -> list[np.ndarray]:
        leaves = batches.leaves_of(rows_on_replicas(model, data, rows))
        return [one for one in leaves if jax.numpy.issubdtype(one.dtype, np.number)]

    labels = [np.asarray(leaf) for leaf in batches.leaves_of(data) if is_label(leaf)]
    total = min(leaf.shape[0] for leaf in batches.leaves_of(data))
    return rows_on_replicas(model, data, different_rows(count, labels, total, numbers))


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
    with listed_calls(model, _values_of) as calls:
        yield calls
    # In a function of the user's that is compiled there are no values to look at.
    calls[:] = [call for call in calls if None not in call[1:]]


def _values_of(values: list[Any]) -> list[Any] | None:
    """Return arrays without their gradients; `None` if they have no values."""
    plain = [noted(one) for one in values if isinstance(one, jax.Array)]
    if any(isinstance(one, jax.core.Tracer) for one in plain):
        return None
    return [np.asarray(one) for one in plain]
