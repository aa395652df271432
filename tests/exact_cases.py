"""Models with BatchNormalization, to be trained exactly as with the full batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import bigbatch
from fit_cases import Case, as_it_is

from stack import keras

BATCH, MICROBATCH, SAMPLES = 24, 7, 58  # 7 + 7 + 7 + 3, and 7 + 3 at the end of an epoch
layers = keras.layers
rng = np.random.default_rng(5)
IMAGES = 1 + 2 * rng.normal(size=(SAMPLES, 8, 8, 3))
LABELS = rng.integers(0, 5, SAMPLES)
WORDS = rng.integers(1, 9, (SAMPLES, 6))
WORDS[:, 3:] *= rng.random((SAMPLES, 3)) < 0.5
WORDS[7:14, 1:] = 0  # a micro-batch that is nearly all padding


def block(x: Any, filters: int, stride: int = 1) -> Any:
    """Return a convolution, normalised."""
    x = layers.Conv2D(filters, 3, stride, padding="same", use_bias=False)(x)
    return layers.BatchNormalization(momentum=0.9)(x)


def convolutional(dropout: float = 0.0) -> Any:
    """Return a net of three convolutions; dropout comes after normalisation."""
    x = inputs = keras.Input((8, 8, 3))
    for filters in (4, 5, 4):
        x = layers.ReLU()(block(x, filters))
        if dropout:
            x = layers.Dropout(dropout, seed=filters)(x)
    return keras.Model(inputs, layers.Dense(5)(layers.Flatten()(x)))


def residual() -> Any:
    """Return a residual net with projections and a nested model."""
    x = inputs = keras.Input((8, 8, 3))
    x = layers.ReLU()(block(x, 4))
    for filters, stride in ((4, 1), (6, 2)):
        straight = block(layers.ReLU()(block(x, filters, stride)), filters)
        if stride > 1:
            x = block(x, filters, stride)
        x = layers.ReLU()(layers.add([x, straight]))
    head = keras.Sequential([layers.GlobalAveragePooling2D(), layers.BatchNormalization()])
    return keras.Model(inputs, layers.Dense(5)(head(x)))


class Shared(keras.Model):
    """A normalisation that is called twice, one that is frozen, and a `tf.function`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = layers.Conv2D(4, 3, padding="same", kernel_regularizer="l2")
        self.inner = layers.BatchNormalization(momentum=0.8)
        self.frozen = layers.BatchNormalization(trainable=False)
        self.second = layers.Conv2D(4, 3, padding="same", activity_regularizer="l2")
        self.shared = layers.BatchNormalization()
        self.last = layers.Dense(5)

    @tf.function
    def rectified(self, x: Any) -> Any:
        if tf.reduce_sum(x) > 1e9:  # a branch that AutoGraph has to see
            x = tf.zeros_like(x)
        return tf.nn.relu(x)

    def call(self, x: Any, training: bool = False) -> Any:
        x = self.rectified(self.inner(self.first(x), training=training))
        x = self.frozen(x, training=training)
        x = x + tf.nn.relu(self.shared(self.second(x), training=training))
        x = self.shared(x, training=training)
        return self.last(tf.reduce_mean(x, (1, 2)))


def masked() -> Any:
    """Return a net of words with padding, whose loss and statistics know the mask."""
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True)(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.Dense(4, activation="tanh")(x)
    x = layers.TimeDistributed(layers.BatchNormalization())(x)
    x = layers.LSTM(4, return_sequences=True)(x)
    x = layers.BatchNormalization()(x)
    return keras.Model(inputs, layers.TimeDistributed(layers.Dense(5))(x))


def optimizer(**options: Any) -> Any:
    """Return one that divides by no gradient: some are zero but for rounding."""
    options = {"global_clipnorm": 0.5, "use_ema": True, "weight_decay": 1e-3, **options}
    return keras.optimizers.SGD(0.1, momentum=0.9, **options)


def case_of(make_model: Any, **changes: Any) -> Case:
    """Return a case with images, labels and an optimizer."""
    settings = {
        "x": IMAGES,
        "y": LABELS,
        "loss": lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "optimizer": optimizer,
        "compile": {"metrics": ["accuracy"]},
        "fit": {"batch_size": BATCH},
        **changes,
    }
    return Case(make_model, **settings)


def dense() -> Any:
    """Return a small net, for processes that take long to start."""
    hidden = [layers.Dense(8, use_bias=False), layers.BatchNormalization(), layers.ReLU()]
    return keras.Sequential([keras.Input((5,)), *hidden, layers.Dense(3)])


WORKERS = Case(dense, optimizer=lambda: optimizer())
"""What several workers train."""

CASES = {
    "convolutional": case_of(convolutional),
    "dropout": case_of(lambda: convolutional(0.3)),
    "residual": case_of(residual),
    "shared": case_of(Shared),
    "masked": case_of(
        masked,
        x=WORDS,
        y=rng.integers(0, 5, (SAMPLES, 6)),
        fit={"batch_size": BATCH, "sample_weight": rng.random((SAMPLES, 6))},
        compile={"weighted_metrics": ["accuracy"]},
    ),
}


def exactly(batch_norm: Any = "exact", **setting: Any) -> Any:
    """Return what lets a model train in micro-batches, as the full batch would."""
    setting = setting or {"microbatch_size": MICROBATCH}
    return lambda model: bigbatch.accumulate(model, batch_norm=batch_norm, **setting)


__all__ = ["BATCH", "CASES", "MICROBATCH", "as_it_is", "case_of", "exactly", "optimizer"]
