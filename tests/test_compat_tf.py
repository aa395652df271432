"""Private names of TensorFlow and of optimizers in use: an upgrade breaks here first.

Runs on every row of `make matrix` with TensorFlow 2. What to adapt is the file that is named.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from bigbatch.backends.tensorflow import applies, compat
from bigbatch.backends.tensorflow.keras2_optimizers import (
    Keras2Optimizer,
    LegacyKeras2Optimizer,
)
from bigbatch.backends.tensorflow.keras3_optimizers import Keras3Optimizer
from bigbatch.backends.tensorflow.optimizers import adapted
from bigbatch.backends.tensorflow.v1_optimizers import V1Optimizer

from stack import HAS_LEGACY, IS_KERAS_3, keras, new_optimizers, with_loss_scale

KERAS_2 = "adapt keras2_optimizers.py to this version of Keras 2"
V1 = "adapt v1_optimizers.py to this version of TensorFlow"

only_keras_2 = pytest.mark.skipif(IS_KERAS_3, reason="of Keras 2")
only_legacy = pytest.mark.skipif(not HAS_LEGACY, reason="of Keras 2")


def test_an_optimizer_of_keras_is_known():
    kind = Keras3Optimizer if IS_KERAS_3 else Keras2Optimizer
    for optimizer in (new_optimizers().Adam(), with_loss_scale(new_optimizers().Adam(), 8.0)):
        assert type(adapted(optimizer, [tf.Variable(1.0)])) is kind


@only_legacy
def test_a_legacy_optimizer_is_known():
    legacy = keras.optimizers.legacy
    for optimizer in (legacy.Adam(), with_loss_scale(legacy.Adam(), 8.0)):
        assert type(adapted(optimizer, [tf.Variable(1.0)])) is LegacyKeras2Optimizer


@only_keras_2
def test_the_state_of_an_optimizer_of_keras_2():
    optimizer, w = new_optimizers().SGD(0.1, momentum=0.9), tf.Variable([1.0, 2.0])
    assert not getattr(optimizer, "_built", False), KERAS_2
    adapted(optimizer, [w])
    assert optimizer._built, KERAS_2
    assert list(optimizer._index_dict) == [optimizer._var_key(w)], KERAS_2
    assert len(optimizer.momentums) == 1, KERAS_2
    assert int(optimizer.iterations) == 0, KERAS_2
    assert isinstance(optimizer._learning_rate, tf.Variable), KERAS_2


@only_keras_2
def test_nadam_of_keras_2_is_not_traced():
    assert not adapted(new_optimizers().Nadam(), [tf.Variable(1.0)]).is_traced, KERAS_2
    assert adapted(new_optimizers().Adam(), [tf.Variable(1.0)]).is_traced, KERAS_2


@only_keras_2
def test_the_scheduled_learning_rate_of_keras_2_is_a_variable_before_any_update():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([9], [2.0, 0.0])
    optimizer = new_optimizers().SGD(schedule)
    adapted(optimizer, [tf.Variable(1.0)])
    assert isinstance(optimizer._current_learning_rate, tf.Variable), KERAS_2


@only_legacy
def test_the_state_of_a_legacy_optimizer():
    optimizer, w = keras.optimizers.legacy.SGD(0.1, momentum=0.9), tf.Variable([1.0, 2.0])
    assert optimizer._hyper["learning_rate"] == 0.1, KERAS_2
    adapted(optimizer, [w])
    assert isinstance(optimizer._hyper["learning_rate"], tf.Variable), KERAS_2
    np.testing.assert_array_equal(optimizer.get_slot(w, "momentum"), [0.0, 0.0], KERAS_2)


def test_the_slots_of_an_optimizer_of_tensorflow_1():
    optimizer, w = tf.compat.v1.train.MomentumOptimizer(0.1, 0.9), tf.Variable([1.0, 2.0])
    assert type(adapted(optimizer, [w])) is V1Optimizer, V1
    np.testing.assert_array_equal(optimizer.get_slot(w, "momentum"), [0.0, 0.0], V1)


def test_like_the_caller_converts_in_a_converted_function_only():
    def choose(x):
        if x > 0:
            return tf.constant("converted")
        return tf.constant("")

    converted = tf.function(lambda x: compat.like_the_caller(choose)(x))
    assert converted(tf.constant(1)) == b"converted"
    unconverted = tf.function(lambda x: compat.like_the_caller(choose)(x), autograph=False)
    try:
        unconverted(tf.constant(1))
    except tf.errors.OperatorNotAllowedInGraphError:
        return
    raise AssertionError("AutoGraph converted a function that was called without it")


def test_under_xla():
    seen = []

    def look():
        seen.append(compat.under_xla())
        tf.cond(tf.constant(True), lambda: seen.append(compat.under_xla()) or 1, lambda: 2)
        return tf.constant(0)

    look()
    tf.function(look)()
    tf.function(look, jit_compile=True)()
    assert seen == [False] * 4 + [True] * 2


def test_outside_strategy_scope(mirrored):
    with mirrored.scope():
        assert tf.distribute.in_cross_replica_context()
        with compat.outside_strategy_scope():
            assert not tf.distribute.has_strategy()
            assert tf.distribute.get_replica_context() is not None
        assert tf.distribute.get_strategy() is mirrored


def test_per_replica_types(mirrored):
    data = mirrored.experimental_distribute_dataset(tf.data.Dataset.range(8).batch(4))
    assert [spec.dtype for spec in compat.per_replica_types(data.element_spec)] == [
        tf.int64
    ] * 2
    assert compat.per_replica_types(tf.TensorSpec([])) == []


def test_devices_have_a_limit():
    assert compat.memory_limits()["CPU:0"] > 0


def test_a_compiled_function_says_so():
    for jit_compile in (None, False, True):
        function = tf.function(lambda: tf.constant(1.0), jit_compile=jit_compile)
        found = compat.is_compiled(function)
        assert found == bool(jit_compile), "adapt src/bigbatch/backends/tensorflow/compat.py"
    assert not compat.is_compiled(lambda: 1.0)


def test_the_graph_of_a_function_that_is_called():
    inner = tf.function(lambda x: x + 1.0)
    graph = tf.function(lambda x: inner(x)).get_concrete_function(tf.TensorSpec([])).graph
    (call,) = [op for op in graph.get_operations() if "PartitionedCall" in op.type]
    assert "AddV2" in [op.type for op in compat.function_graph(graph, call).get_operations()]


def test_branches_are_told_from_functions():
    found = []

    def note():
        found.append(compat.is_branch(tf.compat.v1.get_default_graph()))
        return tf.constant(1.0)

    def both(x):
        tf.cond(x > 0, note, note)
        return tf.function(note)()

    tf.function(both, autograph=False).get_concrete_function(tf.TensorSpec([]))
    assert found == [True, True, False]


def test_every_stateless_draw_passes_through_the_replacement_and_back():
    seed = tf.constant([1, 2])
    draws = {
        "stateless_random_uniform_v2": lambda: tf.random.stateless_uniform([2], seed),
        "stateless_random_normal_v2": lambda: tf.random.stateless_normal([2], seed),
        "stateless_random_uniform_int_v2": lambda: tf.random.stateless_uniform(
            [2], seed, minval=0, maxval=9, dtype=tf.int32
        ),
        "stateless_truncated_normal_v2": lambda: tf.random.stateless_truncated_normal(
            [2], seed
        ),
        "stateless_multinomial": lambda: tf.random.stateless_categorical(
            tf.zeros([1, 3]), 2, seed
        ),
    }
    names = []

    def noted(operation, *args, **options):
        names.append(operation)
        return compat.drawing_operation(operation)(*args, **options)

    before = [draw().numpy() for draw in draws.values()]
    with compat.replaced_draws(noted):
        inside = [draw().numpy() for draw in draws.values()]
    assert names == list(draws)
    after = [draw().numpy() for draw in draws.values()]
    assert names == list(draws)  # none is replaced any more
    for one, two, three in zip(before, inside, after):
        assert (one == two).all()
        assert (one == three).all()


def test_reads_of_variables_are_noted_in_and_outside_of_functions():
    one, two, three = (tf.Variable([1.0]) for _ in range(3))
    function = tf.function(lambda: two + 1.0)
    function()
    seen = []
    with compat.noted_reads(seen.append):
        _ = one + 1.0
        function()
        three.assign([2.0])
        tf.gather(three, [0])
    noted = list(dict.fromkeys(id(variable) for variable in seen))
    assert noted == [id(one), id(two), id(three)]
    seen.clear()
    _ = one + 1.0
    assert not seen


def test_trainable_variables_that_tensorflow_reads_by_itself_are_watched():
    one, two = tf.Variable([[1.0]]), tf.Variable([[1.0]])
    with compat.watcher_of_reads() as watcher:
        tf.matmul(one, one)  # no Python code of a variable runs
    tf.matmul(two, two)
    assert [id(variable) for variable in watcher.watched_variables()] == [id(one)]


def test_nothing_is_kept_of_what_is_discarded():
    variable = tf.Variable(1.0)

    @tf.function
    def changes():
        variable.assign_add(1.0)
        with applies.discarding():
            variable.assign_add(10.0)
        variable.assign_add(100.0)

    changes()
    assert float(variable) == 102.0


def test_code_that_runs_eagerly_while_a_graph_is_built():
    with tf.Graph().as_default():
        assert not tf.executing_eagerly()
        with compat.eagerly():
            assert tf.executing_eagerly()
        assert not tf.executing_eagerly()


@pytest.mark.skipif(not IS_KERAS_3, reason="for exact batch normalisation, of Keras 3")
def test_functions_are_inlined_with_autograph_and_only_in_the_block():
    @tf.function
    def inner(x):
        if tf.reduce_sum(x) > 0:
            x = 2 * x
        return x

    def outer(x):
        with compat.inlined_functions():
            inlined = inner(x)
        return inlined + inner(x)

    def kinds(function):
        graph = tf.function(function, autograph=False).get_concrete_function(1.0).graph
        return [op.type for op in graph.get_operations()]

    found = kinds(outer)
    assert "StatelessIf" in found, "adapt compat.inlined_functions to this TensorFlow"
    assert sum("PartitionedCall" in kind for kind in found) == 1


def test_operations_are_copied_with_the_functions_they_call():
    @tf.function(autograph=False)
    def original(x):
        y = tf.cond(x > 0, lambda: 2 * x, lambda: x)
        return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y + x), [0, y])[1]

    graph = original.get_concrete_function(tf.TensorSpec([])).graph

    @tf.function(autograph=False)
    def copy(x):
        values = {graph.inputs[0].name: x}
        for op in graph.get_operations():
            if op.outputs[0].name not in values:
                inputs = [values[tensor.name] for tensor in op.inputs]
                outputs = compat.copied_operation(op, inputs)
                values.update(zip((tensor.name for tensor in op.outputs), outputs))
        return values[graph.outputs[0].name]

    assert [float(copy(tf.constant(x))) for x in (2.0, -1.0)] == [10.0, -4.0]
