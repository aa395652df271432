"""Losses in which the samples of a batch meet each other, and models for `fit` with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from fit_cases import (
    CASES,
    SAMPLES,
    TOKENS,
    TWO_OUTPUTS,
    WEIGHTS,
    AddsLoss,
    Case,
    adds_loss,
    regularised,
    scalar_loss,
    two_outputs,
)

from stack import keras

layers = keras.layers


def _cross_entropy(labels: Any, logits: Any) -> Any:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def clip(one: Any, two: Any, temperature: Any = 1.0) -> Any:
    """CLIP's symmetric loss: each row of `one` belongs to that row of `two`."""
    one, two = tf.math.l2_normalize(one, -1), tf.math.l2_normalize(two, -1)
    logits = tf.matmul(one, two, transpose_b=True) * tf.exp(temperature)
    labels = tf.range(tf.shape(logits)[0])
    both = _cross_entropy(labels, logits) + _cross_entropy(labels, tf.transpose(logits))
    return tf.reduce_mean(both) / 2


def sim_clr(y_true: Any, y_pred: Any) -> Any:
    """InfoNCE between two views, the halves of each row."""
    del y_true
    one, two = tf.split(tf.math.l2_normalize(y_pred, -1), 2, axis=-1)
    views = tf.concat([one, two], 0)
    count = tf.shape(one)[0]
    logits = 5 * tf.matmul(views, views, transpose_b=True)
    logits -= 1e9 * tf.eye(2 * count, dtype=logits.dtype)
    labels = tf.concat([tf.range(count) + count, tf.range(count)], 0)
    return _cross_entropy(labels, logits)


def triplet(y_true: Any, y_pred: Any) -> Any:
    """In-batch triplets: the farthest of the same class against the nearest of another."""
    labels = tf.reshape(tf.cast(y_true, tf.int32), [-1])
    distance = tf.reduce_sum(tf.square(y_pred[:, None] - y_pred[None]), -1)
    same = labels[:, None] == labels[None]
    far = tf.reduce_max(tf.where(same, distance, 0), -1)
    near = tf.reduce_min(tf.where(same, tf.cast(1e9, distance.dtype), distance), -1)
    return tf.nn.softplus(far - near)


def correlation(y_true: Any, y_pred: Any) -> Any:
    """One minus the correlation, over the batch, of what is predicted with what is."""
    y_true = tf.reshape(tf.cast(y_true, y_pred.dtype), [-1])
    y_pred = tf.reduce_sum(y_pred, -1)
    x, y = y_pred - tf.reduce_mean(y_pred), y_true - tf.reduce_mean(y_true)
    return 1 - tf.reduce_sum(x * y) / tf.sqrt(tf.reduce_sum(x * x) * tf.reduce_sum(y * y))


def dice(y_true: Any, y_pred: Any) -> Any:
    """One minus the overlap of two sets, over the batch."""
    y_true = tf.reshape(tf.cast(y_true, y_pred.dtype), [-1]) / 3
    y_pred = tf.sigmoid(tf.reduce_sum(y_pred, -1))
    return 1 - 2 * tf.reduce_sum(y_true * y_pred) / tf.reduce_sum(y_true + y_pred)


LOSSES = {one.__name__: one for one in (sim_clr, triplet, correlation, dice)}

LABELS = np.random.default_rng(3).integers(0, 4, (SAMPLES, 1))


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


def functional_adds_loss():
    inputs = keras.Input((5,))
    hidden = layers.Dense(8, "tanh", activity_regularizer="l2")(inputs)
    return keras.Model(inputs, layers.Dense(3)(AddsLoss()(hidden)))


def dice_of_three(y_true, y_pred):
    return dice(tf.abs(tf.reduce_sum(y_true, -1)), y_pred)


def relative_to_spread(y_true, y_pred):
    """A loss per element, of which the mask leaves some, relative to the spread of all."""
    spread = tf.sqrt(tf.reduce_mean(tf.square(y_pred)) + 0.01)
    return tf.reduce_mean(tf.square(y_true - y_pred), -1) / spread


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
    "add_loss and activity": Case(adds_loss, loss=lambda: dice_of_three),
    "add_loss in a functional model": Case(functional_adds_loss, loss=lambda: dice_of_three),
    "regularised": Case(regularised, loss=lambda: dice_of_three),
    "two outputs with different masks": Case(
        two_outputs,
        **{
            **TWO_OUTPUTS,
            "loss": lambda: {"sequence": relative_to_spread, "single": "mae"},
        },
    ),
    "not coupled": CASES["two outputs"],
    "sum": CASES["sum"],
}
