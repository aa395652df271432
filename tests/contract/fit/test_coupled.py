"""A loss in which samples meet, in `fit`: the update of the full batch with `coupled=True`."""

from __future__ import annotations

import contextlib
import functools
import re

import numpy as np
import pytest
import tensorflow as tf

try:
    from tensorflow.python.eager import record
except ImportError:  # in TensorFlow 2.10 it is
    from tensorflow.python.eager import tape as record

import bigbatch
from bigbatch.backends import keras as compat
from bigbatch.engine.loss_trial import LossTrial
from bigbatch.errors import ArgumentError
from comparison import check_same, paired
from coupled_cases import COUPLED_CASES, LABELS, LOSSES, Clip, encoder, loss_of
from fit_cases import CASES, DENSE_X, MODES, Case, mostly_matrix

from problems import TOLERANCE
from stack import IS_KERAS_3, keras, loss_scale, set_policy, with_loss_scale

COUPLED = {"coupled": True}
layers = keras.layers


# In window mode the batches of a window are joined, and the rest is the same.
IN_WINDOWS = ["sim_clr", "clip", "sample weights", "two outputs with different masks"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("mode", "name"),
    [
        *(("split", name) for name in COUPLED_CASES),
        *(("window", name) for name in IN_WINDOWS),
    ],
)
def test_in_float64(name, mode, float64):
    case = COUPLED_CASES[name]
    check_same(case.accumulate(mode, COUPLED), case.train(), TOLERANCE["float64"])


def test_micro_batches_alone_are_wrong(mode):
    """What the tests here would see if the loss was not computed on the whole batch."""
    case = COUPLED_CASES["correlation"]
    expected = case.train()
    check_same(case.accumulate(mode, COUPLED), expected, 1e-3)
    with pytest.warns(bigbatch.NotEqualWarning, match="'correlation'.*coupled=False"):
        result = case.accumulate(mode, {"coupled": False})
    with pytest.raises(AssertionError, match="weights: "):
        check_same(result, expected, 1e-3)
    # A correlation of one sample is not a number.
    assert not abs(result.history["loss"][0] - expected.history["loss"][0]) <= 1e-3


ON_REPLICAS = [
    "metrics",
    "sample weights",
    "a number, times weights",
    "clip",
    "embedding",
    "add_loss and activity",
    "two outputs with different masks",
    "sum",
]


@pytest.mark.parametrize("name", mostly_matrix(ON_REPLICAS, ["metrics", "clip", "sum"]))
def test_replicas_see_the_global_batch(name, mirrored):
    case = COUPLED_CASES[name]
    with mirrored.scope():
        result = case.accumulate("split", COUPLED)
    check_same(result, case.train(), TOLERANCE["float32"])


def test_replicas_see_the_global_batch_of_a_window(mirrored):
    case = COUPLED_CASES["metrics"]
    with mirrored.scope():
        result = case.accumulate("window", COUPLED)
    check_same(result, case.train(), TOLERANCE["float32"])


@pytest.mark.parametrize(
    "options",
    [
        {"steps_per_execution": 2},
        {"jit_compile": True},
        {"run_eagerly": True},
    ],
    ids=str,
)
def test_with_compile_options(options, mode):
    case = COUPLED_CASES["clip"]
    result = case.compiled(**options).accumulate(mode, COUPLED)
    check_same(result, case.train(), TOLERANCE["float32"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("policy", "devices"), [("mixed_float16", 1), ("mixed_float16", 2), ("mixed_bfloat16", 1)]
)
def test_mixed_precision(policy, devices, mode, mirrored):
    set_policy(policy)
    try:
        optimizer = lambda: with_loss_scale(  # noqa: E731
            keras.optimizers.SGD(0.1), 256.0, dynamic_growth_steps=3
        )
        case = Case(encoder(), y=LABELS, loss=loss_of("triplet"), optimizer=optimizer)
        expected = case.train()
        with mirrored.scope() if devices == 2 else contextlib.nullcontext():
            result = case.accumulate(mode, COUPLED)
    finally:
        set_policy("float32")
    scales = [loss_scale(model.optimizer) for model, _ in (result, expected)]
    assert scales[0] == scales[1] > 256
    # The outputs are the same to the bit; gradients have eleven or eight bits.
    check_same(result, expected, 2e-2 if policy == "mixed_bfloat16" else 2e-3)


def test_a_loss_that_fails_leaves_nothing_behind(mode):
    """The tape under which it was computed does not go on recording what others do."""

    def fails(y_true, y_pred):
        raise ZeroDivisionError

    model = encoder()()
    model.compile("sgd", fails, run_eagerly=True)
    setting, size = MODES[mode]
    bigbatch.accumulate(model, **setting, coupled=True)
    with pytest.raises(ZeroDivisionError):
        model.fit(DENSE_X, LABELS, batch_size=size, verbose=0)
    assert not record.could_possibly_record()


def test_clipping_sees_the_gradient_of_the_batch(mode):
    case = Case(
        encoder(),
        y=LABELS,
        loss=loss_of("dice"),
        optimizer=lambda: keras.optimizers.SGD(1.0, clipnorm=1e-3),
    )
    check_same(case.accumulate(mode, COUPLED), case.train(), TOLERANCE["float32"])


class Counter(layers.Layer):
    """Counts its calls, and lets them show in what it returns."""

    def __init__(self, **options):
        super().__init__(**options)
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.assign_add(1.0)
        return x + 0.1 * tf.cast(self.calls, x.dtype)


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 draws from generators, not by rows")
@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}], ids=str)
def test_state_changes_once_and_random_layers_draw_as_in_the_full_batch(mode, options, float64):
    def make():  # layers are made anew each time: they have state
        return encoder(layers.Dropout(0.5, seed=1), Counter())()

    case = Case(make, y=LABELS, loss=loss_of("correlation")).compiled(**options)
    found, expected = case.accumulate(mode, COUPLED), case.train()
    check_same(found, expected, TOLERANCE["float64"])
    assert any(isinstance(layer, Counter) for layer in found.model.layers)


def test_one_trace_for_each_pass(mode):
    calls = []

    class Traced(layers.Layer):
        def call(self, x):
            if not tf.executing_eagerly():
                calls.append(1)
            return x

    case = Case(encoder(Traced()), y=LABELS, loss=loss_of("dice"))
    case.accumulate(mode, COUPLED, epochs=3)  # batches of 21, 21 and 8 samples
    symbolic = 2  # the model is built, and built again by `fit`
    assert len(calls) - symbolic == 2


class BatchAttention(layers.Layer):
    """Samples look at each other."""

    def call(self, x):
        return x + 0.1 * tf.matmul(tf.nn.softmax(tf.matmul(x, x, transpose_b=True)), x)


class MixesInCall(Clip):
    def call(self, inputs):
        return super().call(inputs - tf.reduce_mean(inputs, 0))


class OwnTrainStep(Clip):
    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (encoder(layers.BatchNormalization(name="norm")), r"'norm'.*batch_norm=\"frozen\""),
        (encoder(BatchAttention(name="mix")), "'mix' .BatchAttention.*move what mixes"),
        (MixesInCall, "MixesInCall"),
        (OwnTrainStep, "train_step of OwnTrainStep.*compute_loss"),
    ],
)
def test_what_cannot_be_exact_is_refused(make, message, mode):
    model = None

    def prepare(made):
        nonlocal model
        model = made
        setting, _ = MODES[mode]
        bigbatch.accumulate(model, **setting, **COUPLED)

    case = Case(make, y=LABELS, loss=loss_of("dice"))
    if isinstance(make, type):
        case = Case(make, y=None, loss=None)
    with pytest.raises(ArgumentError, match=re.compile(message, re.DOTALL)):
        case.train(prepare)
    assert int(model.optimizer.iterations) == 0


def test_frozen_batch_normalisation_is_exact(mode):
    def make():
        model = encoder(layers.BatchNormalization())()
        model.layers[1].moving_mean.assign(tf.range(8.0) / 8)
        return model

    case = Case(make, y=LABELS, loss=loss_of("triplet"), optimizer=keras.optimizers.SGD)
    model, history = case.accumulate(mode, {**COUPLED, "batch_norm": "frozen"})

    def untrained(model):
        model.layers[1].call = functools.partial(_in_inference, model.layers[1].call)

    _, expected = case.train(untrained)
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=TOLERANCE["float32"])
    np.testing.assert_array_equal(model.layers[1].moving_mean, tf.range(8.0) / 8)


def _in_inference(call, inputs, training=None, mask=None):
    assert mask is None  # which Keras 2.10 does not pass on
    return call(inputs, training=False)


STANDARD = {
    name: CASES[name]
    for name in ("dense", "sum", "masked", "two outputs", "class weights", "own compute_loss")
}
STANDARD |= {
    loss.__name__: Case(CASES["dense"].make_model, y=np.abs(CASES["dense"].y), loss=loss)
    for loss in (
        keras.losses.BinaryCrossentropy,
        keras.losses.BinaryFocalCrossentropy,
        keras.losses.CategoricalCrossentropy,
        keras.losses.CosineSimilarity,
        keras.losses.Hinge,
        keras.losses.Huber,
        keras.losses.KLDivergence,
        keras.losses.LogCosh,
        keras.losses.MeanAbsoluteError,
        keras.losses.MeanAbsolutePercentageError,
        keras.losses.MeanSquaredLogarithmicError,
        keras.losses.Poisson,
        keras.losses.SquaredHinge,
    )
}


def in_float32(leaf):
    """Return a leaf of the data as `fit` hands it on."""
    if leaf is None or leaf.dtype.kind != "f":
        return leaf if leaf is None else tf.constant(leaf)
    return tf.constant(leaf, tf.float32)


def needs_whole_batch(case):
    """Say what is found out about the loss at the first batch of a case."""
    model = case.make_model()
    model.compile("sgd", case.loss() if case.loss else None)
    data = (case.x, case.y, case.fit.get("sample_weight"))
    data = tf.nest.map_structure(in_float32, data)
    known = compat.backend_of(model)
    known.build(model, data)
    before = [variable.numpy() for variable in known.state_of(model)]
    found = LossTrial(model, known.sample(model, data, 16)).plan().needs_whole_batch
    after = known.state_of(model)
    for variable, value in paired(after, before) if after or before else ():
        np.testing.assert_array_equal(variable, value)
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("name", STANDARD)
def test_no_false_alarm(name):
    assert not needs_whole_batch(STANDARD[name])


@pytest.mark.parametrize("name", [*LOSSES, "clip", "two outputs with different masks"])
def test_a_coupled_loss_is_found(name):
    assert needs_whole_batch(COUPLED_CASES[name])


def test_it_is_found_without_being_asked_and_said_once(mode, capsys):
    case = COUPLED_CASES["sim_clr"]
    check_same(case.accumulate(mode, verbose=2), case.train(), TOLERANCE["float32"])
    assert capsys.readouterr().out.count("'sim_clr' is computed on the whole batch") == 1
    CASES["dense"].accumulate(mode, verbose=2)
    assert "whole batch" not in capsys.readouterr().out


def test_an_activity_regulariser_is_exact_in_float64(float64):
    """Run eagerly, where counts are Python numbers: it was 1e-11 off, found by `fuzz`."""

    def make():
        x = keras.Input((3,))
        return keras.Model(x, layers.Dense(3, activity_regularizer="l2")(x))

    x, y = np.random.default_rng(0).normal(size=(2, 13, 3))
    case = Case(make, x, y, optimizer=lambda: keras.optimizers.SGD(1.0), fit={"epochs": 1})
    case = case.compiled(run_eagerly=True)
    found = case.accumulate("split", {"microbatch_size": 6, **COUPLED})
    check_same(found, case.train(), TOLERANCE["float64"])
