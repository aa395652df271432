"""A few samples of a batch, to compare what they do whole and cut."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Iterator, Sequence

import numpy as np
import tensorflow as tf

from bigbatch.backends.few_samples import candidates, columns_of, far_apart
from bigbatch.backends.keras import layers_of
from bigbatch.backends.tensorflow.batch import sample_count
from bigbatch.backends.tensorflow.data import as_tensors
from bigbatch.backends.tensorflow.variables import this_replica
from bigbatch.core.patching import replaced


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
    rows = candidates(int(sample_count(data)))
    chosen = far_apart(_columns(rows_of(data, rows)), len(rows), count)
    return rows_of(data, [rows[one] for one in chosen])


def _columns(data: Any) -> Iterator[np.ndarray]:
    """Return what tells samples apart, leaf by leaf."""
    for leaf in tf.nest.flatten(data):
        if isinstance(leaf, tf.RaggedTensor):
            yield leaf.row_lengths().numpy()
        elif leaf is not None and (leaf.dtype.is_floating or leaf.dtype.is_integer):
            yield from columns_of(tf.cast(leaf, tf.float32).numpy())


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
