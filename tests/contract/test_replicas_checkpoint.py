"""A window on replicas is saved and restored in its middle."""

from __future__ import annotations

import pytest
import tensorflow as tf

import bigbatch
from replica_cases import SHARES, local_mean, windows

from problems import (
    TOLERANCE,
    dense_problem,
    embedding_problem,
    largest_difference,
    optimizers,
    train_full_batch,
)


@pytest.mark.parametrize("make_problem", [dense_problem, embedding_problem])
def test_checkpoint_in_the_middle_of_a_window(mirrored, make_problem, tmp_path):
    problem, shares = make_problem(), SHARES["uneven"]
    with mirrored.scope():
        model, optimizer = problem.build(optimizers()["sgd"])
        variables = model.trainable_variables
        saved = bigbatch.GradientAccumulator(optimizer, variables)
        restored = bigbatch.GradientAccumulator(optimizer, variables)
    accumulators = {"saved": saved, "restored": restored}

    def replica_fn(name, x, y):
        with tf.GradientTape() as tape:
            value, weight = local_mean(problem, model, x, y)
        accumulators[name].accumulate(tape.gradient(value, variables), weight=weight)

    @tf.function(reduce_retracing=True)
    def micro_batch(name, x, y):
        mirrored.run(replica_fn, args=(name, x, y))

    first, second = windows(mirrored, problem, shares)
    micro_batch("saved", *first)
    path = tf.train.Checkpoint(accumulator=saved).save(tmp_path / "checkpoint")
    tf.train.Checkpoint(accumulator=restored).restore(path).assert_consumed()
    assert int(restored.step) == 1
    assert float(restored.total_weight) == sum(shares[0])
    micro_batch("restored", *second)
    assert restored.flush() is True
    expected = train_full_batch(problem, optimizers()["sgd"], 1)
    assert largest_difference(model, expected) <= TOLERANCE["float64"]
