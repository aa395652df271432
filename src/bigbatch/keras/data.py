"""What `fit` hands to a train function."""

from __future__ import annotations

import itertools
from typing import Any, Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from bigbatch.tf.batch import sample_count
from bigbatch.tf.compat import per_replica_types
from bigbatch.tf.values import after

END_OF_DATA = (StopIteration, tf.errors.OutOfRangeError)
"""How an iterator says that it has no more batches."""


def is_iterator(data: Any) -> bool:
    """Say whether batches can be taken from `data` inside a graph."""
    return isinstance(data, (tf.data.Iterator, tf.distribute.DistributedIterator))


def next_batches(iterator: Any, count: int) -> Iterator[Any]:
    """Return the next batches, `count` of them or fewer if there are no more.

    If there is none at all, it raises what the iterator does.
    """
    iterator = iter(iterator)
    return itertools.islice(itertools.chain([next(iterator)], iterator), count)


def on_next(
    iterator: Any, first: Callable[[Any], Any], rest: Callable[[Any], Any], count: Any
) -> tuple[Any, Any]:
    """Call a function with each of the next batches of an iterator, in a graph.

    Args:
        iterator: a `tf.data` or distributed iterator with at least one more batch.
        first: called with the next batch.
        rest: called with the batches after it; returns the same nest.
        count: how many batches to take, or fewer if there are no more.

    Returns:
        How many batches there were, and what the last call returned.
    """
    data = without_optionals(iterator.get_next())
    result = first(data)
    if isinstance(count, int) and count == 1:
        return 1, result
    types = without_optionals(iterator.element_spec)

    def fetched(done: Any, before: list[Any]) -> tuple[Any, list[Any]]:
        """Return whether there is a next batch that is wanted, and that or the one before."""

        def fetch() -> tuple[Any, list[Any]]:
            data = iterator.get_next_as_optional()
            more = data.has_value()
            tensors = tf.cond(more, lambda: _tensors(data.get_value()), lambda: before)
            return more, tensors

        return tf.cond(done < count, fetch, lambda: (tf.constant(False), before))

    def body(done: Any, more: Any, tensors: list[Any], result: Any) -> tuple[Any, ...]:
        del more, result
        result = rest(_packed(types, tensors))
        with after(tf.nest.flatten(result)):  # or two batches would be in memory
            return (done + 1, *fetched(done + 1, tensors), result)

    # The batch is an input of the loop, not of a branch in it: a branch would have to be given
    # every variable of the model as well, one by one and every time.
    with after(tf.nest.flatten(result)):
        start = (tf.constant(1), *fetched(tf.constant(1), _tensors(data)), result)
    shapes = [
        spec.shape.most_specific_compatible_shape(tensor.shape)  # of both, what they share
        for spec, tensor in zip(_tensors(types), start[2])
    ]
    same = tf.nest.map_structure(lambda tensor: tensor.shape, result, expand_composites=True)
    done, _, _, result = tf.while_loop(
        lambda _, more, *__: more,
        body,
        start,
        shape_invariants=(tf.TensorShape([]), tf.TensorShape([]), shapes, same),
        parallel_iterations=1,
    )
    return done, result


def _tensors(data: Any) -> list[Any]:
    """Return the tensors that a batch consists of, or their types."""
    leaves = tf.nest.flatten(without_optionals(data), expand_composites=True)
    return [leaf for leaf in leaves if leaf is not None]


def _packed(types: Any, tensors: list[Any]) -> Any:
    """Undo `_tensors`."""
    left = iter(tensors)
    leaves = tf.nest.flatten(types, expand_composites=True)
    leaves = [None if leaf is None else next(left) for leaf in leaves]
    return tf.nest.pack_sequence_as(types, leaves, expand_composites=True)


def without_optionals(data: Any) -> Any:
    """Return data, or its types, with `None` where Keras' adapters have an empty `Optional`."""
    missing = (tf.experimental.Optional, tf.OptionalSpec, type(tf.type_spec_from_value(None)))
    return tf.nest.map_structure(lambda leaf: None if isinstance(leaf, missing) else leaf, data)


def as_tensor(leaf: Any) -> Any:
    """Return a leaf of a batch as a tensor, unless it is more than an array."""
    if leaf is None or tf.is_tensor(leaf) or isinstance(leaf, tf.distribute.DistributedValues):
        return leaf
    return tf.convert_to_tensor(leaf)


def as_fit_has_it(leaf: Any) -> Any:
    """Return an array as a tensor of the type that `fit` gives it."""
    if leaf is None or tf.is_tensor(leaf):
        return leaf
    leaf = np.asarray(leaf)
    is_float = np.issubdtype(leaf.dtype, np.floating)
    return tf.convert_to_tensor(leaf.astype(keras.config.floatx()) if is_float else leaf)


def with_any_count(leaf: Any) -> Any:
    """Return the type of a tensor, or a type, with any number of samples."""
    if leaf is None:
        return None
    leaf = leaf if isinstance(leaf, tf.TypeSpec) else tf.type_spec_from_value(leaf)
    parts = per_replica_types(leaf)
    if parts:
        return type(leaf)(*map(with_any_count, parts))
    shape = [None, *leaf.shape[1:]]
    if isinstance(leaf, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits_dtype)
    return tf.TensorSpec(shape, leaf.dtype)


def largest_count(strategy: Any, data: Any) -> int:
    """Return how many samples the replica of this process with the most of them has."""
    leaf = next(leaf for leaf in tf.nest.flatten(data) if leaf is not None)
    counts = (sample_count(part) for part in strategy.experimental_local_results(leaf))
    return max(1, *map(int, counts))
