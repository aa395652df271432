"""Losses and metrics as users write them: what they divide by is found by trying."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from bigbatch.backends.keras import backend_of
from bigbatch.backends.sample import keys_of_rows
from bigbatch.engine import loss_trial, planning
from bigbatch.engine.loss_plan import Kind
from comparison import check_same
from fit_cases import BATCH, SAMPLES, TOKENS, WEIGHTS, Case, mostly_matrix

from problems import TOLERANCE
from stack import IS_KERAS_3, keras

layers = keras.layers
LABELS = (np.random.default_rng(5).random((SAMPLES, 1)) > 0.6).astype("float64")
TAGS = np.random.default_rng(6).integers(0, 3, (SAMPLES, 7)) * (TOKENS > 0)


def balanced(y_true, y_pred):
    """Each class counts the same, however many samples it has."""
    error, labels = tf.square(y_true - y_pred), y_true
    positive = tf.reduce_sum(labels * error) / (tf.reduce_sum(labels) + 1e-7)
    return positive + tf.reduce_sum((1 - labels) * error) / (tf.reduce_sum(1 - labels) + 1e-7)


def masked(y_true, y_pred):
    """The loss of tutorials on named entities: labels of zero do not count."""
    loss = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
    mask = tf.cast(y_true > 0, loss.dtype)
    return tf.reduce_sum(loss * mask) / tf.reduce_sum(mask)


def summed(y_true, y_pred):
    return tf.reduce_sum(tf.square(y_true - y_pred))


def of_global_batch(y_true, y_pred):
    each = tf.reduce_mean(tf.square(y_true - y_pred), -1)
    return tf.nn.compute_average_loss(each, global_batch_size=BATCH)


def mean(y_true, y_pred):
    return tf.reduce_mean(tf.square(y_true - y_pred))


def focal(y_true, y_pred):
    y_pred = tf.clip_by_value(y_pred, 1e-7, 1 - 1e-7)
    positive = y_true * (1 - y_pred) ** 2 * tf.math.log(y_pred)
    return -tf.reduce_mean(positive + (1 - y_true) * y_pred**2 * tf.math.log(1 - y_pred))


def each_relative_to_all(y_true, y_pred):
    """One number for each sample, which depends on the others."""
    error = tf.reduce_mean(tf.square(y_true - y_pred), -1)
    return error / (1 + tf.reduce_mean(error))


def rmse(y_true, y_pred):
    return tf.sqrt(tf.reduce_mean(tf.square(y_true - y_pred)))


def dice(y_true, y_pred):
    overlap, both = tf.reduce_sum(y_true * y_pred), tf.reduce_sum(y_true + y_pred)
    return 2 * overlap / (both + 1e-7)


def masked_accuracy(y_true, y_pred):
    match = tf.cast(tf.cast(y_true, tf.int64) == tf.argmax(y_pred, -1), y_pred.dtype)
    mask = tf.cast(y_true > 0, y_pred.dtype)
    return tf.reduce_sum(match * mask) / tf.reduce_sum(mask)


class Adds(layers.Layer):
    """Adds to the loss, as its function says."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, inputs):
        self.add_loss(0.01 * self.function(tf.square(inputs)))
        return inputs


def classifier(*more):
    def make():
        hidden = layers.Dense(8, "tanh", kernel_regularizer="l2")
        made = [layer() for layer in more]
        return keras.Sequential(
            [keras.Input((5,)), hidden, *made, layers.Dense(1, "sigmoid", name="out")]
        )

    return make


def tagger():
    return keras.Sequential(
        [keras.Input((7,), dtype="int32"), layers.Embedding(6, 4), layers.Dense(3)]
    )


class ComputesLoss(keras.Model):
    """A subclassed model with a custom `compute_loss`."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(4, "tanh", kernel_regularizer="l2")
        self.out = layers.Dense(1)

    def call(self, inputs):
        self.stored = self.hidden(inputs)
        return self.out(self.stored)


class Sums(ComputesLoss):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_sum(tf.square(y - y_pred)) + tf.add_n(self.losses)


class AddsSumToCompiled(ComputesLoss):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return loss + 0.1 * tf.reduce_sum(tf.abs(y_pred))


class ReadsWhatCallStored(ComputesLoss):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_mean(tf.square(y - y_pred)) + tf.reduce_mean(tf.abs(self.stored))


class DividesByLabels(ComputesLoss):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return balanced(y, y_pred) + tf.add_n(self.losses)


class WeighsByWhatItCounts(ComputesLoss):
    """As object detectors do: boxes count for their share of all boxes of the batch."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        labels, others = y
        weights = tf.squeeze(labels / tf.reduce_sum(labels), -1)
        return super().compute_loss(x, labels - others, y_pred, weights)


class ChangesTargets(ComputesLoss):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, tf.add_n(y), y_pred, sample_weight)


class OfUnknownLength(ComputesLoss):
    def call(self, inputs):
        outputs = tf.sigmoid(super().call(inputs))
        return tf.reshape(tf.repeat(outputs, 3, 0), [tf.shape(inputs)[0], -1])


class ComparesWhatCallStored(ComputesLoss):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_mean(tf.square(y - y_pred)) + tf.math.reduce_std(self.stored)


def two_outputs():
    inputs = keras.Input((5,))
    hidden = layers.Dense(8, "tanh")(inputs)
    outputs = [layers.Dense(1, "sigmoid", name=name)(hidden) for name in ("one", "two")]
    return keras.Model(inputs, outputs)


def case(make=None, loss=mean, metrics=(), y=LABELS, **options):
    make = make or classifier()
    # Functions are given anew: Keras keeps the state of a metric in the object it is given.
    compiled = {"metrics": list(metrics)} if metrics else {}
    return Case(make, y=y, loss=lambda: loss, compile=compiled, **options)


LOSSES = {
    "divides by labels": (case(loss=balanced), Kind.WHOLE),
    "masked by labels": (case(tagger, masked, x=TOKENS, y=TAGS), Kind.WHOLE),
    "relative to all": (case(loss=each_relative_to_all), Kind.WHOLE),
    "weights of a number": (
        case(loss=mean, fit={"sample_weight": WEIGHTS}),
        Kind.WHOLE,
    ),
    "sum": (case(loss=summed), Kind.SUM),
    "mean of a global batch": (case(loss=of_global_batch), Kind.SUM),
    "mean": (case(loss=mean, metrics=["mae"]), Kind.MEAN),
    "focal": (case(loss=focal), Kind.MEAN),
    "of Keras": (case(loss="binary_crossentropy", metrics=["accuracy"]), Kind.KERAS),
}
ADDED = {
    "adds one per sample": lambda: Adds(lambda x: tf.reduce_sum(x, -1)),
    "adds a sum": lambda: Adds(tf.reduce_sum),
    "adds a mean": lambda: Adds(tf.reduce_mean),
}
CASES = {
    **{name: one for name, (one, _) in LOSSES.items()},
    **{name: case(classifier(adds), "mse") for name, adds in ADDED.items()},
    "adds a sum, whole batch": case(classifier(ADDED["adds a sum"]), balanced),
    "metrics": case(loss="mse", metrics=[rmse, dice, mean, "mae"]),
    "metric of labels": case(
        tagger, masked, [masked_accuracy], x=TOKENS, y=TAGS.astype("float64")
    ),
    "two outputs": Case(
        two_outputs,
        y=[LABELS, LABELS[::-1]],
        loss=lambda: [balanced, summed],
        compile={"loss_weights": [0.3, 0.7]},
    ),
    "two outputs, a sum and a mean": Case(
        two_outputs, y=[LABELS, LABELS[::-1]], loss=lambda: [mean, summed]
    ),
    "compute_loss sums": case(Sums),
    "compute_loss adds a sum": case(AddsSumToCompiled, "mse"),
    "compute_loss reads what call stored": case(ReadsWhatCallStored),
    "compute_loss divides by labels": case(DividesByLabels),
    "outputs of unknown length": case(OfUnknownLength, balanced),
}
IN_CI = ["divides by labels", "masked by labels", "sum", "adds one per sample", "metrics"]
IN_CI += ["two outputs", "compute_loss sums", "compute_loss divides by labels"]
IN_CI += ["outputs of unknown length"]


@pytest.mark.parametrize("name", mostly_matrix(CASES, IN_CI))
def test_in_float64(name, mode, float64):
    if name == "adds one per sample" and not IS_KERAS_3:
        pytest.skip("plain Keras 2 cannot add such a loss to that of a regulariser")
    check_same(CASES[name].accumulate(mode), CASES[name].train(), TOLERANCE["float64"])


@pytest.mark.skipif(not IS_KERAS_3, reason="the reduction is of Keras 3")
@pytest.mark.parametrize("kind", [WeighsByWhatItCounts, ChangesTargets])
def test_compute_loss_hands_over_other_targets(kind, mode, float64):
    one = case(kind, y=[LABELS, LABELS[::-1]])
    one = replace(one, loss=lambda: keras.losses.MeanSquaredError(reduction="sum"))
    check_same(one.accumulate(mode), one.train(), TOLERANCE["float64"])


def of_positives(y_true, y_pred):
    """A sum, as long as all samples with a positive label are in one part."""
    error = tf.reduce_sum(y_true * tf.square(y_true - y_pred))
    return error / (tf.reduce_sum(y_true) + 1)


@pytest.mark.parametrize("size", [3, 8])
def test_few_labels_are_positive(size, float64):
    """Samples are chosen and cut so that both parts have one; more than a micro-batch has."""
    rare = np.isin(np.arange(SAMPLES) % BATCH, [2, 9, 15]).astype("float64")[:, None]
    one = case(loss=of_positives, y=rare)
    result = one.accumulate("split", {"microbatch_size": size})
    check_same(result, one.train(), TOLERANCE["float64"])


@pytest.mark.parametrize("name", ["divides by labels", "sum"])
def test_batches_of_one_sample(name, float64):
    """The samples of several batches are tried together."""
    result = CASES[name].accumulate("window", {"accumulation_steps": BATCH})
    check_same(result, CASES[name].train(), TOLERANCE["float64"])


@pytest.mark.parametrize(
    "name", ["divides by labels", "sum", "adds a sum", "compute_loss sums"]
)
def test_on_replicas(name, mode, mirrored):
    with mirrored.scope():
        result = CASES[name].accumulate(mode)
    check_same(result, CASES[name].train(), TOLERANCE["float32"])


@pytest.mark.parametrize("options", [{"jit_compile": True}, {"run_eagerly": True}], ids=str)
@pytest.mark.parametrize("name", ["divides by labels", "metrics"])
def test_with_compile_options(name, options, mode):
    result = CASES[name].compiled(**options).accumulate(mode)
    check_same(result, CASES[name].train(), TOLERANCE["float32"])


def plan_of(one):
    """Return the plan for the first batch of a case."""
    model = one.build()
    data = (one.x[:BATCH], one.y[:BATCH], one.fit.get("sample_weight", WEIGHTS)[:BATCH])
    if "sample_weight" not in one.fit:
        data = data[:2]
    backend = backend_of(model)
    data = backend.data.as_fit_has_them(data)
    backend.build(model, data)
    return loss_trial.LossTrial(model, backend.sample(model, data, 16)).plan()


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_recognised_as_what(name):
    one, kind = LOSSES[name]
    assert plan_of(one).terms == [kind]


@pytest.mark.parametrize("counts", [(3, 1, 2), (5, 4, 7, 7, 2, 5)])
def test_a_part_with_the_average_count_of_labels_does_not_make_a_mean(counts):
    """The last sample has the average count of labels, and the first one may, too."""
    tags = np.arange(7) < np.array(counts)[:, None]
    one = case(tagger, masked, x=TOKENS[: len(tags)], y=tags.astype("int64"))
    assert plan_of(one).terms == [Kind.WHOLE]


def test_passes_are_made_only_if_needed(mode):
    """Counted by the forward passes that are traced: Keras, too, calls a model to build it."""

    def calls(name):
        made = []

        class Counts(layers.Layer):
            def call(self, inputs):
                made.append(not tf.executing_eagerly())
                return inputs

        case(classifier(Counts), LOSSES[name][0].loss()).accumulate(mode, epochs=1)
        return sum(made)

    assert calls("of Keras") == calls("mean")
    # Of a window with a sum the samples are counted first, which computes no forward pass.
    assert calls("sum") == calls("mean") + (mode == "window")
    assert calls("divides by labels") == calls("mean") + 1


def test_where_two_passes_cannot_be_had_it_is_said(mode):
    one = case(ComparesWhatCallStored)
    with pytest.warns(bigbatch.NotEqualWarning, match="reads values that call.. has.*Fix: let"):
        one.accumulate(mode)


def test_too_many_bytes_are_not_held(mode, monkeypatch):
    monkeypatch.setattr(planning.Planning, "_most_bytes", lambda self: 100)
    with pytest.warns(bigbatch.NotEqualWarning, match="would take .* B.*coupled=True"):
        CASES["divides by labels"].accumulate(mode)
    with pytest.warns(bigbatch.NotEqualWarning, match="metric 'dice'.*keras.metrics.Metric"):
        case(loss="mse", metrics=[dice]).accumulate(mode)
    # What the first warning says helps.
    result = CASES["divides by labels"].accumulate(mode, {"coupled": True})
    check_same(result, CASES["divides by labels"].train(), TOLERANCE["float32"])


def test_batch_normalisation_and_a_loss_of_the_whole_batch(mode, float64):
    """Micro-batches are normalised by themselves; the loss is of all, statistics are pooled."""
    one = case(classifier(layers.BatchNormalization), balanced)
    model, _ = one.accumulate(mode, epochs=1)
    expected, _ = case(classifier(layers.BatchNormalization), "mse").accumulate(mode, epochs=1)
    norms = [m.layers[1] for m in (model, expected)]
    assert not np.allclose(norms[0].moving_mean, 0)
    assert np.isfinite(norms[0].moving_variance).all()
    assert np.abs(norms[0].moving_mean - norms[1].moving_mean).max() < 0.1  # weights differ


def test_noise_scale_says_that_nothing_is_known(mode):
    noise = bigbatch.NoiseScale()
    CASES["divides by labels"].accumulate(mode, callbacks=[noise])
    assert noise.critical_batch_size is None


def labels_are_all_alike(monkeypatch):
    choose = loss_trial.LossTrial._labelled

    def labelled(self, outputs, rows):
        y, y_pred, weight = choose(self, outputs, rows)
        return tf.ones_like(y), y_pred, weight

    monkeypatch.setattr(loss_trial.LossTrial, "_labelled", labelled)


def a_sum_is_taken_for_a_mean(monkeypatch):
    kind = loss_trial.LossTrial._kind

    def mistaken(self, *args, **kwargs):
        found = kind(self, *args, **kwargs)
        return Kind.MEAN if found is Kind.SUM else found

    monkeypatch.setattr(loss_trial.LossTrial, "_kind", mistaken)


@pytest.mark.parametrize(
    ("mistake", "name"),
    [(labels_are_all_alike, "masked by labels"), (a_sum_is_taken_for_a_mean, "sum")],
)
def test_the_tests_here_catch(mistake, name, mode, monkeypatch, float64):
    one, tolerance = CASES[name], TOLERANCE["float64"]
    check_same(one.accumulate(mode), one.train(), tolerance)
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match="weights: "):
        check_same(one.accumulate(mode, {"check": "off"}), one.train(), tolerance)


def test_labels_tell_kinds_also_beside_weights_that_all_differ():
    """Or a loss that divides by the samples of a class may look like a mean."""
    labels, weights, ones = np.array([0, 1, 0, 1, 2]), np.arange(5.0), np.ones(5)
    assert len(set(keys_of_rows([weights, labels], 5))) == 3
    assert len(set(keys_of_rows([weights, ones], 5))) == 5
