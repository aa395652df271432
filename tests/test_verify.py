"""`verify` is right: it says the same of what is, and names what makes the rest differ."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import bigbatch
from bigbatch.cli import main
from bigbatch.engine.microbatch import MicroBatch
from bigbatch.engine.trial import all_variables_of
from bigbatch.errors import ArgumentError, DifferenceError
from comparison import paired

rng = np.random.default_rng(0)
SAMPLES = 22
IMAGES = rng.normal(size=(SAMPLES, 8, 8, 2)).astype("float32")
TOKENS = rng.integers(1, 20, size=(SAMPLES, 6)) * (
    np.arange(6) < rng.integers(1, 7, (SAMPLES, 1))
)
ROWS = rng.normal(size=(SAMPLES, 6)).astype("float32")
LABELS = rng.integers(0, 3, SAMPLES)
NUMBERS = rng.normal(size=(SAMPLES, 1)).astype("float32")


def convolutional():
    model = keras.Sequential(
        [keras.Input((8, 8, 2)), layers.Conv2D(4, 3), layers.Flatten(), layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model, IMAGES, LABELS


def transformer():
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 8, mask_zero=True)(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4, dropout=0.2)(x, x))
    model = keras.Model(inputs, layers.Dense(20)(layers.Dropout(0.3)(x)))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, TOKENS, TOKENS


def lstm():
    model = keras.Sequential([keras.Input((6, 1)), layers.LSTM(5), layers.Dense(1)])
    model.compile(keras.optimizers.AdamW(0.01, clipnorm=0.1), "mse")
    return model, ROWS[..., None], NUMBERS


class OwnStep(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}


def own_train_step():
    model = OwnStep([keras.Input((6,)), layers.Dense(4, "relu"), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
    return model, ROWS, NUMBERS


def batch_norm():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(4),
            layers.BatchNormalization(name="first"),
            layers.BatchNormalization(name="second"),
            layers.Dense(1),
        ]
    )
    model.compile("sgd", "mse")
    return model, ROWS, NUMBERS


def contrastive(_, outputs):
    logits = tf.matmul(outputs, outputs, transpose_b=True)
    labels = tf.range(tf.shape(outputs)[0])
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def coupled_loss():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4)])
    model.compile("sgd", contrastive)
    return model, ROWS, NUMBERS


class AverageOverBatch(layers.Layer):
    def call(self, inputs):
        return inputs - tf.reduce_mean(inputs, 0, keepdims=True)


def averaging_layer():
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(4), AverageOverBatch(name="average"), layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    return model, ROWS, NUMBERS


def accumulating_optimizer():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(gradient_accumulation_steps=4, name="mine"), "mse")
    return model, ROWS, NUMBERS


def verify(case, **options):
    keras.utils.set_random_seed(1)
    options = {"microbatch_size": 5, "verbose": False, **options}
    return bigbatch.verify(*case(), **options)


@pytest.mark.parametrize("case", [convolutional, transformer, lstm, own_train_step])
def test_the_same(case):
    result = verify(case)
    assert result.ok, str(result)
    assert result.samples == SAMPLES
    assert result.verdict.startswith("The same")
    assert 0 < max(one.gradient for one in result.differences) <= result.tolerance
    assert set(result.logs) >= {"loss"}
    assert result.full.seconds > 0
    assert result.raise_if_different() is result


@pytest.mark.parametrize(
    ("case", "names"),
    [
        (batch_norm, ["layer 'first'", "layer 'second'"]),
        (averaging_layer, ["layer 'average'"]),
        (accumulating_optimizer, ["optimizer 'mine'"]),
    ],
)
def test_not_the_same_and_why(case, names):
    result = verify(case)
    assert not result.ok
    assert [hazard.where.split(" (")[0] for hazard in result.hazards] == names
    assert result.verdict.startswith("Not the same")
    assert all(name in result.verdict for name in names)
    with pytest.raises(DifferenceError, match="Not the same"):
        result.raise_if_different()


def test_a_custom_train_step_is_named():
    class Compares(OwnStep):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                outputs = self(x, training=True)
                loss = tf.reduce_mean(tf.square(outputs - y)) - tf.math.reduce_std(outputs)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
            return {"loss": loss}

    model = Compares([keras.Input((6,)), layers.Dense(1)])
    model.compile("sgd")
    result = bigbatch.verify(model, ROWS, NUMBERS, microbatch_size=5, verbose=False)
    assert [hazard.where for hazard in result.hazards] == ["train_step of Compares"]
    assert "compares samples" in str(result)


def test_never_the_same_beside_a_hazard():
    result = verify(averaging_layer, microbatch_size=SAMPLES)
    assert result.is_equal
    assert not result.ok
    assert re.search(r"Not the same: .*this time.*layer 'average'", result.verdict)


def test_a_data_set():
    model, x, y = lstm()
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(20)
    result = bigbatch.verify(model, data, microbatch_size=5, verbose=False)
    assert result.ok
    assert result.samples == 20


def test_what_helps_is_verified_too():
    assert verify(coupled_loss, coupled=True).ok
    assert verify(coupled_loss).ok
    result = verify(coupled_loss, coupled=False)
    assert [hazard.where for hazard in result.hazards] == ["loss 'contrastive'"]
    assert not verify(batch_norm, batch_norm="microbatch").ok


def test_random_layers_draw_the_same():
    result = verify(transformer)
    assert result.ok
    assert result.hazards == ()


def test_draws_that_cannot_be_the_same_are_switched_off_and_named():
    class Truncated(layers.Layer):
        def __init__(self, name):
            super().__init__(name=name)
            self.seed_generator = keras.random.SeedGenerator(1)

        def call(self, inputs, training=False):
            if not training:
                return inputs
            shape = tf.shape(inputs)
            return inputs + keras.random.truncated_normal(shape, seed=self.seed_generator)

    def noisy():
        model = keras.Sequential([keras.Input((6,)), Truncated("noise"), layers.Dense(1)])
        model.compile("sgd", "mse")
        return model, ROWS, NUMBERS

    result = verify(noisy)
    assert result.ok
    assert [hazard.where for hazard in result.hazards] == ["layer 'noise' (Truncated)"]
    assert any("switched off" in note for note in result.notes)


def test_weights_that_change_with_every_call_change_once_per_batch():
    def spectral():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.SpectralNormalization(layers.Dense(4), name="spectral"),
                layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
        return model, ROWS, NUMBERS

    result = verify(spectral)
    assert result.ok
    assert result.hazards == ()


class Counts(layers.Layer):
    def build(self, shape):
        self.calls = self.add_weight(shape=(), trainable=False, initializer="zeros")

    def call(self, inputs):
        self.calls.assign_add(tf.reduce_max(inputs))  # of the samples at hand
        return inputs


def test_weights_that_no_optimizer_changes_are_compared():
    def counting():
        model = keras.Sequential([keras.Input((6,)), Counts(), layers.Dense(1)])
        model.compile("sgd", "mse")
        return model, ROWS, NUMBERS

    result = verify(counting)
    assert not result.ok
    worst = max(result.differences, key=lambda one: one.weight)
    assert "counts" in worst.variable


def test_small_steps_from_large_weights():
    def slow():
        model, x, y = convolutional()
        for weight in model.trainable_weights:
            weight.assign(weight + 1.0)
        model.optimizer.learning_rate.assign(1e-6)
        return model, x, y

    assert verify(slow).ok


class TwoOptimizers(OwnStep):
    def __init__(self, *args):
        super().__init__(*args)
        self.second = keras.optimizers.Adam()

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        half = len(self.trainable_variables) // 2
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients[:half], self.trainable_variables[:half])
        self.second.apply(gradients[half:], self.trainable_variables[half:])
        return {"loss": loss}


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_an_optimizer_that_keras_does_not_know(run_eagerly):
    model = TwoOptimizers([keras.Input((6,)), layers.Dense(4, "relu"), layers.Dense(1)])
    model.compile("adam", run_eagerly=run_eagerly)
    assert bigbatch.verify(model, ROWS, NUMBERS, microbatch_size=5, verbose=False).ok
    assert model.run_eagerly == run_eagerly
    assert int(model.second.iterations) == 0
    assert all(not np.any(one) for one in model.second.variables[2:])


def test_draws_that_cannot_be_switched_off_are_no_proof():
    class Noise(layers.Layer):
        def call(self, inputs):
            return inputs + tf.random.normal(tf.shape(inputs))

    def noisy():
        model = keras.Sequential([keras.Input((6,)), Noise(name="noise"), layers.Dense(1)])
        model.compile("sgd", "mse")
        return model, ROWS, NUMBERS

    result = verify(noisy)
    assert not result.ok
    assert "layer 'noise'" in result.verdict
    assert any("cannot be switched off" in note for note in result.notes)


@pytest.mark.parametrize("case", [convolutional, transformer, batch_norm, coupled_loss])
def test_nothing_of_the_model_changes(case):
    keras.utils.set_random_seed(1)
    model, x, y = case()
    model.fit(x, y, batch_size=11, verbose=0)
    before = [variable.numpy() for variable in all_variables_of(model)]
    train_function = model.train_function
    bigbatch.verify(model, x, y, microbatch_size=5, verbose=False)
    after = [variable.numpy() for variable in all_variables_of(model)]
    assert len(before) == len(after)
    assert all(np.array_equal(*pair) for pair in paired(before, after))
    assert model.train_function is train_function


def test_a_model_that_was_never_trained_and_one_that_accumulates():
    model, x, y = convolutional()
    bigbatch.accumulate(model, microbatch_size=3)
    assert bigbatch.verify(model, x, y, microbatch_size=4, verbose=False).ok
    assert int(model.optimizer.iterations) == 0
    assert bigbatch.microbatch_size(model) == 3
    assert all(not np.any(one) for one in model.optimizer.variables[2:])


def test_sample_weights_and_mixed_precision():
    weights = rng.uniform(size=SAMPLES)
    model, x, y = convolutional()
    result = bigbatch.verify(model, x, y, weights, microbatch_size=5, verbose=False)
    assert result.ok, str(result)
    keras.config.set_dtype_policy("mixed_float16")
    try:
        result = verify(convolutional)
    finally:
        keras.config.set_dtype_policy("float32")
    assert result.ok, str(result)
    assert result.tolerance > 1e-3


def test_a_wrong_accumulator_is_caught(monkeypatch):
    """Negative control: the mean of means, with a short last micro-batch."""
    model, x, y = lstm()
    assert bigbatch.verify(model, x, y, microbatch_size=5, verbose=False).ok
    whole, parts = float(len(x)), -(-len(x) // 5)
    mean = tf.constant(whole / parts, tf.float64)
    monkeypatch.setattr(MicroBatch, "_loss_weight", lambda *_: mean)
    result = bigbatch.verify(model, x, y, microbatch_size=5, verbose=False)
    assert not result.ok
    assert "because of" in result.verdict


def test_it_can_be_printed_read_and_sent():
    result = verify(batch_norm)
    text = str(result)
    assert "first" in text
    assert "LayerNormalization" in text
    assert "gradient: max |Δ| / max " in text
    assert "\n\n\n" not in text
    assert "not counted" not in text
    assert "<table>" in result._repr_html_()
    assert json.loads(json.dumps(result.to_dict()))["ok"] is False


def test_memory_is_shown_only_where_it_was_measured():
    result = verify(convolutional)
    costs = [replace(one, peak=2**21) for one in (result.full, result.accumulated)]
    measured = replace(result, full=costs[0], accumulated=costs[1])
    assert "2.0 MiB" in str(measured)
    assert "Memory was not measured" not in str(measured)
    unknown = replace(result, full=replace(costs[0], peak=None), accumulated=costs[1])
    assert "MiB" not in str(unknown)
    assert "peak memory" not in str(unknown)
    assert "Memory was not measured" in str(unknown)


def test_one_sample_and_one_micro_batch():
    model, x, y = convolutional()
    assert bigbatch.verify(model, x[:1], y[:1], microbatch_size=5, verbose=False).ok
    result = bigbatch.verify(model, x, y, microbatch_size=100, verbose=False)
    assert result.ok
    assert any("in one micro-batch" in note for note in result.notes)


@pytest.mark.parametrize("arguments", [{"microbatch_size": 0}, {"batch_norm": "none"}])
def test_bad_arguments(arguments):
    with pytest.raises(ArgumentError, match="Fix: "):
        verify(convolutional, **arguments)


def test_a_model_that_cannot_be_verified(mirrored):
    with pytest.raises(ArgumentError, match="compile"):
        bigbatch.verify(keras.Sequential([layers.Dense(1)]), ROWS, NUMBERS, microbatch_size=5)
    with mirrored.scope():
        model, x, y = convolutional()
    with pytest.raises(ArgumentError, match="2 replicas"):
        bigbatch.verify(model, x, y, microbatch_size=5)


FACTORY = """
import keras, numpy as np
def make(norm=False):
    middle = [keras.layers.BatchNormalization()] if norm else []
    model = keras.Sequential([keras.Input((4,)), *middle, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(20, 4))
    return model, x, x[:, :1]
def norm():
    return make(norm=True)
"""


def test_the_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "to_verify.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    size = ["--microbatch-size", "8"]
    assert main(["verify", "to_verify:make", *size]) == 0
    assert "The same: micro-batches of 8" in capsys.readouterr().out
    assert main(["verify", "to_verify:norm", *size, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] is False
    assert "BatchNormalization" in result["hazards"][0]["where"]
    assert main(["verify", "to_verify:nothing", *size]) == 2
