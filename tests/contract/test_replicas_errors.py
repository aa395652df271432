"""Calls in the wrong place, inside or outside of `strategy.run`, are refused."""

from __future__ import annotations

import contextlib

import pytest
import tensorflow as tf

import bigbatch
from bigbatch.errors import ContextError

from stack import keras


def test_a_graph_refuses_gradients_it_could_not_foresee_on_several_replicas(mirrored):
    with mirrored.scope():
        w = tf.Variable(0.0)
        accumulator = bigbatch.GradientAccumulator(keras.optimizers.SGD(1.0), [w])
    flush = tf.function(accumulator.flush)
    assert not flush()
    tf.function(lambda: mirrored.run(lambda: accumulator.accumulate([tf.constant(1.0)])))()
    with pytest.raises(tf.errors.InvalidArgumentError, match="had none when this"):
        flush()
    assert accumulator.flush() is True  # nothing is lost
    assert float(w.numpy()) == -1.0


@pytest.mark.parametrize("call", ["apply_when_full", "flush", "reset"])
def test_updates_inside_strategy_run_are_refused(mirrored, call):
    with mirrored.scope():
        w = tf.Variable(1.0)
        accumulator = bigbatch.GradientAccumulator(keras.optimizers.SGD(), [w])
    with pytest.raises(ContextError, match=rf"{call}\(\) outside strategy.run"):
        mirrored.run(getattr(accumulator, call))


@pytest.mark.parametrize("name", ["gradients", "total_weight"])
def test_global_values_inside_strategy_run_are_refused(mirrored, name):
    with mirrored.scope():
        accumulator = bigbatch.GradientAccumulator(keras.optimizers.SGD(), [tf.Variable(1.0)])
    with pytest.raises(ContextError, match=f"{name} outside strategy.run"):
        mirrored.run(lambda: getattr(accumulator, name))


@pytest.mark.parametrize("in_scope", [False, True])
def test_accumulate_outside_strategy_run_is_refused(mirrored, in_scope):
    with mirrored.scope():
        w = tf.Variable(1.0)
        accumulator = bigbatch.GradientAccumulator(keras.optimizers.SGD(), [w])
    with mirrored.scope() if in_scope else contextlib.nullcontext():
        with pytest.raises(ContextError, match="inside strategy"):
            accumulator.accumulate([tf.constant(1.0)])
        assert int(accumulator.step) == 0


def test_an_accumulator_built_outside_the_scope_is_refused(mirrored):
    accumulator = bigbatch.GradientAccumulator(keras.optimizers.SGD(), [tf.Variable(1.0)])
    with pytest.raises(ContextError, match=r"with strategy.scope\(\)"):
        mirrored.run(lambda: accumulator.accumulate([tf.constant(1.0)]))
