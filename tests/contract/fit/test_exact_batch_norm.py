"""With `batch_norm="exact"` models with BatchNormalization train as with the full batch."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from bigbatch.backends.tensorflow import keras3
from bigbatch.backends.tensorflow.exact import moments as exact_moments
from comparison import Fitted, check_same, differences
from exact_cases import (
    BATCH,
    CASES,
    IMAGES,
    LABELS,
    MICROBATCH,
    WORKERS,
    case_of,
    convolutional,
    exactly,
    optimizer,
)

from stack import HAS_RENORM, IS_KERAS_3, keras, set_float, set_policy

pytestmark = [
    pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 has no exact batch normalisation"),
    pytest.mark.usefixtures("float64"),
]
TOLERANCE = 1e-10


@functools.cache
def full_batch(name):
    return CASES[name].train().training


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_weights_statistics_and_logs_are_those_of_the_full_batch(name):
    check_same(CASES[name].train(exactly()), full_batch(name), TOLERANCE)


@pytest.mark.parametrize(
    "choice",
    [
        bigbatch.ExactBatchNorm("all"),
        bigbatch.ExactBatchNorm(3, storage="host"),
        pytest.param(bigbatch.ExactBatchNorm(1), marks=pytest.mark.matrix),
        pytest.param(bigbatch.ExactBatchNorm(100), marks=pytest.mark.matrix),
    ],
)
def test_what_is_stored_does_not_change_the_result(choice):
    check_same(CASES["residual"].train(exactly(choice)), full_batch("residual"), TOLERANCE)


@pytest.mark.parametrize("storage", ["device", "host"])
def test_where_boundaries_are_stored(storage):
    """With a device beside the host: here a second logical CPU.

    What names no device runs where the function runs.
    """
    with tf.device("CPU:1"):
        case = WORKERS
        found = case.train(exactly(bigbatch.ExactBatchNorm("all", storage), microbatch_size=8))
    phases = vars(found.model)["_bigbatch_hooks"].trainer.phases
    devices = {"TensorListSetItem": set(), "TensorListGetItem": set(), "MatMul": set()}
    for function in phases.add._list_all_concrete_functions():
        for inner in function.graph.as_graph_def().library.function:
            for node in inner.node_def:
                if node.op in devices:
                    devices[node.op].add(node.device[-5:])
    there = "CPU:0" if storage == "host" else ""
    assert devices["TensorListSetItem"] == devices["TensorListGetItem"] == {there}
    assert devices["MatMul"] == {""}


def test_a_window_of_batches_is_the_full_batch():
    case = CASES["convolutional"]
    found = case.train(exactly(accumulation_steps=3), batch_size=7)  # the last: 7 + 7 + 2
    check_same(found, case.train(batch_size=21), TOLERANCE)


@pytest.mark.matrix
def test_several_batches_per_call_and_an_automatic_size():
    compiled = {"metrics": ["accuracy"], "steps_per_execution": 2}
    case = case_of(convolutional, compile=compiled)
    expected = full_batch("convolutional")
    check_same(case.train(exactly()), expected, TOLERANCE)
    found = CASES["convolutional"].train(exactly(microbatch_size="auto"))
    check_same(found, expected, TOLERANCE)


class OwnStep(keras.Model):
    """A `train_step` as in the guides of Keras, which does not scale its loss."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def test_a_custom_train_step():
    def make():
        model = convolutional()
        return OwnStep(model.inputs, model.outputs)

    case = case_of(make, compile={})
    check_same(case.train(exactly()), case.train(), TOLERANCE)


class TwoUpdates(keras.Model):
    """A `train_step` whose second update depends on the first."""

    def __init__(self):
        super().__init__()
        norm = keras.layers.BatchNormalization()
        parts = [keras.layers.Conv2D(4, 3), norm, keras.layers.ReLU(), keras.layers.Flatten()]
        self.body, self.head = keras.Sequential(parts), keras.layers.Dense(5)
        self.second = keras.optimizers.SGD(0.05)

    def call(self, x, training=False):
        return self.head(self.body(x, training=training))

    def train_step(self, data):
        losses = []
        for one, part in ((self.optimizer, self), (self.second, self.head)):
            with tf.GradientTape() as tape:
                outputs = self(data[0], training=True)
                losses.append(self.compute_loss(x=data[0], y=data[1], y_pred=outputs))
            gradients = tape.gradient(losses[-1], part.trainable_variables)
            one.apply(gradients, part.trainable_variables)
        return {"loss": losses[0], "second": losses[1]}


def test_updates_that_depend_on_one_another():
    case = case_of(TwoUpdates, compile={}, fit={"batch_size": BATCH, "epochs": 1})
    check_same(case.train(exactly()), case.train(), TOLERANCE)


@pytest.mark.parametrize("synchronized", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_replicas_are_one_device(mirrored, synchronized):
    """24 samples are 12 + 12, of 5 + 5 + 2 each; the reference has one device."""
    case = CASES["convolutional"]
    with mirrored.scope():
        model = case.build(exactly(microbatch_size=5))
        for layer in model.layers:
            if hasattr(layer, "synchronized"):
                layer.synchronized = synchronized
    options = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(IMAGES, LABELS, **options).history
    check_same(Fitted(model, history), full_batch("convolutional"), TOLERANCE)


def test_mixed_precision_and_loss_scaling():
    """In float16 the full batch itself is rounding: micro-batches are no further from it."""
    set_float("float32")
    set_policy("mixed_float16")

    def scaled():
        return keras.optimizers.LossScaleOptimizer(optimizer(), initial_scale=1024.0)

    case = case_of(convolutional, x=IMAGES.astype("float32"), optimizer=scaled)
    expected, found = case.train().training, case.train(exactly()).training
    wrong = case.train(exactly("pooled")).training
    distances = [distance(one.weights, expected.weights) for one in (found, wrong)]
    assert distances[0] < distances[1] / 5
    assert distances[0] < 5e-3


def distance(one, two):
    return max(np.abs(one[name] - two[name]).max() for name in one)


@pytest.mark.parametrize(
    "name", ["convolutional", pytest.param("masked", marks=pytest.mark.matrix)]
)
def test_statistics_of_micro_batches_are_not_those_of_the_full_batch(name):
    """A negative control: what others call close."""
    found = CASES[name].train(exactly("pooled"))
    assert differences(found.training, full_batch(name), 1e-4)


def test_exact_statistics_with_a_gradient_of_one_micro_batch_are_found(monkeypatch):
    """A negative control: statistics of the whole batch whose gradient is forgotten."""

    def forgetful(*args):
        return tuple(map(tf.stop_gradient, exact_moments.moments_of_batch(*args)))

    monkeypatch.setattr(keras3, "moments_of_batch", forgetful)
    found = CASES["convolutional"].train(exactly()).training
    lines = differences(found, full_batch("convolutional"), 1e-4)
    assert any(line.startswith("weights") for line in lines)


FAR = 1000 + IMAGES[:BATCH].astype("float32")


def variance_by(moments):
    """Return the moving variance after one update in float32, with inputs far from zero."""
    set_float("float32")
    case = case_of(lambda: keras.Sequential([layer(), *last()]), x=FAR, y=LABELS[:BATCH])

    def layer():
        return keras.layers.BatchNormalization(momentum=0.0)

    def last():
        return keras.layers.Flatten(), keras.layers.Dense(5)

    model = case.train(moments, epochs=1).model
    return model.layers[0].moving_variance.numpy()


def test_moments_far_from_zero(monkeypatch):
    truth = FAR.astype("float64").var((0, 1, 2))
    np.testing.assert_allclose(variance_by(exactly()), truth, rtol=1e-5)

    def naive(inputs, axes, *_):  # a negative control: sums of squares in float32
        total = exact_moments.cross_microbatch_sum
        count = total(tf.cast(tf.size(inputs) // inputs.shape[-1], inputs.dtype))
        mean = total(tf.reduce_sum(inputs, axes)) / count
        return mean, total(tf.reduce_sum(inputs**2, axes)) / count - mean**2

    monkeypatch.setattr(keras3, "moments_of_batch", naive)
    unchecked = exactly(microbatch_size=MICROBATCH, check="off")
    assert np.abs(variance_by(unchecked) / truth - 1).max() > 1e-3


APPLICATIONS = {
    "MobileNetV2": {"alpha": 0.35},
    "ResNet50": {},
    "DenseNet121": {},
    "EfficientNetB0": {},
    "InceptionV3": {"input_shape": (75, 75, 3)},
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", APPLICATIONS)
def test_large_nets(name):
    options = {"input_shape": (32, 32, 3), **APPLICATIONS[name]}
    x = 2 * np.random.default_rng(1).normal(size=(20, *options["input_shape"]))
    fit = {"batch_size": 10, "epochs": 1}

    def make():
        application = getattr(keras.applications, name)
        return application(weights=None, classes=5, classifier_activation=None, **options)

    case = case_of(make, x=x, y=LABELS[:20], fit=fit)
    check_same(case.train(exactly(microbatch_size=4)), case.train(), TOLERANCE)


class InLoop(keras.Model):
    """BatchNormalization inside of `tf.while_loop`."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = keras.layers.BatchNormalization(), keras.layers.Dense(5)

    def build(self, shape):
        self.norm.build((None, shape[-1]))
        self.last.build((None, shape[-1]))

    def call(self, x, training=False):
        x = tf.reduce_mean(x, (1, 2))
        body = lambda i, h: (i + 1, self.norm(h, training=training))  # noqa: E731
        return self.last(tf.while_loop(lambda i, _: i < 2, body, [tf.constant(0), x])[1])


def renormalised():
    norm = keras.layers.BatchNormalization(renorm=True) if HAS_RENORM else None
    return keras.Sequential([keras.Input((8, 8, 3)), norm, keras.layers.Flatten()])


class OwnMoments(keras.layers.BatchNormalization):
    """A normalisation with statistics of its own."""

    def _moments(self, inputs, mask):
        return super()._moments(2 * inputs, mask)


def own_moments():
    return keras.Sequential([keras.Input((8, 8, 3)), OwnMoments(), keras.layers.Flatten()])


REFUSED = {
    "own moments": (own_moments, {}, "OwnMoments"),
    "control flow": (InLoop, {}, "tf.while_loop"),
    "eager": (convolutional, {"run_eagerly": True}, "run_eagerly"),
    "renorm": (renormalised, {}, "renorm"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_exact_is_refused_before_anything_changes(reason):
    make, compile_options, message = REFUSED[reason]
    if reason == "renorm" and not HAS_RENORM:
        return
    model = case_of(make, compile=compile_options).build(exactly())
    before = model.get_weights()
    with pytest.raises(bigbatch.errors.BigbatchError, match=message) as error:
        model.fit(IMAGES, LABELS, batch_size=BATCH, verbose=0)
    assert "pooled" in str(error.value)
    for one, two in zip(before, model.get_weights()):
        np.testing.assert_array_equal(one, two)


def test_keras_2_is_refused():
    keras_2 = pytest.importorskip("tf_keras")
    model = keras_2.Sequential([keras_2.layers.BatchNormalization(), keras_2.layers.Dense(1)])
    model.compile("sgd", "mse")
    bigbatch.accumulate(model, microbatch_size=2, batch_norm="exact")
    with pytest.raises(bigbatch.errors.ArgumentError, match="pooled"):
        model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
