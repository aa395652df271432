"""The data that `fit` passes to a train function."""

from __future__ import annotations

import itertools
from typing import Any, Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from bigbatch.backends.tensorflow.batch import (
    Batch,
    includes,
    rows_of,
    sample_count,
    with_count,
)
from bigbatch.backends.tensorflow.compat import per_replica_types
from bigbatch.backends.tensorflow.values import WEIGHT_DTYPE, after
from bigbatch.errors import ArgumentError

__all__ = ["includes", "sample_count"]  # what else there is, is defined here

END_OF_DATA = (StopIteration, tf.errors.OutOfRangeError)
"""How an iterator says that it has no more batches."""


INTEGER = tf.TensorSpec([], tf.int32)
"""The type of what `integer` returns."""


WEIGHT = tf.TensorSpec([], WEIGHT_DTYPE)
"""The type of a weight."""


def integer(value: int) -> Any:
    """Return a number as a tensor, at most the largest there is of its type."""
    return tf.constant(min(value, tf.int32.max))


def is_iterator(data: Any) -> bool:
    """Say whether batches can be taken from `data` inside a graph."""
    return isinstance(data, (tf.data.Iterator, tf.distribute.DistributedIterator))


def next_batches(iterator: Any, count: int) -> Iterator[Any]:
    """Return the next batches, `count` of them or fewer if there are no more.

    If there is none at all, it raises what the iterator does.
    """
    iterator = iter(iterator)
    return itertools.islice(itertools.chain([next(iterator)], iterator), count)


def next_of(iterator: Any) -> Any:
    """Return the next batch of an iterator, in a graph."""
    return without_optionals(iterator.get_next())


def on_next(
    iterator: Any, function: Callable[[Any], Any], count: Any, result: Any = None
) -> tuple[Any, Any]:
    """Call a function with each of the next batches of an iterator, in a graph.

    Args:
        iterator: a `tf.data` or distributed iterator with at least one more batch.
        function: called with a batch; returns the same nest for each.
        count: how many batches to take, or fewer if there are no more.
        result: what such a nest is before the first batch, if that is known: then the function
            is once in the graph, not twice.

    Returns:
        How many batches there were, and what the last call returned.
    """
    data = next_of(iterator)
    if tf.executing_eagerly():
        done, result = 1, function(data)
        for batch in itertools.islice(iterator, int(count) - 1):
            done, result = done + 1, function(batch)
        return done, result
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
        result = function(_packed(types, tensors))
        with after(tf.nest.flatten(result)):  # or two batches would be in memory
            return (done + 1, *fetched(done + 1, tensors), result)

    # The batch is an input of the loop, not of a branch in it: a branch would have to be given
    # every variable of the model as well, one by one and every time.
    start: tuple[Any, ...] = (tf.constant(0), tf.constant(True), _tensors(data), result)
    if result is None:
        result = function(data)
        with after(tf.nest.flatten(result)):
            start = (tf.constant(1), *fetched(tf.constant(1), _tensors(data)), result)
    shapes = [
        # What the type and the first batch share; the last batch may be smaller.
        _of_any_count(spec.shape.most_specific_compatible_shape(tensor.shape))
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


def _of_any_count(shape: Any) -> Any:
    return tf.TensorShape([None, *shape[1:]]) if shape.rank else shape


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


def type_of(leaf: Any) -> Any:
    """Return the type of a tensor, and a type as it is."""
    is_type = leaf is None or isinstance(leaf, tf.TypeSpec)
    return leaf if is_type else tf.type_spec_from_value(leaf)


def types_of_any_count(data: Any) -> Any:
    """Return the types of a batch of any number of samples."""
    return tf.nest.map_structure(with_any_count, data)


def with_any_count(leaf: Any) -> Any:
    """Return the type of a tensor, or a type, with any number of samples."""
    if leaf is None:
        return None
    leaf = type_of(leaf)
    parts = per_replica_types(leaf)
    if parts:
        return type(leaf)(*map(with_any_count, parts))
    return with_count(leaf, None)


def first_batch(data: Any) -> Any:
    """Return the first batch of a data set; `None` if this is none."""
    if isinstance(data, tf.data.Dataset):
        return next(iter(data))
    kinds = [getattr(keras.utils, name, None) for name in ("PyDataset", "Sequence")]
    if isinstance(data, tuple(kind for kind in kinds if kind is not None)):
        return data[0]
    return None


def has_known_count(types: Any) -> bool:
    """Say whether types tell how many samples a batch has."""
    leaves = tf.nest.flatten(without_optionals(types))
    leaf = next(leaf for leaf in leaves if leaf is not None)
    leaf = next(iter(per_replica_types(leaf)), leaf)
    return bool(leaf.shape.rank) and leaf.shape[0] is not None


def first_rows(data: Any, count: int) -> Any:
    """Return the first `count` samples of a batch."""
    return tf.nest.map_structure(lambda leaf: rows_of(as_tensor(leaf), 0, count), data)


def joined(*batches: Any) -> Any:
    """Return several batches as one."""

    def concatenated(*leaves: Any) -> Any:
        if leaves[0] is None:
            return None
        if isinstance(leaves[0], tf.SparseTensor):
            return tf.sparse.concat(0, list(map(tf.sparse.reorder, leaves)))
        return tf.concat(leaves, 0)

    return tf.nest.map_structure(concatenated, *batches)


def as_tensors(data: Any) -> Any:
    """Return a batch of arrays as one of tensors."""
    return tf.nest.map_structure(as_tensor, data)


def as_fit_has_them(data: Any) -> Any:
    """Return a batch of arrays as `fit` gives it to a model."""
    return tf.nest.map_structure(as_fit_has_it, data)


def _parts(model: Any, data: Any) -> list[Any]:
    """Return what each replica of this process has of a batch."""
    data = as_tensors(without_optionals(data))
    local = model.distribute_strategy.experimental_local_results
    leaves = [local(leaf) for leaf in tf.nest.flatten(data)]  # of `None` itself, once
    count = max(map(len, leaves))
    parts = zip(*(leaf if len(leaf) == count else leaf * count for leaf in leaves))
    return [tf.nest.pack_sequence_as(data, part) for part in parts]


def largest_count(model: Any, data: Any) -> int:
    """Return how many samples the replica of this process with the most of them has."""
    return max(1, *(int(sample_count(part)) for part in _parts(model, data)))


def check_can_be_cut(model: Any, data: Any) -> None:
    """Raise if the tensors of a batch, which is there, differ in their number of samples."""
    for part in _parts(model, data):
        Batch((part,), may_be_empty=True)


def can_be_cut(model: Any, data: Any) -> bool:
    """Say whether all tensors of a batch have the same number of samples."""
    try:
        check_can_be_cut(model, data)
    except ArgumentError:
        return False
    return True


def bytes_of(values: Any) -> int:
    """Return how many bytes variables and tensors have."""
    count = 0
    for leaf in tf.nest.flatten(values, expand_composites=True):
        if leaf is not None:
            size = tf.as_dtype(leaf.dtype).size
            count += size * int(np.prod(leaf.shape, dtype=np.int64))
    return count


def on_every_replica(model: Any, data: Any) -> Any:
    """Return a batch as `fit` has it under a strategy: the same on each replica."""
    distribute = model.distribute_strategy.experimental_distribute_values_from_function
    return tf.nest.map_structure(
        lambda leaf: None if leaf is None else distribute(lambda _: leaf), data
    )
