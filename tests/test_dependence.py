"""What depends on the samples in the graph of a micro-batch."""

from __future__ import annotations

import pytest
import tensorflow as tf

from bigbatch.backends.tensorflow.dependence import Dependence

TABLE = tf.Variable(tf.zeros([10, 3]))
COUNTER = tf.Variable(0)
MEAN = tf.Variable(0.0)
AFTER_MEAN = tf.Variable(0.0)


@tf.function(autograph=False)
def nested(x, positions):
    COUNTER.assign_add(1)
    return (
        tf.gather(TABLE, positions),
        tf.gather(TABLE, tf.cast(x[:, 0], tf.int32)),
        tf.shape(x),
    )


ASKED = {
    # name: (tensor, whether it depends on samples)
    "a constant": (lambda x: tf.constant(1), False),
    "the samples": (lambda x: x, True),
    "their number": (lambda x: tf.shape(x)[0], True),
    "another dimension": (lambda x: tf.shape(x)[1], False),
    "all dimensions": (lambda x: tf.shape(x), True),
    "the number of elements": (lambda x: tf.size(x), True),
    "the rank": (lambda x: tf.rank(x), False),
    "positions": (lambda x: tf.range(tf.shape(x)[1]), False),
    "numbers of samples": (lambda x: tf.range(tf.shape(x)[0]), True),
    "weights": (lambda x: tf.matmul(TABLE, TABLE, transpose_b=True), False),
    "weights times samples": (lambda x: TABLE[0, 0] * x, True),
    "a lookup of positions": (lambda x: nested(x, tf.range(tf.shape(x)[1]))[0], False),
    "a lookup of samples": (lambda x: nested(x, tf.range(2))[1], True),
    "new random numbers": (lambda x: tf.random.normal([2]), True),
    "random numbers from a seed": (lambda x: tf.random.stateless_normal([2], [1, 2]), False),
}
SHAPES = {
    # name: (shape, whether its first number follows the samples)
    "of samples": (tf.shape, True),
    "samples first": (lambda x: tf.stack([tf.shape(x)[0], 3]), True),
    "samples last": (lambda x: tf.stack([tf.shape(x)[1], tf.shape(x)[0]]), False),
    "transposed": (lambda x: tf.shape(tf.transpose(x)), False),
    "another last dimension": (lambda x: tf.concat([tf.shape(x)[:-1], [3]], 0), True),
    "samples and positions in one": (lambda x: tf.shape(tf.reshape(x, [-1, 2])), True),
    "from a nested function": (lambda x: nested(x, tf.range(2))[2], True),
    "of weights": (lambda x: tf.shape(TABLE), False),
    "of positions": (lambda x: tf.shape(tf.gather(TABLE, tf.range(tf.shape(x)[1]))), False),
}


def ask(question):
    """Return the answer to a question, asked while a micro-batch is traced."""
    answers = []

    def micro_batch(x):
        dependence = Dependence(tf.compat.v1.get_default_graph())
        answers.append(question(dependence, x))
        return x

    spec = tf.TensorSpec([None, None])
    graph = tf.function(micro_batch, autograph=False).get_concrete_function(spec).graph
    return answers[0], graph


@pytest.mark.parametrize("name", ASKED)
def test_values(name):
    make, expected = ASKED[name]
    assert ask(lambda dependence, x: dependence.of(make(x)))[0] is expected


@pytest.mark.parametrize("name", SHAPES)
def test_first_dimensions(name):
    make, expected = SHAPES[name]
    assert ask(lambda dependence, x: dependence.first_dimension(make(x)))[0] is expected


def test_variables_that_change_in_the_same_way_for_any_samples():
    def change(dependence, x):
        nested(x, tf.range(2))  # counts
        MEAN.assign(tf.reduce_sum(x))
        AFTER_MEAN.assign(MEAN + 1.0)  # through another variable

    _, graph = ask(change)
    found = Dependence(graph).independent_variables([COUNTER, MEAN, AFTER_MEAN])
    assert [variable is COUNTER for variable in found] == [True]


def test_deep_graphs_are_no_problem():
    def deep(dependence, x):
        for _ in range(3000):
            x = x + 1.0
        return dependence.of(x)

    assert ask(deep)[0] is True
