"""A few samples of a batch, to compare what they do whole and cut."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Iterator, Sequence

import numpy as np
import tensorflow as tf

from bigbatch.backends.keras import layers_of
from bigbatch.backends.tensorflow.batch import sample_count
from bigbatch.backends.tensorflow.data import as_tensors
from bigbatch.backends.tensorflow.variables import this_replica
from bigbatch.core.patching import replaced

_CANDIDATES = 32
"""Of how many samples, spread over the batch, a few are chosen."""


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
    total = int(sample_count(data))
    rows = np.unique(np.linspace(0, total - 1, min(total, _CANDIDATES)).astype(int))
    features = _features(rows_of(data, rows.tolist()), len(rows))
    chosen = [0]
    distances = np.full(len(rows), np.inf)
    while len(chosen) < count:  # each as far as can be from those before it
        with np.errstate(over="ignore", invalid="ignore"):
            new = np.sum((features - features[chosen[-1]]) ** 2, axis=1)
        distances = np.minimum(distances, new)
        distances[chosen] = -1
        chosen.append(int(np.argmax(distances)))
    return rows_of(data, [int(rows[one]) for one in chosen])


def _features(data: Any, count: int) -> np.ndarray:
    """Return a few numbers for each sample: mean and share of zeros of each leaf."""
    columns = [np.zeros(count)]
    for leaf in tf.nest.flatten(data):
        if isinstance(leaf, tf.RaggedTensor):
            columns.append(leaf.row_lengths().numpy().astype(float))
        elif leaf is not None and (leaf.dtype.is_floating or leaf.dtype.is_integer):
            values = tf.cast(leaf, tf.float32).numpy().reshape(count, -1)
            columns += [np.mean(values, 1), np.mean(values == 0, 1)]
    features = np.nan_to_num(np.stack(columns, 1).astype(float))
    with np.errstate(over="ignore", invalid="ignore"):  # samples may be infinite
        return (features - features.mean(0)) / (features.std(0) + 1e-12)


def arrays(values: Any) -> Any:
    """Return tensors as arrays in the memory of the host, `IndexedSlices` as pairs."""

    def array(value: Any) -> Any:
        if isinstance(value, tf.IndexedSlices):
            return np.array(value.values), np.array(value.indices)
        if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
            return None
        return np.array(value) if tf.is_tensor(value) else value

    return tf.nest.map_structure(array, values)


@contextlib.contextmanager
def watching_layers(model: Any) -> Iterator[list[Any]]:
    """Return a block in which calls of layers are listed: inputs, outputs and losses."""
    calls: list[Any] = []

    def call(layer: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(*args, **kwargs)
        # In a `tf.function` of the user's there are no values to look at.
        if tf.executing_eagerly() and this_replica() == 0:
            inputs = [one for one in tf.nest.flatten((args, kwargs)) if tf.is_tensor(one)]
            losses = [loss for loss in layer.losses if tf.is_tensor(loss)]
            calls.append((layer, *map(arrays, (inputs, tf.nest.flatten(outputs), losses))))
        return outputs

    with contextlib.ExitStack() as stack:
        for layer in (*layers_of(model), model):
            watched = functools.partial(call, layer, layer.call)
            stack.enter_context(replaced(layer, call=watched))
        yield calls
