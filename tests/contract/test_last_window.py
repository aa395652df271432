"""Promise 2: the last, short window is applied with the weights it has; nothing leaks."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import bigbatch

from problems import cut, dense_problem, largest_difference, optimizers
from stack import build, keras


def make(accumulation_steps, learning_rate=1.0):
    w = tf.Variable(0.0)
    optimizer = keras.optimizers.SGD(learning_rate)
    return w, bigbatch.GradientAccumulator(
        optimizer, [w], accumulation_steps=accumulation_steps
    )


def feed(accumulator, *values, weight=1):
    for value in values:
        accumulator.accumulate([tf.constant(value)], weight=weight)


def test_epochs_with_a_short_last_window_equal_training_on_the_windows_themselves():
    # Micro-batches of 5, 5, 5, 5, 4 samples in windows of 3: updates of 15 and 9 samples.
    problem, sizes = dense_problem(), [5, 5, 5, 5, 4]
    model, optimizer = problem.build(optimizers()["adam"])
    for _ in range(2):
        for rows in (slice(0, 15), slice(15, 24)):
            with tf.GradientTape() as tape:
                loss = problem.mean_loss(model, problem.x[rows], problem.y[rows])
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    expected = model

    model, optimizer = problem.build(optimizers()["adam"])
    variables = model.trainable_variables
    accumulator = bigbatch.GradientAccumulator(optimizer, variables, accumulation_steps=3)
    for _ in range(2):
        for x, y in cut(problem, sizes):
            with tf.GradientTape() as tape:
                loss = problem.mean_loss(model, x, y)
            accumulator.accumulate(tape.gradient(loss, variables), weight=len(x))
            accumulator.apply_when_full()
        assert accumulator.flush() is True
    assert int(optimizer.iterations.numpy()) == 4
    assert largest_difference(model, expected) <= 1e-12


def test_window_longer_than_the_epoch_still_trains():
    w, accumulator = make(accumulation_steps=100)
    feed(accumulator, 2.0, 4.0)
    assert accumulator.apply_when_full() is False
    assert accumulator.flush() is True
    assert float(w) == -3.0


def test_flush_of_an_empty_window_does_nothing():
    w, accumulator = make(accumulation_steps=2)
    assert accumulator.flush() is False
    feed(accumulator, 2.0, 4.0)
    assert accumulator.apply_when_full() is True
    assert accumulator.flush() is False
    assert float(w) == -3.0


@pytest.mark.parametrize("end", ["flush", "reset"])
def test_nothing_of_one_window_is_left_in_the_next(end):
    w, accumulator = make(accumulation_steps=None)
    feed(accumulator, 2.0, weight=5)
    getattr(accumulator, end)()
    assert int(accumulator.step) == 0
    assert float(accumulator.total_weight) == 0
    assert accumulator.gradients == [None]
    w.assign(0.0)
    feed(accumulator, 10.0)
    assert accumulator.flush() is True
    assert float(w) == -10.0


def test_without_accumulation_steps_only_flush_updates():
    w, accumulator = make(accumulation_steps=None)
    feed(accumulator, 1.0, 2.0, 3.0)
    assert not accumulator.is_full
    assert accumulator.apply_when_full() is False
    assert accumulator.flush() is True
    assert float(w) == -2.0


def test_inside_the_window_everything_can_be_seen():
    _, accumulator = make(accumulation_steps=3)
    feed(accumulator, 2.0, weight=1)
    feed(accumulator, 5.0, weight=2)
    assert int(accumulator.step) == 2
    assert float(accumulator.total_weight) == 3
    assert float(accumulator.gradients[0]) == 4.0
    assert not accumulator.is_full
    feed(accumulator, 4.0)
    assert accumulator.is_full


@pytest.mark.parametrize("in_graph", [False, True])
def test_schedule_sets_the_length_of_each_window(in_graph):
    lengths = {0: 1, 1: 3, 2: 2}
    w, accumulator = make(lambda updates: lengths.get(updates, 4))

    def micro_batch(value):
        accumulator.accumulate([value])
        return accumulator.apply_when_full()

    if in_graph:
        micro_batch = tf.function(micro_batch)
    updated = [bool(micro_batch(tf.constant(1.0))) for _ in range(10)]
    assert np.flatnonzero(updated).tolist() == [0, 3, 5, 9]
    assert float(w) == -4.0
    if in_graph:
        assert micro_batch.experimental_get_tracing_count() == 1


@pytest.mark.parametrize("in_graph", [False, True])
def test_the_classic_hand_written_shape_works(in_graph):
    w = tf.Variable(0.0)
    optimizer = keras.optimizers.SGD(1.0)
    build(optimizer, [w])
    accumulator = bigbatch.GradientAccumulator(optimizer, [w])

    def micro_batch(value):
        accumulator.accumulate([value])
        if accumulator.step % 4 == 0:
            optimizer.apply_gradients(zip(accumulator.gradients, [w]))
            accumulator.reset()

    if in_graph:
        micro_batch = tf.function(micro_batch)
    for value in range(8):
        micro_batch(tf.constant(float(value)))
    assert float(w) == -(1.5 + 5.5)
    assert int(optimizer.iterations.numpy()) == 2


def test_a_failed_update_keeps_the_window():
    class Failing:
        def apply_gradients(self, pairs):
            raise RuntimeError("no")

    accumulator = bigbatch.GradientAccumulator(Failing(), [tf.Variable(0.0)])
    feed(accumulator, 2.0)
    with pytest.raises(RuntimeError, match="no"):
        accumulator.flush()
    assert int(accumulator.step) == 1
    assert float(accumulator.gradients[0]) == 2.0
