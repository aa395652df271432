"""The function that `fit` calls for every batch, or for several with `steps_per_execution`."""

from __future__ import annotations

from typing import Any, Callable

import tensorflow as tf


def make_train_function(
    train_on: Callable[[Any], dict[str, Any]],
    build: Callable[[Any], None],
    batches_per_execution: int,
    run_eagerly: bool,
) -> Callable[[Any], dict[str, Any]]:
    """Return a function of an iterator that trains on its next batches and returns the logs.

    Args:
        train_on: makes one update from a batch of data and returns the logs.
        build: creates all state there is, given data or the types of data. Done before
            anything is traced: a trace that creates variables is traced twice.
        batches_per_execution: how many batches to train on in one call.
        run_eagerly: whether to leave everything to Python.
    """

    def on_batch(data: Any) -> dict[str, Any]:
        return train_on(_without_optionals(data))

    if not run_eagerly:
        on_batch = tf.function(on_batch, reduce_retracing=True, autograph=False)

    def on_iterator(iterator: Any) -> dict[str, Any]:
        first = on_batch(iterator.get_next())
        if batches_per_execution == 1:
            return first

        def body(done: Any, more: Any, logs: Any) -> tuple[Any, Any, Any]:
            del more
            data = iterator.get_next_as_optional()
            more = data.has_value()
            logs = tf.cond(more, lambda: on_batch(data.get_value()), lambda: logs)
            return done + 1, more, logs

        return tf.while_loop(
            lambda done, more, _: (done < batches_per_execution) & more,
            body,
            (tf.constant(1), tf.constant(True), first),
        )[2]

    compiled = on_iterator
    if not run_eagerly:
        compiled = tf.function(on_iterator, reduce_retracing=True, autograph=False)

    def train_function(iterator: Any) -> dict[str, Any]:
        if isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
            if isinstance(iterator, tf.data.Iterator):  # Keras has built distributed models
                build(_without_optionals(iterator.element_spec))
            return compiled(iterator)
        logs = {}
        for _, data in zip(range(batches_per_execution), iterator):
            build(_without_optionals(data))
            logs = on_batch(data)
        return logs

    return train_function


def _without_optionals(data: Any) -> Any:
    """Return data, or its types, with `None` where Keras' adapters have an empty `Optional`."""
    missing = (tf.experimental.Optional, tf.OptionalSpec, type(tf.type_spec_from_value(None)))
    return tf.nest.map_structure(lambda leaf: None if isinstance(leaf, missing) else leaf, data)
