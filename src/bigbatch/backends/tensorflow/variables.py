"""Variables with a value for each replica."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

ANY_SHAPE: Any = tf.TensorShape(None)  # pyright: ignore[reportArgumentType]


def local_variable(value: Any, shape: Any = None, *, summed: bool = True) -> Any:
    """Return a variable with a value for each replica.

    Args:
        value: the initial value.
        shape: the static shape, if the value may change its shape.
        summed: whether the value of all replicas is their sum, or the first one's.
    """
    aggregation = tf.VariableAggregation
    return tf.Variable(
        value,
        shape=shape,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=aggregation.SUM if summed else aggregation.ONLY_FIRST_REPLICA,
    )


def native(variable: Any) -> Any:
    """Return the `tf.Variable` inside a Keras variable, and any other variable as it is."""
    value = getattr(variable, "value", variable)
    return variable if callable(value) else value


def add_to(variable: Any, value: Any) -> Any:
    """Add in place; return the sum when it is done."""
    if value.shape.rank is None or value.shape.rank > 2:
        # TensorFlow's constant folding breaks the gradient of a convolution that goes straight
        # into an assignment ("filter must be 4-dimensional"), but not if it goes in here.
        return subtract_from(variable, tf.constant(-1, value.dtype), value)
    return variable.assign_add(value, read_value=False)


def subtract_from(variable: Any, factor: Any, value: Any) -> Any:
    """Subtract `factor * value` in one pass over both."""
    return tf.raw_ops.ResourceApplyGradientDescent(
        var=variable.handle, alpha=factor, delta=value
    )


def this_replica() -> int:
    """Return the number of the replica that runs or is traced; 0 outside of replicas."""
    context = tf.distribute.get_replica_context()
    if context is None:
        return 0
    number = context.replica_id_in_sync_group
    return int(tf.get_static_value(number) if tf.is_tensor(number) else number)


def on_this_replica(strategy: Any, variable: Any) -> Any:
    """Return the part of a variable that is on the replica that runs or is traced."""
    parts = strategy.experimental_local_results(variable)
    return parts[this_replica() % len(parts)]
