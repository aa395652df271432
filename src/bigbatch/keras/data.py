"""What `fit` hands to a train function."""

from __future__ import annotations

import itertools
from typing import Any, Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from bigbatch.tf.batch import sample_count
from bigbatch.tf.compat import per_replica_types

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
    result = first(iterator.get_next())
    if isinstance(count, int) and count == 1:
        return 1, result

    def body(done: Any, more: Any, result: Any) -> tuple[Any, Any, Any]:
        del more
        data = iterator.get_next_as_optional()
        more = data.has_value()
        result = tf.cond(more, lambda: rest(data.get_value()), lambda: result)
        return done + tf.cast(more, tf.int32), more, result

    done, _, result = tf.while_loop(
        lambda done, more, _: (done < count) & more,
        body,
        (tf.constant(1), tf.constant(True), result),
    )
    return done, result


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
