"""Promise 6: replicas make the update of the full batch, however samples are shared."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from replica_cases import (
    SHARES,
    UPDATES,
    compute_average_loss,
    keras_loss,
    local_mean,
    no_keras_loss,
    train_on_replicas,
    windows,
)

from problems import (
    TOLERANCE,
    dense_problem,
    embedding_problem,
    largest_difference,
    optimizers,
    train_full_batch,
    updates_of,
    variables_for,
)
from stack import keras


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("optimizer", optimizers())
@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("make_problem", [dense_problem, embedding_problem])
def test_equals_one_device_and_the_full_batch(mirrored, make_problem, shares, optimizer, dtype):
    problem = make_problem(dtype)
    expected = train_full_batch(problem, optimizers()[optimizer], UPDATES)
    model, optimizer, _, _ = train_on_replicas(mirrored, problem, optimizer, SHARES[shares])
    assert updates_of(optimizer, UPDATES) == UPDATES
    assert largest_difference(model, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    "loss", [local_mean, pytest.param(keras_loss, marks=no_keras_loss), compute_average_loss]
)
@pytest.mark.parametrize("shares", ["even", "uneven"])
def test_each_way_of_computing_the_loss(mirrored, shares, loss):
    problem = dense_problem()
    expected = train_full_batch(problem, optimizers()["adam"], UPDATES)
    model, *_ = train_on_replicas(mirrored, problem, "adam", SHARES[shares], loss)
    assert largest_difference(model, expected) <= TOLERANCE["float64"]


def test_updates_may_be_made_inside_the_scope(mirrored):
    problem = dense_problem()
    expected = train_full_batch(problem, optimizers()["adam"], UPDATES)
    model, *_ = train_on_replicas(mirrored, problem, "adam", SHARES["uneven"], in_scope=True)
    assert largest_difference(model, expected) <= TOLERANCE["float64"]


@pytest.mark.parametrize("optimizer", [n for n in optimizers() if "adam" in n])
def test_updates_may_be_made_in_the_graph_around_strategy_run(mirrored, optimizer):
    problem, shares = embedding_problem(), SHARES["uneven"]
    expected = train_full_batch(problem, optimizers()[optimizer], UPDATES)
    with mirrored.scope():
        model, optimizer = problem.build(optimizers()[optimizer])
        variables = variables_for(optimizer, model)
        accumulator = bigbatch.GradientAccumulator(
            optimizer, variables, accumulation_steps=len(shares)
        )

    def replica_fn(x, y):
        with tf.GradientTape() as tape:
            value, weight = local_mean(problem, model, x, y)
        accumulator.accumulate(tape.gradient(value, variables), weight=weight)

    @tf.function(reduce_retracing=True)
    def micro_batch(x, y):
        mirrored.run(replica_fn, args=(x, y))
        return accumulator.apply_when_full()

    for _ in range(UPDATES):
        updated = [bool(micro_batch(x, y)) for x, y in windows(mirrored, problem, shares)]
        assert updated == [False, True]
    assert largest_difference(model, expected) <= TOLERANCE["float64"]


def test_what_only_one_replica_has_is_not_lost(mirrored):
    with mirrored.scope():
        a, b = tf.Variable(0.0), tf.Variable(0.0)
        accumulator = bigbatch.GradientAccumulator(keras.optimizers.SGD(1.0), [a, b])

    @tf.function
    def micro_batch(first_takes_part):
        def replica_fn():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            if tf.get_static_value(replica) == 1:
                accumulator.accumulate([tf.constant(1.0), tf.constant(1.0)])
            elif first_takes_part:
                accumulator.accumulate([tf.constant(1.0), None])

        mirrored.run(replica_fn)

    micro_batch(tf.constant(True))
    assert accumulator.flush() is True
    np.testing.assert_allclose([a.numpy(), b.numpy()], [-1.0, -0.5])
    micro_batch(tf.constant(False))
    assert int(accumulator.step) == 1
    assert accumulator.flush() is True
    np.testing.assert_allclose([a.numpy(), b.numpy()], [-2.0, -1.5])


def test_compiled_micro_batches_with_other_numbers_of_rows_on_each_replica(mirrored):
    with mirrored.scope():
        table = tf.Variable(tf.zeros([5, 2]))
        accumulator = bigbatch.GradientAccumulator(
            keras.optimizers.SGD(1.0), [table], accumulation_steps=2
        )
    indices = [[0, 1], [2, 3, 4]]

    def compiled():
        @tf.function(jit_compile=True)
        def micro_batch(indices):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, indices))
            accumulator.accumulate(tape.gradient(loss, [table]))

        return micro_batch

    functions = [compiled(), compiled()]

    @tf.function(autograph=False)
    def micro_batch():
        def replica_fn():
            context = tf.distribute.get_replica_context()
            replica = tf.get_static_value(context.replica_id_in_sync_group)
            functions[replica](tf.constant(indices[replica]))

        mirrored.run(replica_fn)

    updated = []
    for _ in range(4):
        micro_batch()
        updated.append(accumulator.apply_when_full())
    assert updated == [False, True] * 2
    np.testing.assert_allclose(table.numpy(), np.full([5, 2], -1.0))


def test_one_device_strategy():
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    problem = dense_problem()
    expected = train_full_batch(problem, optimizers()["adam"], UPDATES)
    with strategy.scope():
        model, optimizer = problem.build(optimizers()["adam"])
        accumulator = bigbatch.GradientAccumulator(optimizer, model.trainable_variables)

    @tf.function
    def micro_batch(x, y):
        def replica_fn(x, y):
            with tf.GradientTape() as tape:
                loss = problem.mean_loss(model, x, y)
            gradients = tape.gradient(loss, model.trainable_variables)
            accumulator.accumulate(gradients, weight=tf.shape(x)[0])

        strategy.run(replica_fn, args=(x, y))

    for _ in range(UPDATES):
        for rows in (slice(0, 10), slice(10, 24)):
            micro_batch(tf.constant(problem.x[rows]), tf.constant(problem.y[rows]))
        accumulator.flush()
    assert largest_difference(model, expected) <= TOLERANCE["float64"]
