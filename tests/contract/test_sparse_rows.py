"""Promise 13 in custom loops: rows of samples are listed, rows of every micro-batch summed."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from bigbatch.errors import ArgumentError
from comparison import largest_difference

from stack import IS_KERAS_3, keras, new_optimizers

rng = np.random.default_rng(4)
TOKENS = tf.constant(rng.integers(0, 5, (20, 6)))
TARGETS = tf.constant(rng.normal(size=(20, 6, 3)))
SIZES = (8, 8, 4)


class Tables:
    """A table of tokens, one of positions, and one that is used for both."""

    def __init__(self):
        draw = np.random.default_rng(1).normal
        names = ("tokens", "positions", "both")
        self.variables = [tf.Variable(draw(size=(7, 3)), name=name) for name in names]

    def mean_loss(self, x, y):
        tokens, positions, both = self.variables
        places = tf.range(tf.shape(x)[1])
        found = tf.gather(tokens, x) + tf.gather(positions, places)
        found += tf.gather(both, x) * tf.gather(both, places)
        return tf.reduce_mean(tf.square(tf.sin(found) - y))

    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.mean_loss(x, y)
        return tape.gradient(loss, self.variables)


def after_full_batch():
    tables = Tables()
    gradients = tables.gradients(TOKENS, TARGETS)
    new_optimizers().Adam(0.05).apply_gradients(zip(gradients, tables.variables))
    return [variable.numpy() for variable in tables.variables]


EXPECTED = after_full_batch()


def difference(tables, which=slice(None)):
    found = [variable.numpy() for variable in tables.variables]
    return largest_difference(found[which], EXPECTED[which])


@pytest.mark.parametrize("in_graph", [True, False], ids=["graph", "eager"])
def test_value_and_gradients_are_those_of_the_full_batch(in_graph):
    tables = Tables()
    optimizer = new_optimizers().Adam(0.05)

    def both(x, y):
        return bigbatch.value_and_gradients(
            tables.mean_loss, tables.variables, (x, y), microbatch_size=8
        )

    both = tf.function(both) if in_graph else both
    _, gradients = both(TOKENS, TARGETS)
    counts = [int(tf.shape(one.indices)[0]) for one in gradients]
    assert counts == [120, 6, 126]  # a row for each token, and one for each position
    optimizer.apply_gradients(zip(gradients, tables.variables))
    assert difference(tables) <= 1e-12


def train(wrap, repeated=lambda tables: ()):
    tables = Tables()
    accumulator = bigbatch.GradientAccumulator(
        new_optimizers().Adam(0.05),
        tables.variables,
        accumulation_steps=len(SIZES),
        repeated_rows=repeated(tables),
    )

    def micro_batch(x, y):
        accumulator.accumulate(tables.gradients(x, y), weight=tf.shape(x)[0])

    micro_batch = wrap(micro_batch)
    parts = [tf.split(one, SIZES) for one in (TOKENS, TARGETS)]
    for x, y in zip(*parts):
        micro_batch(x, y)
    assert accumulator.apply_when_full()
    return tables


ANY_SIZE = [tf.TensorSpec([None, 6], tf.int64), tf.TensorSpec([None, 6, 3], tf.float64)]
SEPARATE = slice(0, 2)  # a table for both kinds of rows is more than a loop can tell


def test_an_accumulator_asks_the_graph():
    tables = train(lambda function: tf.function(function, input_signature=ANY_SIZE))
    assert difference(tables, SEPARATE) <= 1e-12


def test_eagerly_it_is_told():
    plain = train(lambda function: function)
    told = train(lambda function: function, lambda tables: [tables.variables[1]])
    assert difference(told, SEPARATE) <= 1e-12
    assert difference(plain, slice(0, 1)) <= 1e-12
    if IS_KERAS_3:  # whose optimizers do not add up rows that were listed
        assert difference(plain, slice(1, 2)) > 1e-3


def test_rows_of_samples_are_not_summed_by_mistake():
    """In a graph for one batch size, what follows that size does not show."""
    table = tf.Variable(np.ones((7, 2)))
    accumulator = bigbatch.GradientAccumulator(keras.optimizers.SGD(1.0), [table])

    @tf.function
    def micro_batch(x):
        places = tf.broadcast_to(tf.range(3), [4, 3])  # of each of four samples
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, places) * x[:, :, None])
        accumulator.accumulate(tape.gradient(loss, [table]))

    for _ in range(2):
        micro_batch(tf.ones([4, 3], tf.float64))
    assert accumulator.gradients[0].indices.shape[0] == 24


def test_rows_that_are_not_the_same_are_refused():
    table = tf.Variable(np.ones((7, 2)))
    accumulator = bigbatch.GradientAccumulator(
        keras.optimizers.SGD(1.0), [table], repeated_rows=[table]
    )
    rows = tf.ones([2, 2], tf.float64)
    accumulator.accumulate([tf.IndexedSlices(rows, tf.constant([1, 2]))])
    with pytest.raises(tf.errors.InvalidArgumentError, match="repeated_rows"):
        accumulator.accumulate([tf.IndexedSlices(rows, tf.constant([1, 3]))])


def test_repeated_rows_are_of_variables_that_are_accumulated():
    with pytest.raises(ArgumentError, match="repeated_rows"):
        bigbatch.GradientAccumulator(
            keras.optimizers.SGD(), [tf.Variable(1.0)], repeated_rows=[tf.Variable(2.0)]
        )
