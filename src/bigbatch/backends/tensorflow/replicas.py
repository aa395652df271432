"""The replicas of a `tf.distribute` strategy, and the one reduction per update."""

from __future__ import annotations

import functools
from typing import Any, Callable

import tensorflow as tf

from bigbatch.backends.tensorflow.values import widened


def inside_one_of_many() -> bool:
    """Say whether the calling code runs inside `strategy.run` on several replicas."""
    context = tf.distribute.get_replica_context()
    return context is not None and context.num_replicas_in_sync > 1


def sum_from_inside(value: Any) -> Any:
    """Return the sum of `value` over all replicas; called on each of them."""
    context = tf.distribute.get_replica_context()
    # Operations of their own, so that there is a device to reduce to.
    value = tf.nest.map_structure(tf.identity, value)
    return context.all_reduce(tf.distribute.ReduceOp.SUM, value)


def gather_from_inside(tensor: Any) -> Any:
    """Return the rows of all replicas, in their order; called on each of them."""
    context = tf.distribute.get_replica_context()
    # The types that collective operations know.
    wide = tf.int64 if tensor.dtype.is_integer else widened(tensor.dtype)
    wide = tf.int32 if tensor.dtype.is_bool else wide
    # An operation of its own, so that there is a device to gather to.
    rows = context.all_gather(tf.identity(tf.cast(tensor, wide)), axis=0)
    return tf.cast(tf.ensure_shape(rows, [None, *tensor.shape[1:]]), tensor.dtype)


def largest_of_all(strategy: Any, value: int) -> int:
    """Return the largest of the values that the workers of a strategy call this with.

    Called eagerly, on each of them.
    """
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return int(value)
    values = _gathering(strategy)(tf.constant([int(value)], tf.int64))
    return int(tf.reduce_max(strategy.experimental_local_results(values)[0]))


@functools.lru_cache(maxsize=None)
def _gathering(strategy: Any) -> Any:
    """Return a function that gathers values of all workers, traced once for a strategy."""
    return tf.function(
        lambda value: strategy.run(gather_from_inside, args=(value,)), autograph=False
    )


def sum_from_outside(
    strategy: Any,
    variables: list[Any],
    local: Callable[..., list[Any]],
    arguments: tuple[Any, ...] = (),
) -> list[Any]:
    """Return the sum over all replicas of what `local(*arguments)` returns on each.

    All dense tensors travel as one packed tensor: one reduction, however many there are.
    The rows of `IndexedSlices` are gathered, so that rows of other replicas are simply more
    rows. Called outside `strategy.run`, in a graph.

    Args:
        strategy: the strategy whose replicas are summed over.
        variables: the variables whose gradients are among the values. Counts and statistics
            travel in the type of the gradients, whatever they are kept in.
        local: returns this replica's list of tensors, `IndexedSlices` and `None`; the same
            kinds on every replica.
        arguments: what to call it with, replica by replica.

    Returns:
        The list, summed; the values are on the first local replica's device.
    """
    if strategy.num_replicas_in_sync == 1:
        return _first_local(strategy, strategy.run(local, args=arguments))
    wide = any(widened(variable.dtype) == tf.float64 for variable in variables)
    dtype = tf.float64 if wide else tf.float32

    def reduced(*arguments: Any) -> list[Any]:
        values = local(*arguments)
        context = tf.distribute.get_replica_context()
        dense = [value for value in values if isinstance(value, tf.Tensor)]
        sums = iter(_unpacked(sum_from_inside(_packed(dense, dtype)), dense))
        return [
            next(sums) if isinstance(value, tf.Tensor) else _gathered(context, value)
            for value in values
        ]

    return _first_local(strategy, strategy.run(reduced, args=arguments))


def _packed(tensors: list[Any], dtype: Any) -> Any:
    return tf.concat([tf.cast(tf.reshape(t, [-1]), dtype) for t in tensors], 0)


def _unpacked(packed: Any, like: list[Any]) -> list[Any]:
    parts = tf.split(packed, [tf.size(tensor) for tensor in like])
    return [
        tf.cast(tf.reshape(part, tf.shape(tensor)), tensor.dtype)
        for part, tensor in zip(parts, like)
    ]


def _gathered(context: Any, rows: Any) -> Any:
    if rows is None:
        return None
    values, indices = tf.identity(rows.values), tf.identity(rows.indices)  # as above
    return tf.IndexedSlices(
        context.all_gather(values, axis=0), context.all_gather(indices, axis=0)
    )


def _first_local(strategy: Any, values: list[Any]) -> list[Any]:
    return [
        None if value is None else strategy.experimental_local_results(value)[0]
        for value in values
    ]
