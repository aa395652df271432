"""A custom training loop on two replicas that hold different numbers of samples."""

from __future__ import annotations

import contextlib

import pytest
import tensorflow as tf

import bigbatch

from problems import optimizers, variables_for
from stack import IS_KERAS_3, keras

# Samples of each replica in each micro-batch of a window; all windows hold 24 samples.
SHARES = {
    "even": [(6, 6), (6, 6)],
    "uneven": [(1, 9), (11, 3)],
    "one replica has none": [(10, 0), (0, 8), (6, 0)],
}


UPDATES = 3


no_keras_loss = pytest.mark.skipif(
    not IS_KERAS_3, reason="Keras 2 refuses a loss object that takes a mean on a replica"
)


def local_mean(problem, model, x, y):
    """Return the mean over this replica's samples: 0/0 where it has none."""
    samples = tf.cast(tf.shape(x)[0], problem.dtype)
    return tf.reduce_sum(problem.per_sample(model, x, y)) / samples, samples


def keras_loss(problem, model, x, y):
    # A Keras loss divides by the number of replicas.
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    loss = keras.losses.MeanSquaredError(dtype=problem.dtype)(y, model(x, training=True))
    return loss * replicas, tf.shape(x)[0]


def compute_average_loss(problem, model, x, y):
    context = tf.distribute.get_replica_context()
    replicas = context.num_replicas_in_sync
    n = context.all_reduce("sum", tf.shape(x)[0])  # the samples of all replicas
    per_sample = problem.per_sample(model, x, y)
    loss = tf.nn.compute_average_loss(per_sample, global_batch_size=n)
    return loss * replicas, n / replicas


def on_each_replica(strategy, values):
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(values[context.replica_id_in_sync_group])
    )


def windows(strategy, problem, shares):
    """Yield the micro-batches of a window, distributed over the replicas."""
    start = 0
    for first, second in shares:
        middle, end = start + first, start + first + second
        yield tuple(
            on_each_replica(strategy, [data[start:middle], data[middle:end]])
            for data in (problem.x, problem.y)
        )
        start = end
    assert start == len(problem.x)


def train_on_replicas(
    strategy, problem, optimizer, shares, loss=local_mean, in_scope=False, steps=None
):
    """Return the model, its optimizer, the accumulator and the function of a micro-batch."""
    with strategy.scope():
        model, optimizer = problem.build(optimizers()[optimizer])
        variables = variables_for(optimizer, model)
        accumulator = bigbatch.GradientAccumulator(
            optimizer, variables, accumulation_steps=steps or len(shares)
        )

    def replica_fn(x, y):
        with tf.GradientTape() as tape:
            value, weight = loss(problem, model, x, y)
        accumulator.accumulate(tape.gradient(value, variables), weight=weight)

    @tf.function(reduce_retracing=True)
    def micro_batch(x, y):
        strategy.run(replica_fn, args=(x, y))

    with strategy.scope() if in_scope else contextlib.nullcontext():
        for _ in range(UPDATES):
            for x, y in windows(strategy, problem, shares):
                micro_batch(x, y)
                accumulator.apply_when_full()
    return model, optimizer, accumulator, micro_batch
