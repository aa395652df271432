"""The Keras the tests run with, chosen by BIGBATCH_KERAS: "keras", "tf_keras" or "tf.keras".

Tests and their modules say `from stack import keras` and so run on every generation.
"""

from __future__ import annotations

import importlib
import inspect
import os
import types
from typing import Any

import pytest
import tensorflow as tf

NAME = os.environ.get("BIGBATCH_KERAS", "keras")
if NAME not in ("keras", "tf_keras", "tf.keras"):
    raise ValueError(f"BIGBATCH_KERAS={NAME!r} is neither keras, tf_keras nor tf.keras")

keras: Any = tf.keras if NAME == "tf.keras" else importlib.import_module(NAME)

# From 2.11 to 2.15 `tf.keras` is the package `keras` without its version.
VERSION: str = getattr(keras, "__version__", "") or importlib.import_module("keras").__version__

IS_KERAS_3: bool = int(VERSION.split(".")[0]) >= 3
"""Whether it is Keras 3; otherwise Keras 2, of TensorFlow or by itself."""

BACKEND: str = keras.backend.backend() if IS_KERAS_3 else "tensorflow"
"""The framework that Keras runs on, chosen by KERAS_BACKEND: "tensorflow" or "jax"."""

ops: Any = (
    keras.ops
    if IS_KERAS_3
    else types.SimpleNamespace(
        abs=tf.abs,
        max=tf.reduce_max,
        mean=tf.reduce_mean,
        min=tf.reduce_min,
        square=tf.square,
        sum=tf.reduce_sum,
    )
)
"""Operations on tensors of every backend."""

only_on_tensorflow = pytest.mark.skipif(
    BACKEND != "tensorflow", reason="of TensorFlow: its operations, graphs or strategies"
)

HAS_RENORM: bool = not IS_KERAS_3 or "renorm" in inspect.getsource(
    keras.layers.BatchNormalization
)
"""Whether batch normalisation has `renorm`, which older versions of Keras 3 lack."""

IS_KERAS_2_10: bool = VERSION.startswith("2.10.")
"""Whether it is the oldest Keras 2, which lacks a few things."""

HAS_LEGACY: bool = hasattr(keras.optimizers, "legacy") and not IS_KERAS_3
"""Whether it has `keras.optimizers.legacy` that can be used."""


def new_optimizers() -> Any:
    """Return the module of the newer optimizers: in Keras 2.10 they are experimental."""
    return keras.optimizers.experimental if IS_KERAS_2_10 else keras.optimizers


def build(optimizer: Any, variables: list[Any]) -> None:
    """Build an optimizer if it can be: those of Keras 2.10 are when they are first used."""
    if hasattr(optimizer, "build"):
        optimizer.build(variables)


def with_loss_scale(optimizer: Any, initial_scale: float, **options: Any) -> Any:
    """Return an optimizer that scales the loss."""
    module = keras.optimizers if IS_KERAS_3 else keras.mixed_precision
    return module.LossScaleOptimizer(optimizer, initial_scale=initial_scale, **options)


def loss_scale(optimizer: Any) -> float:
    """Return by what such an optimizer multiplies the loss now."""
    scale = optimizer.dynamic_scale if IS_KERAS_3 else optimizer.loss_scale
    return float(scale.numpy())


def gradients_for(optimizer: Any, loss_fn: Any, variables: list[Any]) -> list[Any]:
    """Return the gradients that such an optimizer's `apply_gradients` expects."""
    with tf.GradientTape() as tape:
        loss = loss_fn()
        scaled = (optimizer.scale_loss if IS_KERAS_3 else optimizer.get_scaled_loss)(loss)
    gradients = tape.gradient(scaled, variables)
    return gradients if IS_KERAS_3 else optimizer.get_unscaled_gradients(gradients)


def native(variable: Any) -> Any:
    """Return the `tf.Variable` that a variable of Keras is, or has."""
    return variable.value if IS_KERAS_3 else variable


def random_state_of(layer: Any) -> Any:
    """Return the variable with the state of a layer that draws random numbers."""
    if IS_KERAS_3:
        return layer.seed_generator.state
    return layer._random_generator._generator.state


def variables_of(optimizer: Any) -> list[Any]:
    """Return the variables of an optimizer."""
    variables = optimizer.variables
    return variables() if inspect.ismethod(variables) else list(variables)


def set_steps_per_execution(model: Any, count: int) -> None:
    """Let a compiled model train on several batches per call."""
    if IS_KERAS_3:
        model.steps_per_execution = count
    else:
        model._steps_per_execution.assign(count)


PyDataset = keras.utils.PyDataset if IS_KERAS_3 else keras.utils.Sequence
"""What gives batches by their number."""


def set_policy(policy: str) -> None:
    """Set the dtype policy of layers, such as "mixed_float16"."""
    if IS_KERAS_3:
        keras.config.set_dtype_policy(policy)
    else:
        keras.mixed_precision.set_global_policy(policy)


def set_float(dtype: str) -> None:
    """Set the type of numbers that are made from now on."""
    (keras.config if IS_KERAS_3 else keras.backend).set_floatx(dtype)
    set_policy(dtype)


def load_model(path: Any) -> Any:
    """Load a model that was saved as a whole."""
    return (keras.saving if IS_KERAS_3 else keras.models).load_model(path)
