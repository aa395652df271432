"""Every private name of TensorFlow and Keras in use: an upgrade breaks here first."""

from __future__ import annotations

import ast
from pathlib import Path

import keras
import tensorflow as tf

import bigbatch
from bigbatch.tf import compat, optimizers

SOURCE = Path(bigbatch.__file__).parent


def test_like_the_caller_converts_in_a_converted_function_only():
    def choose(x):
        if x > 0:
            return tf.constant("converted")
        return tf.constant("")

    converted = tf.function(lambda x: compat.like_the_caller(choose)(x))
    assert converted(tf.constant(1)) == b"converted"
    unconverted = tf.function(lambda x: compat.like_the_caller(choose)(x), autograph=False)
    try:
        unconverted(tf.constant(1))
    except tf.errors.OperatorNotAllowedInGraphError:
        return
    raise AssertionError("AutoGraph converted a function that was called without it")


def test_under_xla():
    seen = []

    def look():
        seen.append(compat.under_xla())
        tf.cond(tf.constant(True), lambda: seen.append(compat.under_xla()) or 1, lambda: 2)
        return tf.constant(0)

    look()
    tf.function(look)()
    tf.function(look, jit_compile=True)()
    assert seen == [False] * 4 + [True] * 2


def test_outside_strategy_scope(mirrored):
    with mirrored.scope():
        assert tf.distribute.in_cross_replica_context()
        with compat.outside_strategy_scope():
            assert not tf.distribute.has_strategy()
            assert tf.distribute.get_replica_context() is not None
        assert tf.distribute.get_strategy() is mirrored


def test_a_keras_optimizer_lists_its_variables():
    w = tf.Variable(1.0)
    for optimizer in (
        keras.optimizers.SGD(),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
    ):
        assert optimizers.is_keras(optimizer)
        optimizers.prepare(optimizer, [w])
        assert optimizer.built
        assert compat.variables_of(optimizer) == [w]


def test_private_names_are_used_nowhere_else():
    # `_x` of an object that is not `self` or `cls` is somebody else's.
    found = []
    for path in set(SOURCE.rglob("*.py")) - set(SOURCE.rglob("compat.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
                continue
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner not in ("self", "cls") and not node.attr.endswith("__"):
                found.append(f"{path.name}:{node.lineno} {node.attr}")
    assert found == []
