"""What `fit` hands to a train function."""

from __future__ import annotations

from typing import Any, Callable

import tensorflow as tf


def is_iterator(data: Any) -> bool:
    """Say whether batches can be taken from `data` inside a graph."""
    return isinstance(data, (tf.data.Iterator, tf.distribute.DistributedIterator))


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
