"""A loss in which samples meet, in `fit`: the update of the full batch with `coupled=True`."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from coupled_losses import LOSSES, clip, correlation
from fit_cases import (
    CASES,
    SAMPLES,
    TOKENS,
    TWO_OUTPUTS,
    WEIGHTS,
    Case,
    adds_loss,
    check_same,
    regularised,
    scalar_loss,
    two_outputs,
)

from problems import TOLERANCE

LABELS = np.random.default_rng(3).integers(0, 4, (SAMPLES, 1))
layers = keras.layers
COUPLED = {"coupled": True}


def encoder(*more):
    def make():
        hidden = layers.Dense(8, "tanh", kernel_regularizer="l2")
        return keras.Sequential([keras.Input((5,)), hidden, *more, layers.Dense(6)])

    return make


def loss_of(name):
    return lambda: LOSSES[name]


class Clip(keras.Model):
    """Two encoders of two inputs; a temperature to train; its own `compute_loss`."""

    def __init__(self):
        super().__init__()
        self.image, self.text = layers.Dense(4), layers.Dense(4)
        self.temperature = self.add_weight(shape=(), initializer="ones", name="temperature")

    def call(self, inputs):
        return {"image": self.image(inputs[:, :3]), "text": self.text(inputs[:, 3:])}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = clip(y_pred["image"], y_pred["text"], self.temperature)
        return loss + 0.1 * tf.reduce_mean(x) * self.temperature


def embedding():
    tokens = keras.Input((7,), dtype="int32")
    embedded = layers.Embedding(6, 4, embeddings_regularizer="l2", mask_zero=True)(tokens)
    return keras.Model(tokens, layers.Dense(6)(layers.GlobalAveragePooling1D()(embedded)))


def token_correlation(y_true, y_pred):
    return correlation(y_true, y_pred) + tf.square(y_pred)


METRICS = {"metrics": ["mae"], "weighted_metrics": [keras.metrics.MeanSquaredError]}
COUPLED_CASES = {
    **{name: Case(encoder(), y=LABELS, loss=loss_of(name)) for name in LOSSES},
    "metrics": Case(
        encoder(), y=LABELS, loss=loss_of("dice"), compile={"metrics": ["mae", "accuracy"]}
    ),
    "sample weights": Case(
        encoder(), y=LABELS, loss=loss_of("triplet"), fit={"sample_weight": WEIGHTS}
    ),
    "a number, times weights": Case(
        regularised, loss=lambda: scalar_loss, fit={"sample_weight": WEIGHTS}
    ),
    "clip": Case(Clip, y=None, loss=None),
    "embedding": Case(embedding, TOKENS, LABELS, loss=loss_of("sim_clr")),
    "add_loss and activity": Case(adds_loss, loss=lambda: correlation_of_three),
    "regularised": Case(regularised, loss=lambda: correlation_of_three),
    "two outputs with different masks": Case(
        two_outputs,
        **{
            **TWO_OUTPUTS,
            "loss": lambda: {"sequence": token_correlation_of_two, "single": "mae"},
        },
    ),
    "not coupled": CASES["two outputs"],
    "sum": CASES["sum"],
}


def correlation_of_three(y_true, y_pred):
    return correlation(tf.reduce_sum(y_true, -1), y_pred)


def token_correlation_of_two(y_true, y_pred):
    """Masked elements count for nothing, others depend on the spread of the batch."""
    spread = tf.sqrt(tf.reduce_mean(tf.square(y_pred)) + 1.0)
    return tf.reduce_mean(tf.square(y_true - y_pred), -1) / spread


@pytest.fixture
def float64():
    keras.backend.set_floatx("float64")
    yield
    keras.backend.set_floatx("float32")


@pytest.mark.parametrize("name", COUPLED_CASES)
def test_in_float64(name, mode, float64):
    case = COUPLED_CASES[name]
    check_same(case.accumulate(mode, COUPLED), case.train(), TOLERANCE["float64"])
