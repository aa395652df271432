"""Models, data and optimizers for the tests, and full-batch training to compare with."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np
import tensorflow as tf

import comparison
from bigbatch.core.versions import version_of

from stack import HAS_LEGACY, IS_KERAS_3, VERSION, keras, new_optimizers

# Rounding only: float64 has 16 digits, float32 seven; several Adam updates multiply the
# difference by about ten. Every mistake this suite knows is larger by orders of magnitude.
# Before Keras 3.13 losses divide by the valid elements and 1e-7: that of micro-batches adds up.
IS_MEAN_EXACT = not (IS_KERAS_3 and version_of(VERSION) < (3, 13))
TOLERANCE = {"float64": 1e-12 if IS_MEAN_EXACT else 1e-8, "float32": 5e-6}


@dataclass(frozen=True)
class Problem:
    """A model with its loss and a batch of data, made anew from the same seed each time."""

    make_model: Callable[[], keras.Model]
    x: Any
    y: Any
    dtype: str

    def build(self, make_optimizer: Callable[[], Any]) -> tuple[Any, Any]:
        keras.utils.set_random_seed(7)
        return self.make_model(), make_optimizer()

    def per_sample(self, model: Any, x: Any, y: Any) -> Any:
        """Return the loss of each sample."""
        return tf.reduce_mean(tf.square(y - model(x, training=True)), axis=-1)

    def mean_loss(self, model: Any, x: Any, y: Any) -> Any:
        return tf.reduce_mean(self.per_sample(model, x, y))


def dense_problem(dtype: str = "float64", samples: int = 24) -> Problem:
    def make_model() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((5,), dtype=dtype),
                keras.layers.Dense(7, activation="tanh", dtype=dtype),
                keras.layers.Dense(3, dtype=dtype),
            ]
        )

    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(samples, 5)), rng.normal(size=(samples, 3))
    return Problem(make_model, x.astype(dtype), y.astype(dtype), dtype)


def embedding_problem(dtype: str = "float64", samples: int = 24, rows: int = 30) -> Problem:
    """Rows of the table repeat within and across micro-batches."""

    def make_model() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((4,), dtype="int32"),
                keras.layers.Embedding(rows, 3, dtype=dtype),
                keras.layers.Flatten(dtype=dtype),
                keras.layers.Dense(3, dtype=dtype),
            ]
        )

    rng = np.random.default_rng(2)
    x, y = rng.integers(0, rows, (samples, 4)), rng.normal(size=(samples, 3))
    return Problem(make_model, x.astype("int32"), y.astype(dtype), dtype)


def optimizers() -> dict[str, Callable[[], Any]]:
    """Optimizers in which a second, missing or mis-scaled update shows at once."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
    new = new_optimizers()
    kinds: dict[str, Callable[[], Any]] = {
        "sgd": lambda: new.SGD(schedule, momentum=0.9, clipnorm=0.05),
        "adam": lambda: new.Adam(
            schedule, global_clipnorm=0.02, use_ema=True, ema_overwrite_frequency=2
        ),
        "adamw": lambda: new.AdamW(0.05, weight_decay=0.1, clipvalue=0.01),
        "v1 adam": lambda: tf.compat.v1.train.AdamOptimizer(0.05),
        "v1 momentum": lambda: tf.compat.v1.train.MomentumOptimizer(0.05, 0.9),
    }
    if HAS_LEGACY:
        legacy = keras.optimizers.legacy
        kinds["legacy sgd"] = lambda: legacy.SGD(schedule, momentum=0.9, clipnorm=0.05)
        kinds["legacy adam"] = lambda: legacy.Adam(schedule, global_clipnorm=0.02)
    return kinds


def variables_for(optimizer: Any, model: Any) -> list[Any]:
    """Return the trainable variables of a model, as this optimizer takes them.

    Those of TensorFlow 1 take a `tf.Variable` only, not one of Keras 3 around it.
    """
    if IS_KERAS_3 and isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return [variable.value for variable in model.trainable_variables]
    return model.trainable_variables


def updates_of(optimizer: Any, otherwise: int) -> int:
    """Return how many updates an optimizer counts, if it does."""
    counted = getattr(optimizer, "iterations", None)
    return otherwise if counted is None else int(counted.numpy())


def built_in_optimizers() -> dict[str, Callable[[], Any]]:
    """Return a function that makes each of the optimizers that Keras has."""
    modules = {"": new_optimizers()}
    if HAS_LEGACY:
        modules["legacy "] = keras.optimizers.legacy
    kinds: dict[str, Any] = {
        prefix + name: kind
        for prefix, module in modules.items()
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, module.Optimizer)
        if name not in ("Optimizer", "LossScaleOptimizer")  # abstract; tested by itself
    }
    if "MultiOptimizer" in kinds:
        kinds["MultiOptimizer"] = lambda: keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(
                keras.optimizers.SGD(), {".*embedding.*": keras.optimizers.Adam()}
            )
        )
    return kinds


def v1_optimizers() -> dict[str, Callable[[], Any]]:
    """Return a function that makes each of the optimizers of TensorFlow 1."""
    train = tf.compat.v1.train
    kinds: dict[str, Any] = {
        f"v1 {name}": functools.partial(kind, 0.01)
        for name, kind in vars(train).items()
        if isinstance(kind, type) and issubclass(kind, train.Optimizer)
    }
    for name in ("Optimizer", "SyncReplicasOptimizer", "AdagradDAOptimizer"):
        del kinds[f"v1 {name}"]  # abstract; for graphs without eager code
    kinds["v1 MomentumOptimizer"] = lambda: train.MomentumOptimizer(0.01, 0.9)
    return kinds


def train_full_batch(
    problem: Problem,
    make_optimizer: Callable[[], Any],
    updates: int,
    before_update: Callable[[Any, int], None] = lambda optimizer, update: None,
) -> Any:
    """Return the model after plain training: the reference of every equality test."""
    model, optimizer = problem.build(make_optimizer)
    for update in range(updates):
        before_update(optimizer, update)
        with tf.GradientTape() as tape:
            loss = problem.mean_loss(model, problem.x, problem.y)
        variables = variables_for(optimizer, model)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    assert updates_of(optimizer, updates) == updates
    return model


def largest_difference(model: Any, other: Any) -> float:
    """Return the largest difference between the weights of two models: NaN if there is one."""
    return comparison.largest_difference(model.get_weights(), other.get_weights())


def cut(problem: Problem, sizes: list[int]) -> list[tuple[Any, Any]]:
    """Return the batch of a problem as micro-batches of the given sizes."""
    assert sum(sizes) == len(problem.x)
    ends = np.cumsum(sizes)
    return [
        (tf.constant(problem.x[end - size : end]), tf.constant(problem.y[end - size : end]))
        for size, end in zip(sizes, ends)
    ]
