"""Names of TensorFlow and Keras that are not public; `tests/test_compat*.py` pin them."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator

import tensorflow as tf
from tensorflow.python.client import device_lib
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.ops import control_flow_util, resource_variable_ops


def like_the_caller(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` converted by AutoGraph if, and only if, the calling code is.

    bigbatch keeps AutoGraph out of its own code. What the user passes in must still be
    treated as if the user's own `tf.function` had called it.
    """
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(function, autograph.control_status_ctx())


def under_xla() -> bool:
    """Say whether the code being traced is inside `tf.function(jit_compile=True)`."""
    return not tf.executing_eagerly() and bool(
        control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
    )


def is_compiled(function: Callable[..., Any]) -> bool:
    """Say whether `function` is a `tf.function(jit_compile=True)`."""
    return getattr(function, "_jit_compile", None) is True


@contextlib.contextmanager
def outside_strategy_scope() -> Iterator[None]:
    """Return a context that is outside any `strategy.scope()`, wherever the caller is.

    There, and only there, a Keras optimizer can be handed gradients that have been reduced:
    in the scope it looks for a replica context, on a replica it would reduce once more.
    """
    distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()


def undistributed_variable(value: Any) -> Any:
    """Return a variable that belongs to no strategy, also in the scope of one."""
    return resource_variable_ops.ResourceVariable(value, trainable=False)


def variables_of(optimizer: Any) -> list[Any]:
    """Return the variables a Keras 3 optimizer was built with."""
    return list(getattr(optimizer, "inner_optimizer", optimizer)._trainable_variables)


def per_replica_types(spec: Any) -> list[Any]:
    """Return the types of the values of all replicas; none if there is only one value."""
    return list(getattr(spec, "_value_specs", ()))


def memory_limits() -> dict[str, int]:
    """Return the bytes each device of this process may use, by names such as "GPU:0"."""
    return {
        device.name.split("device:")[-1]: device.memory_limit
        for device in device_lib.list_local_devices()
    }
