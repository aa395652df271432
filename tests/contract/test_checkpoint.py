"""Saved in the middle of a window and restored in a new process, training goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
import comparison
from bigbatch.loops import tf1 as eager1

from problems import (
    TOLERANCE,
    cut,
    embedding_problem,
    largest_difference,
    optimizers,
    train_full_batch,
)
from stack import keras


def accumulate(problem, model, accumulator, parts):
    for x, y in parts:
        with tf.GradientTape() as tape:
            loss = problem.mean_loss(model, x, y)
        gradients = tape.gradient(loss, model.trainable_variables)
        accumulator.accumulate(gradients, weight=len(x))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_new_process_makes_the_update_of_the_full_batch(mode, tmp_path):
    problem = embedding_problem()
    model, optimizer = problem.build(optimizers()["adam"])
    accumulator = bigbatch.GradientAccumulator(optimizer, model.trainable_variables)
    accumulate(problem, model, accumulator, cut(problem, [5, 1, 11, 7]))
    path = tf.train.Checkpoint(accumulator=accumulator).save(tmp_path / "checkpoint")
    program = Path(__file__).parent.parent / "resume_probe.py"
    run = [sys.executable, str(program), path, mode]
    output = subprocess.run(run, capture_output=True, check=True, text=True).stdout
    expected = train_full_batch(problem, optimizers()["adam"], 1)
    weights = json.loads(output.splitlines()[-1])
    difference = comparison.largest_difference(weights, expected.get_weights())
    assert difference <= TOLERANCE["float64"]


def test_a_checkpoint_of_an_empty_window_empties_the_window(tmp_path):
    problem = embedding_problem()
    model, optimizer = problem.build(optimizers()["adam"])
    accumulator = bigbatch.GradientAccumulator(optimizer, model.trainable_variables)
    checkpoint = tf.train.Checkpoint(accumulator=accumulator)
    path = checkpoint.save(tmp_path / "checkpoint")  # before any buffer has taken memory
    parts = cut(problem, [10, 14])
    accumulate(problem, model, accumulator, parts)
    checkpoint.restore(path)
    assert accumulator.flush() is False
    accumulate(problem, model, accumulator, parts)
    assert accumulator.flush() is True
    expected = train_full_batch(problem, optimizers()["adam"], 1)
    assert largest_difference(model, expected) <= TOLERANCE["float64"]


def test_a_window_of_tensorflow_1_goes_on_here(tmp_path):
    """The class for TensorFlow 1.14, which runs here, too, writes what this one reads."""
    problem = embedding_problem()
    model, optimizer = problem.build(optimizers()["adam"])
    old, new = (
        kind(optimizer, model.trainable_variables)
        for kind in (eager1.GradientAccumulator, bigbatch.GradientAccumulator)
    )
    first, *rest = cut(problem, [10, 9, 5])
    accumulate(problem, model, old, [first])
    path = tf.train.Checkpoint(accumulator=old).save(tmp_path / "checkpoint")
    tf.train.Checkpoint(accumulator=new).restore(path)
    accumulate(problem, model, new, rest)
    assert new.flush() is True
    expected = train_full_batch(problem, optimizers()["adam"], 1)
    assert largest_difference(model, expected) <= TOLERANCE["float64"]


def test_a_compiled_micro_batch_goes_on_with_a_window_of_more_rows(tmp_path):
    def make():
        table = tf.Variable(tf.zeros([5, 2]))
        optimizer = keras.optimizers.SGD(1.0)
        accumulator = bigbatch.GradientAccumulator(optimizer, [table], accumulation_steps=2)

        @tf.function(jit_compile=True)
        def micro_batch(indices):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, indices))
            accumulator.accumulate(tape.gradient(loss, [table]))

        return table, accumulator, micro_batch

    _, accumulator, micro_batch = make()
    micro_batch(tf.constant([0, 1, 2, 3, 4, 4]))
    path = tf.train.Checkpoint(accumulator=accumulator).save(tmp_path / "checkpoint")
    table, accumulator, micro_batch = make()
    tf.train.Checkpoint(accumulator=accumulator).restore(path)
    micro_batch(tf.constant([0, 1]))
    assert accumulator.apply_when_full() is True
    np.testing.assert_allclose(table[:, 0], [-1.0, -1.0, -0.5, -0.5, -1.0])


def test_a_schedule_goes_on_where_it_was(tmp_path):
    def make():
        w = tf.Variable(0.0)
        optimizer = optimizers()["sgd"]()
        return bigbatch.GradientAccumulator(
            optimizer, [w], accumulation_steps=lambda updates: 1 + updates
        )

    saved, restored = make(), make()
    for _ in range(3):  # windows of 1 and 2 micro-batches
        saved.accumulate([tf.constant(1.0)])
        saved.apply_when_full()
    path = tf.train.Checkpoint(accumulator=saved).save(tmp_path / "checkpoint")
    tf.train.Checkpoint(accumulator=restored).restore(path)
    updated = []
    for _ in range(3):
        restored.accumulate([tf.constant(1.0)])
        updated.append(restored.apply_when_full())
    assert updated == [False, False, True]
