"""Names of TensorFlow and Keras that are not public; `tests/test_compat*.py` pin them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import threading
from contextlib import AbstractContextManager as Block
from typing import Any, Callable, Iterable, Iterator

import tensorflow as tf
from tensorflow.python.client import device_lib
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.eager import context
from tensorflow.python.ops import (
    control_flow_util,
    control_flow_v2_func_graphs,
    gen_stateless_random_ops,
    gen_stateless_random_ops_v2,
    resource_variable_ops,
)

try:
    from tensorflow.python.eager.record import VariableWatcher
except ImportError:  # before TensorFlow 2.13
    from tensorflow.python.eager.tape import VariableWatcher
try:
    from tensorflow.python.autograph.core import ag_ctx
    from tensorflow.python.eager.polymorphic_function import (
        autograph_util,
        function_type_utils,
        polymorphic_function,
    )
except ImportError:  # before TensorFlow 2.13
    ag_ctx: Any = None
    autograph_util: Any = None
    function_type_utils: Any = None
    polymorphic_function: Any = None


class _SharedReplacement:
    """Replaces attributes while any block is open: blocks of several threads may overlap."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._before: list[tuple[Any, str, Any]] = []

    @contextlib.contextmanager
    def of(self, values: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
        """Return a block in which each object has a value as the attribute of a name."""
        with self._lock:
            if not self._open:
                values = list(values)
                self._before = [
                    (owner, name, getattr(owner, name)) for owner, name, _ in values
                ]
            self._open += 1
            for owner, name, value in values:
                setattr(owner, name, value)
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                if not self._open:
                    for owner, name, value in self._before:
                        setattr(owner, name, value)


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


def eagerly() -> Block[None]:
    """Return a block whose code runs eagerly, also while a graph is being built."""
    return context.eager_mode()


def function_graph(graph: Any, call: Any, name: str = "f") -> Any:
    """Return the graph of a function that an operation calls; `None` if it is unknown.

    `name` is that of the operation's attribute: "f", or a branch.
    """
    while graph is not None:
        function = graph._get_function(call.get_attr(name).name)
        if function is not None:
            return getattr(function, "graph", None)
        graph = getattr(graph, "outer_graph", None)
    return None


def is_branch(graph: Any) -> bool:
    """Say whether a graph is a branch of `tf.cond` or the body of `tf.while_loop`."""
    kinds = control_flow_v2_func_graphs
    return isinstance(graph, (kinds.CondBranchFuncGraph, kinds.WhileBodyFuncGraph))


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


PHILOX = (1, 3)
"""The algorithms with a counter of 128 bits: Philox, and the choice of the device."""

UNIFORM, NORMAL = "stateless_random_uniform_v2", "stateless_random_normal_v2"
DRAWS_BY_ROW = (
    UNIFORM,
    NORMAL,
    "stateless_random_uniform_int_v2",
    "stateless_random_uniform_full_int_v2",
)
"""Operations that take the same count of random bits for every number they draw."""

_OTHER_DRAWS = ("stateless_truncated_normal_v2", "stateless_random_gamma_v3")
_DRAWS_BY_SEED = (
    "stateless_multinomial",
    "stateless_random_binomial",
    "stateless_random_poisson",
    "stateless_parameterized_truncated_normal",
    "stateless_random_gamma_v2",
)
_DRAWS = {
    name: (module, getattr(module, name))
    for module, names in (
        (gen_stateless_random_ops_v2, (*DRAWS_BY_ROW, *_OTHER_DRAWS)),
        (gen_stateless_random_ops, _DRAWS_BY_SEED),
    )
    for name in names
    if hasattr(module, name)  # TensorFlow 2.10 has no such gamma draw
}
_draws_replaced = _SharedReplacement()


def drawing_operation(name: str) -> Callable[..., Any]:
    """Return the operation of TensorFlow that draws random numbers, by name."""
    return _DRAWS[name][1]


def replaced_draws(draw: Callable[..., Any]) -> Block[None]:
    """Return a block in which `draw(name, ...)` is called in place of drawing operations.

    It is called in all threads, and blocks of several threads may overlap.
    """
    return _draws_replaced.of(
        (module, name, functools.partial(draw, name)) for name, (module, _) in _DRAWS.items()
    )


def watcher_of_reads() -> Any:
    """Return a block that knows which trainable variables were read: `watched_variables`."""
    return VariableWatcher()


_reads_noted = _SharedReplacement()
_variable_accessed = resource_variable_ops.variable_accessed


@contextlib.contextmanager
def noted_reads(note: Callable[[Any], None]) -> Iterator[None]:
    """Return a block in which `note(variable)` is called when Python code reads a variable.

    TensorFlow may read trainable ones past it: see `watcher_of_reads`. It is called
    in all threads, and blocks of several threads may overlap.
    """

    def accessed(variable: Any) -> None:
        note(variable)
        _variable_accessed(variable)

    # A function that is called tells what it reads only if a tape might record it.
    values = [(resource_variable_ops, "variable_accessed", accessed)]
    with _reads_noted.of(values), tf.GradientTape(watch_accessed_variables=False):
        yield


_NOT_COPIED = ("_class", "_gradient_op_type", "_output_shapes")


def copied_operation(op: Any, inputs: list[Any]) -> list[Any]:
    """Make an operation once more in the current graph, of other inputs; return its outputs."""
    graph = tf.compat.v1.get_default_graph()
    for function in _functions_of(op):
        graph._add_function_recursive(function)
    attributes = {k: v for k, v in op.node_def.attr.items() if k not in _NOT_COPIED}
    copy = graph._create_op_internal(
        op.type,
        inputs,
        [output.dtype for output in op.outputs],
        name=op.name.split("/")[-1],
        attrs=attributes,
        op_def=op.op_def,
    )
    for output, original in zip(copy.outputs, op.outputs):
        if output.dtype in (tf.resource, tf.variant):
            output._handle_data = getattr(original, "_handle_data", None)
        elif output.shape.is_compatible_with(original.shape):
            output.set_shape(original.shape)
    return copy.outputs


def _functions_of(op: Any) -> list[Any]:
    """Return the functions that an operation calls."""
    values = op.node_def.attr.values()
    names = [value.func.name for value in values if value.HasField("func")]
    names += [function.name for value in values for function in value.list.func]
    found = [op.graph._get_function(name) for name in names]
    return [function for function in found if function is not None]


_functions_inlined = _SharedReplacement()
_call_function: Any = polymorphic_function and polymorphic_function.Function.__call__
_inlining = threading.local()


def global_seeds() -> Any:
    """Return what Keras 3 draws from without a seed; `None` before the first such draw."""
    state = importlib.import_module("keras.src.backend.common.global_state")
    return state.get_global_attribute("global_seed_generator")


@contextlib.contextmanager
def unoptimised() -> Iterator[None]:
    """Return a block in which graphs that this thread calls run as they were built."""
    running: Any = context.context()
    before = running.function_call_options
    config = tf.compat.v1.ConfigProto.FromString(before.config_proto_serialized)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    running.function_call_options = type(before)(before.executor_type, config)
    try:
        yield
    finally:
        running.function_call_options = before


@contextlib.contextmanager
def inlined_functions(*, compiled: bool = False) -> Iterator[None]:
    """Return a block in which this thread calls the Python code of each `tf.function`.

    So it becomes part of the graph that is being traced, if there is one. What XLA compiles
    by itself is called as it is, as other numbers are drawn there, unless `compiled`; so are
    functions of frameworks, and those that were loaded without their Python code.
    """
    if polymorphic_function is None:
        yield
        return
    before = getattr(_inlining, "block", None)
    _inlining.block = {"compiled": compiled or bool(before and before["compiled"])}
    calls = [(polymorphic_function.Function, "__call__", _call_inlined)]
    try:
        with _functions_inlined.of(calls):
            yield
    finally:
        _inlining.block = before


def _call_inlined(function: Any, *args: Any, **kwargs: Any) -> Any:
    block = getattr(_inlining, "block", None)
    if block is None or _stays_apart(function, **block):
        return _call_function(function, *args, **kwargs)
    if hasattr(function, "_function_type"):  # TensorFlow 2.13 knows it by another name
        bound = function_type_utils.canonicalize_function_inputs(
            args, kwargs, function._function_type, function._default_values, function._is_pure
        )
        args, kwargs = bound.args, bound.kwargs
    python, status = function._python_function, ag_ctx.Status.DISABLED
    if function._autograph:
        options = function._experimental_autograph_options
        python = autograph_util.py_func_from_autograph(python, options)
        status = ag_ctx.Status.ENABLED
    with ag_ctx.ControlStatusCtx(status):
        return python(*args, **kwargs)


def _stays_apart(function: Any, *, compiled: bool) -> bool:
    """Say whether a `tf.function` is called as it is.

    Frameworks choose a kernel by attributes of a call, or need a graph of their own.
    """
    if function._jit_compile and not compiled and not under_xla():
        return True
    python = inspect.unwrap(function._python_function)
    module = python.__module__ if inspect.isfunction(python) else ""
    is_of_framework = module.split(".")[0] in ("tensorflow", "keras", "tf_keras")
    is_loaded = type(function) is not polymorphic_function.Function
    return is_of_framework or is_loaded or bool(getattr(function, "_attributes", None))
