"""Promise 6: what `value_and_gradients` returns on each replica sums to the global gradient."""

from __future__ import annotations

import pytest
import tensorflow as tf

import bigbatch
from replica_cases import SHARES, UPDATES, no_keras_loss, on_each_replica

from problems import (
    TOLERANCE,
    dense_problem,
    embedding_problem,
    largest_difference,
    train_full_batch,
)
from stack import build, keras


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("form", ["mean", "sum and weight"])
@pytest.mark.parametrize("make_problem", [dense_problem, embedding_problem])
def test_value_and_gradients_sum_to_the_global_gradient(mirrored, make_problem, form, shares):
    problem = make_problem()
    # No clipping here: in replica context Keras clips each replica's part by itself.
    make_optimizer = lambda: keras.optimizers.Adam(0.05)  # noqa: E731
    with mirrored.scope():
        model, optimizer = problem.build(make_optimizer)
        variables = model.trainable_variables
        build(optimizer, variables)

    def loss_fn(x, y):
        per_sample = problem.per_sample(model, x, y)
        if form == "mean":
            return tf.reduce_mean(per_sample)
        return tf.reduce_sum(per_sample), tf.shape(x)[0]

    def replica_fn(x, y):
        loss, gradients = bigbatch.value_and_gradients(
            loss_fn, variables, (x, y), microbatch_size=4
        )
        optimizer.apply_gradients(zip(gradients, variables))
        return loss

    @tf.function(reduce_retracing=True)
    def update(x, y):
        return mirrored.reduce("SUM", mirrored.run(replica_fn, args=(x, y)), axis=None)

    whole = [sum(share) for share in zip(*SHARES[shares])]
    x, y = (
        on_each_replica(mirrored, [data[: whole[0]], data[whole[0] :]])
        for data in (problem.x, problem.y)
    )
    reference, _ = problem.build(make_optimizer)
    expected_loss = problem.mean_loss(reference, problem.x, problem.y)
    assert abs(float(update(x, y) - expected_loss)) <= 1e-12
    for _ in range(UPDATES - 1):
        update(x, y)
    expected = train_full_batch(problem, make_optimizer, UPDATES)
    assert largest_difference(model, expected) <= TOLERANCE["float64"]


@no_keras_loss
def test_a_keras_loss_in_value_and_gradients_is_multiplied_by_the_replicas(mirrored):
    problem = dense_problem()
    with mirrored.scope():
        model, _ = problem.build(lambda: None)
    loss_object = keras.losses.MeanSquaredError(dtype=problem.dtype)

    def replica_fn(x, y):
        return bigbatch.value_and_gradients(
            lambda x, y: loss_object(y, model(x)) * mirrored.num_replicas_in_sync,
            model.trainable_variables,
            (x, y),
            microbatch_size=4,
        )[0]

    run = tf.function(lambda x, y: mirrored.run(replica_fn, args=(x, y)))
    x, y = (on_each_replica(mirrored, [d[:7], d[7:]]) for d in (problem.x, problem.y))
    loss = mirrored.reduce("SUM", run(x, y), axis=None)
    expected = problem.mean_loss(model, problem.x, problem.y)
    assert abs(float(loss - expected)) <= 1e-12
