"""Promise 3: the optimizer is left alone; it gets one gradient list per update."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from bigbatch.core.versions import version_of

from problems import (
    TOLERANCE,
    built_in_optimizers,
    cut,
    dense_problem,
    embedding_problem,
    largest_difference,
    optimizers,
    train_full_batch,
    v1_optimizers,
    variables_for,
)
from stack import (
    HAS_LEGACY,
    IS_KERAS_3,
    VERSION,
    gradients_for,
    keras,
    loss_scale,
    new_optimizers,
    with_loss_scale,
)


class Recorder:
    """The smallest optimizer there is: plain Python, keeps what it is given."""

    def __init__(self):
        self.updates = []

    def apply_gradients(self, pairs):
        self.updates.append(list(pairs))
        for gradient, variable in pairs:
            if gradient is not None:
                variable.assign_sub(gradient)


def test_any_object_with_apply_gradients_gets_one_list_per_update():
    w, v = tf.Variable(1.0), tf.Variable([1.0, 2.0])
    recorder = Recorder()
    accumulator = bigbatch.GradientAccumulator(recorder, [w, v], accumulation_steps=2)
    for value in (1.0, 2.0, 3.0, 4.0):
        accumulator.accumulate([tf.constant(value), None])
        accumulator.apply_when_full()
    assert [float(update[0][0]) for update in recorder.updates] == [1.5, 3.5]
    assert all(update[1] == (None, v) for update in recorder.updates)
    assert all(update[0][1] is w for update in recorder.updates)


@pytest.mark.parametrize("name", [n for n in optimizers() if not n.startswith("v1")])
def test_configuration_and_counters_stay_the_users(name):
    problem = dense_problem()
    model, optimizer = problem.build(optimizers()[name])
    before = optimizer.get_config()
    accumulator = bigbatch.GradientAccumulator(
        optimizer, model.trainable_variables, accumulation_steps=3
    )
    for _ in range(6):
        gradients = [tf.ones_like(variable) for variable in model.trainable_variables]
        accumulator.accumulate(gradients)
        accumulator.apply_when_full()
    assert int(optimizer.iterations.numpy()) == 2
    assert type(optimizer).__module__.startswith(("keras.", "tf_keras."))
    after = optimizer.get_config()
    assert set(after) == set(before)
    for key in set(before) - {"learning_rate"}:
        is_number = isinstance(before[key], float)  # float32 in some optimizers from then on
        assert after[key] == (pytest.approx(before[key]) if is_number else before[key])


def test_all_built_in_optimizers_are_found():
    assert {"SGD", "Adam", "AdamW", "RMSprop"} <= set(built_in_optimizers())
    assert {"v1 AdamOptimizer", "v1 FtrlOptimizer"} <= set(v1_optimizers())


@pytest.mark.parametrize("name", [*built_in_optimizers(), *v1_optimizers()])
def test_every_built_in_optimizer_makes_the_update_of_the_full_batch(name):
    kind = {**built_in_optimizers(), **v1_optimizers()}[name]
    if name == "Muon" and version_of(VERSION) < (3, 13):
        pytest.skip("Muon of this Keras fails by itself on TensorFlow")
    no_float64 = name == "Muon" or "Proximal" in name
    dtype = "float32" if no_float64 else "float64"
    problem = embedding_problem(dtype)
    expected = train_full_batch(problem, kind, 3)
    model, optimizer = problem.build(kind)
    variables = variables_for(optimizer, model)
    accumulator = bigbatch.GradientAccumulator(optimizer, variables, accumulation_steps=3)
    for _ in range(3):
        for x, y in cut(problem, [11, 4, 9]):
            with tf.GradientTape() as tape:
                loss = problem.mean_loss(model, x, y)
            accumulator.accumulate(tape.gradient(loss, variables), weight=len(x))
            accumulator.apply_when_full()
    # Ten times the tolerance of one update: some divide by tiny second moments.
    assert largest_difference(model, expected) <= 10 * TOLERANCE[dtype]


def test_the_learning_rate_can_be_changed_between_updates():
    w = tf.Variable(0.0)
    optimizer = keras.optimizers.SGD(1.0)
    accumulator = bigbatch.GradientAccumulator(optimizer, [w], accumulation_steps=1)
    for rate in (1.0, 0.5):
        optimizer.learning_rate = rate
        accumulator.accumulate([tf.constant(1.0)])
        accumulator.apply_when_full()
    assert float(w) == -1.5


def test_a_learning_rate_that_is_a_function_is_called_for_each_update():
    w, rates = tf.Variable(0.0), iter([1.0, 0.5])
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(lambda: next(rates))
    accumulator = bigbatch.GradientAccumulator(optimizer, [w], accumulation_steps=1)
    for _ in range(2):
        accumulator.accumulate([tf.constant(1.0)])
        accumulator.apply_when_full()
    assert float(w) == -1.5


def test_settings_can_be_changed_between_updates():
    w = tf.Variable([3.0, 4.0])
    optimizer = keras.optimizers.SGD(1.0)
    accumulator = bigbatch.GradientAccumulator(optimizer, [w], accumulation_steps=1)
    accumulator.accumulate([tf.zeros([2])])
    accumulator.apply_when_full()
    optimizer.clipnorm = 1.0
    optimizer.learning_rate = keras.optimizers.schedules.PiecewiseConstantDecay([9], [2.0, 0.0])
    accumulator.accumulate([tf.constant([3.0, 4.0])])
    accumulator.apply_when_full()
    np.testing.assert_allclose(w, [3.0 - 2 * 0.6, 4.0 - 2 * 0.8], rtol=1e-6)


@pytest.mark.parametrize("first", ["a number", "a schedule"])
def test_the_schedule_can_be_replaced_between_updates(first):
    """Nothing else changes: an update must not go on with the schedule it was traced with."""
    schedules = keras.optimizers.schedules

    def make_optimizer():
        rate = 0.05 if first == "a number" else schedules.ExponentialDecay(0.05, 2, 0.5)
        return new_optimizers().Adam(rate)

    def replace_schedule(optimizer, update):
        if update:  # the one before is gone then, and its id free for another
            optimizer.learning_rate = schedules.PolynomialDecay(0.1 * update, decay_steps=9)

    problem = dense_problem()
    expected = train_full_batch(problem, make_optimizer, 4, replace_schedule)
    model, optimizer = problem.build(make_optimizer)
    variables = model.trainable_variables
    accumulator = bigbatch.GradientAccumulator(optimizer, variables, accumulation_steps=3)
    for update in range(4):
        replace_schedule(optimizer, update)
        for x, y in cut(problem, [11, 4, 9]):
            with tf.GradientTape() as tape:
                loss = problem.mean_loss(model, x, y)
            accumulator.accumulate(tape.gradient(loss, variables), weight=len(x))
            accumulator.apply_when_full()
    assert largest_difference(model, expected) <= TOLERANCE["float64"]


LOSS_SCALED = {"new": lambda: new_optimizers().SGD(1.0, momentum=0.9)}
if HAS_LEGACY:
    LOSS_SCALED["legacy"] = lambda: keras.optimizers.legacy.SGD(1.0, momentum=0.9)


def loss_scaled(name, in_graph):
    w = tf.Variable([1.0, 2.0])
    optimizer = with_loss_scale(LOSS_SCALED[name](), initial_scale=8.0)
    accumulator = bigbatch.GradientAccumulator(optimizer, [w], accumulation_steps=2)

    def micro_batch(factor):
        accumulator.accumulate(gradients_for(optimizer, lambda: tf.reduce_sum(w * factor), [w]))

    return w, optimizer, accumulator, tf.function(micro_batch) if in_graph else micro_batch


@pytest.mark.parametrize("name", LOSS_SCALED)
@pytest.mark.parametrize("in_graph", [False, True])
def test_loss_scaling_is_undone_once(in_graph, name):
    w, optimizer, accumulator, micro_batch = loss_scaled(name, in_graph)
    for factor in (1.0, 2.0):
        micro_batch(tf.constant(factor))
    assert accumulator.apply_when_full()
    np.testing.assert_allclose(w, [1.0 - 1.5, 2.0 - 1.5])
    assert loss_scale(optimizer) == 8.0


@pytest.mark.parametrize("name", LOSS_SCALED)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("in_graph", [False, True])
def test_a_value_that_is_not_finite_skips_the_whole_update_and_leaves_no_trace(
    in_graph, position, bad, name
):
    w, optimizer, accumulator, micro_batch = loss_scaled(name, in_graph)
    factors = [1.0, 1.0]
    factors[position] = bad
    for factor in factors:
        micro_batch(tf.constant(factor, tf.float32))
    accumulator.apply_when_full()
    np.testing.assert_array_equal(w, [1.0, 2.0])
    assert loss_scale(optimizer) == 4.0
    assert int(optimizer.iterations.numpy()) == (0 if IS_KERAS_3 else 1)  # Keras 2 counts it
    for factor in (1.0, 2.0):
        micro_batch(tf.constant(factor))
    accumulator.apply_when_full()
    np.testing.assert_allclose(w, [1.0 - 1.5, 2.0 - 1.5])
