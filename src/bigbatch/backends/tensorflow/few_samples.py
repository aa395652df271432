"""A few samples of a batch, to compare what they do whole and cut."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from bigbatch.backends.few_samples import different_rows, is_label, listed_calls
from bigbatch.backends.tensorflow.batch import sample_count
from bigbatch.backends.tensorflow.data import as_tensors
from bigbatch.backends.tensorflow.rollback import unchanged
from bigbatch.backends.tensorflow.variables import this_replica

ALSO_COMPUTES_IN: set[str] = set()
"""Types in which layers compute, whatever their own is."""


def obstacle(model: Any) -> str | None:
    """Return why samples of a model cannot be tried: there is no reason."""
    del model
    return None


def undone(
    model: Any, runs: list[Any], count: int, touched: list[Any]
) -> contextlib.AbstractContextManager[Callable[[], None]]:
    """Return a block after which nothing has happened; it gives a way to go back sooner.

    Args:
        model: a Keras model.
        runs: what runs its micro-batches, pass by pass.
        count: how many samples are tried.
        touched: the variables that samples may change.
    """
    del model, runs, count
    return unchanged(touched)


def picked(model: Any, data: Any, count: int) -> Any:
    """Return `count` samples of a batch that differ, on each replica.

    `None` if a replica of this process has fewer.
    """
    data, strategy = as_tensors(data), model.distribute_strategy
    leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    local = strategy.experimental_local_results
    if min(int(sample_count(part)) for leaf in leaves for part in local(leaf)) < count:
        return None
    return strategy.run(functools.partial(_different, count=count), args=(data,))


def rows_on_replicas(model: Any, data: Any, rows: Sequence[int]) -> Any:
    """Return samples of a batch by their numbers, on each replica."""
    take = functools.partial(rows_of, rows=rows)
    return model.distribute_strategy.run(take, args=(data,))


def rows_of(data: Any, rows: Sequence[int]) -> Any:
    """Return samples by their numbers."""
    # Gathered, which copies: a slice would keep the whole batch in memory.
    return tf.nest.map_structure(
        lambda leaf: None if leaf is None else tf.gather(leaf, list(rows)), data
    )


def _different(data: Any, count: int) -> Any:
    """Return samples that differ in labels, masks and weights, as far as there are such."""

    def arrays_of(rows: list[int]) -> Iterator[np.ndarray]:
        for leaf in tf.nest.flatten(rows_of(data, rows)):
            if isinstance(leaf, tf.RaggedTensor):
                yield leaf.row_lengths().numpy()
            elif leaf is not None and (leaf.dtype.is_floating or leaf.dtype.is_integer):
                yield tf.cast(leaf, tf.float32).numpy()

    leaves = [leaf for leaf in tf.nest.flatten(data) if isinstance(leaf, tf.Tensor)]
    labels = [leaf.numpy() for leaf in leaves if is_label(leaf)]
    total = min(int(sample_count(leaf)) for leaf in tf.nest.flatten(data) if leaf is not None)
    return rows_of(data, different_rows(count, labels, total, arrays_of))


def arrays(values: Any) -> Any:
    """Return tensors as arrays in the memory of the host, `IndexedSlices` as pairs."""

    def array(value: Any) -> Any:
        if isinstance(value, tf.IndexedSlices):
            return np.array(value.values), np.array(value.indices)
        if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
            return None
        return np.array(value) if tf.is_tensor(value) else value

    return tf.nest.map_structure(array, values)


def watching_layers(model: Any) -> contextlib.AbstractContextManager[list[Any]]:
    """Return a block in which calls of layers are listed: inputs, outputs and losses."""
    # In a `tf.function` of the user's there are no values to look at.
    return listed_calls(model, arrays, lambda: tf.executing_eagerly() and this_replica() == 0)
