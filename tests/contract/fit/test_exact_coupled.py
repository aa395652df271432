"""A loss that compares samples, and layers that normalise with the batch: both exact."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import tensorflow as tf

import bigbatch
from comparison import check_same, differences
from coupled_cases import COUPLED_CASES, clip, sim_clr
from exact_cases import BATCH, IMAGES, LABELS, MICROBATCH, block, case_of, exactly

from stack import IS_KERAS_3, keras

pytestmark = [
    pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 has no exact batch normalisation"),
    pytest.mark.usefixtures("float64"),
]
TOLERANCE = 1e-10
layers = keras.layers
FEW = 34  # batches of 24 and 10 samples
ONCE = {"batch_size": BATCH, "epochs": 2}


def encoder():
    """An encoder of images whose embeddings are normalised, too."""
    x = inputs = keras.Input((8, 8, 3))
    x = layers.ReLU()(block(x, 4, 2))
    x = layers.Dense(6, kernel_regularizer="l2")(layers.GlobalAveragePooling2D()(x))
    x = layers.BatchNormalization()(x)
    return keras.Model(inputs, layers.Dense(6, activity_regularizer="l2")(x))


class TwoEncoders(keras.Model):
    """Images and words as for CLIP: two encoders, a temperature, its own `compute_loss`."""

    def __init__(self):
        super().__init__()
        self.image, self.other = encoder(), encoder()
        self.temperature = self.add_weight(shape=(), initializer="ones", name="temperature")

    def call(self, x, training=False):
        return {
            "image": self.image(x, training=training),
            "other": self.other(x[:, ::-1], training=training),
        }

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = clip(y_pred["image"], y_pred["other"], self.temperature)
        return loss + 0.1 * tf.math.reduce_std(x) * self.temperature


class InStep(keras.Model):
    """A `train_step` that calls `compute_loss`, and does not scale it."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            y_pred = self(data[0], training=True)
            loss = self.compute_loss(x=data[0], y=data[1], y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def in_step():
    model = encoder()
    return InStep(model.inputs, model.outputs)


def few_images(make, loss=None, **changes):
    settings = {"y": LABELS[:FEW, None], "compile": {}, "fit": ONCE, **changes}
    return case_of(make, x=IMAGES[:FEW], loss=loss, **settings)


CASES = {
    "contrastive": few_images(encoder, lambda: sim_clr, compile={"metrics": ["mae"]}),
    "two encoders": few_images(TwoEncoders, y=None),
    "custom step": few_images(in_step, lambda: sim_clr),
}


@functools.cache
def full_batch(name):
    return CASES[name].train().training


@pytest.mark.parametrize("name", CASES)
def test_the_full_batch(name):
    """The loss is found by trying, but in a custom step, where it is asked for."""
    coupled = True if name == "custom step" else "auto"
    found = CASES[name].train(exactly(microbatch_size=MICROBATCH, coupled=coupled))
    check_same(found, full_batch(name), TOLERANCE)


def test_a_window_is_the_full_batch():
    case = CASES["contrastive"]
    found = case.train(exactly(accumulation_steps=3), batch_size=8)  # the last: 8 + 2
    check_same(found, full_batch("contrastive"), TOLERANCE)


def test_masks_and_a_loss_that_is_asked_to_be_coupled():
    """Of a model that has no BatchNormalization."""
    case = COUPLED_CASES["two outputs with different masks"]
    found = case.train(exactly(microbatch_size=8, coupled=True))
    check_same(found, case.train(), TOLERANCE)


@pytest.mark.parametrize(
    "name", ["contrastive", pytest.param("two encoders", marks=pytest.mark.matrix)]
)
def test_replicas_are_one_device(name, mirrored):
    """Of the last batch, of one sample, the second replica has none."""
    case = CASES[name]
    few = slice(0, BATCH + 1)
    data = case.x[few], None if case.y is None else case.y[few]
    case = replace(case, x=data[0], y=data[1])
    with mirrored.scope():
        found = case.train(exactly(microbatch_size=5))
    check_same(found, case.train(), TOLERANCE)


def test_micro_batches_by_themselves_differ():
    """A negative control."""
    unchecked = exactly(microbatch_size=MICROBATCH, coupled=False, check="off")
    with pytest.warns(bigbatch.NotEqualWarning, match="coupled=False"):
        found = CASES["contrastive"].train(unchecked).training
    lines = differences(found, full_batch("contrastive"), 1e-4)
    assert any(line.startswith("weights") for line in lines)
