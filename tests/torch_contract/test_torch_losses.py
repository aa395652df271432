"""Losses and metrics of whole batches, and batch normalisation, on torch."""

from __future__ import annotations

from unittest import mock

import keras
import numpy as np
import pytest

import bigbatch
from bigbatch.backends.torch import data as batches
from bigbatch.backends.torch.two_passes import TwoPasses
from bigbatch.engine.planning import Planning
from comparison import check_same, largest_difference
from fit_cases import DENSE_X, DENSE_Y, TOKENS, Case, dense
from fixes import refused
from torch_cases import OwnTrainStep, TwoOptimizers

layers, ops = keras.layers, keras.ops
TOLERANCE = 5e-6


def contrastive(y_true, y_pred):
    """Compare every sample of a batch with every other: in-batch negatives."""
    logits = ops.matmul(y_pred, ops.transpose(ops.cast(y_true, y_pred.dtype)))
    labels = ops.arange(ops.shape(logits)[0])
    return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)


def by_labels(y_true, y_pred):
    """Divide by how many labels are positive."""
    valid = ops.cast(y_true > 0, y_pred.dtype)
    return ops.sum(ops.square(y_pred - y_true) * valid) / ops.sum(valid)


def rmse(y_true, y_pred):
    return ops.sqrt(ops.mean(ops.square(y_pred - y_true)))


class SumOfSquares(OwnTrainStep):
    """Adds a sum over samples, and a temperature that stands in the loss itself."""

    train_step = keras.Model.train_step

    def __init__(self):
        super().__init__()
        self.temperature = self.add_weight(shape=(), initializer="ones", name="temperature")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return loss + 0.01 * self.temperature * ops.sum(ops.square(y_pred))


def with_dropout():
    hidden = [layers.Dense(8, "tanh", kernel_regularizer="l2"), layers.Dropout(0.2, seed=1)]
    return keras.Sequential([keras.Input((5,)), *hidden, layers.Dense(3)])


LOSSES = {
    "contrastive": Case(with_dropout, loss=lambda: contrastive),
    "divides by labels": Case(with_dropout, loss=lambda: by_labels),
    "dice": Case(with_dropout, y=np.abs(DENSE_Y), loss=keras.losses.Dice),
    "custom compute_loss is a sum": Case(SumOfSquares),
    # Labels of different sizes: errors that are all alike hide that it is no mean.
    "metric of the whole batch": Case(
        dense,
        y=DENSE_Y * np.linspace(0.1, 3, len(DENSE_Y))[:, None],
        compile={"metrics": [rmse]},
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_equals_the_full_batch(name, mode):
    check_same(LOSSES[name].accumulate(mode), LOSSES[name].train(), TOLERANCE)


class AddsInTraining(layers.Layer):
    """Adds a loss that a call without training does not show."""

    def call(self, x, training=False):
        if training:
            self.add_loss(0.0 * ops.sum(x))
        return x


class Failing(keras.Model):
    """Cannot be called with zeros, with which is tried what it does."""

    def __init__(self):
        super().__init__()
        self.one, self.two = layers.Dense(3), layers.Dense(3)

    def call(self, x):
        assert ops.any(x)
        return self.one(x), self.two(x)


def adding(*extra):
    def make():
        hidden = [layers.Dense(8), *(one() for one in extra), layers.Dense(3)]
        return keras.Sequential([keras.Input((5,)), *hidden, AddsInTraining()])

    return make


def by_weights():
    return keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")


WEIGHTS = np.linspace(0.1, 2, len(DENSE_X))
ODD = {
    "a loss that is added in training": Case(
        adding(), loss=by_weights, fit={"sample_weight": WEIGHTS}
    ),
    "and draws that need the batch": Case(
        adding(lambda: layers.Dropout(0.3)), loss=by_weights, fit={"sample_weight": WEIGHTS}
    ),
    "a model that cannot be tried": Case(
        Failing,
        DENSE_X,
        (DENSE_Y, DENSE_Y),
        loss=lambda: [by_weights(), by_weights()],
        fit={"sample_weight": (WEIGHTS, WEIGHTS**2)},
    ),
}


@pytest.mark.parametrize("check", ["off", "raise"])
@pytest.mark.parametrize("name", ODD)
def test_terms_are_divided_by_their_weights(name, mode, check, capsys):
    case = ODD[name]
    found = case.accumulate(mode, {"check": check}, verbose=2)
    check_same(found, case.train(), TOLERANCE)
    assert "not checked" not in capsys.readouterr().out


def test_micro_batches_by_themselves_differ():
    case = LOSSES["contrastive"]
    with mock.patch.object(Planning, "_decide"), pytest.raises(AssertionError, match="not the"):
        check_same(case.accumulate("split", {"check": "off"}), case.train(), TOLERANCE)


def test_a_second_pass_with_other_draws_differs():
    case = LOSSES["contrastive"]

    def twice(self):
        self._same._draws._generators.clear()
        for start in range(0, self.batch.count, self._size):
            count = min(self._size, self.batch.count - start)
            yield start, count, batches.rows(self._nest, start, count)

    with mock.patch.object(TwoPasses, "_parts", twice), pytest.raises(AssertionError):
        check_same(case.accumulate("split", {"check": "off"}), case.train(), TOLERANCE)


def normalised():
    return keras.Sequential(
        [keras.Input((5,)), layers.BatchNormalization(), layers.Dense(8), layers.Dense(3)]
    )


def statistics(fitted):
    norm = fitted.model.layers[0]
    return [norm.moving_mean.numpy(), norm.moving_variance.numpy()]


def test_pooled_statistics_are_those_of_the_full_batch(mode):
    case = Case(normalised)
    found, expected = case.accumulate(mode), case.train()
    assert largest_difference(statistics(found), statistics(expected)) <= TOLERANCE
    every = case.accumulate(mode, {"batch_norm": "microbatch"})
    assert largest_difference(statistics(every), statistics(expected)) > 1e-3


def test_frozen_batch_normalisation_equals_inference(mode):
    # Scale and shift would be trained, and are not in a layer that is frozen.
    def without_weights():
        norm = layers.BatchNormalization(scale=False, center=False)
        return keras.Sequential([keras.Input((5,)), norm, layers.Dense(8), layers.Dense(3)])

    def frozen_without_weights():
        model = without_weights()
        model.layers[0].trainable = False
        return model

    expected = Case(frozen_without_weights).train()
    found = Case(without_weights).accumulate(mode, {"batch_norm": "frozen"})
    check_same(found, expected, TOLERANCE)


class Positions(layers.Layer):
    """Adds a learned vector for every position."""

    def build(self, shape):
        self.table = layers.Embedding(shape[1], shape[2])
        self.table.build(None)

    def call(self, x):
        return x + self.table(ops.arange(x.shape[1]))


def test_position_embeddings_are_counted_once(mode):
    """Gradients are dense on torch: rows that do not depend on samples are summed."""

    def make():
        inputs = keras.Input((7,), dtype="int32")
        x = Positions()(layers.Embedding(6, 4)(inputs))
        return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))

    case = Case(make, TOKENS, DENSE_Y)
    check_same(case.accumulate(mode), case.train(), TOLERANCE)


class AppliesTwice(OwnTrainStep):
    def train_step(self, data):
        super().train_step(data)
        return super().train_step(data)


@pytest.mark.parametrize("make", [AppliesTwice, TwoOptimizers])
def test_several_updates_in_one_step(make, mode):
    loss = (lambda: "mse") if make is AppliesTwice else None
    case = Case(make, loss=loss)
    check_same(case.accumulate(mode), case.train(), TOLERANCE)


def test_exact_batch_normalisation_is_refused():
    model = keras.Sequential([keras.Input((5,)), layers.BatchNormalization(), layers.Dense(3)])
    model.compile("sgd", "mse")
    before = model.get_weights()
    bigbatch.accumulate(model, microbatch_size=8, batch_norm="exact")
    with refused('use batch_norm="pooled", which pools the moving statistics'):
        model.fit(DENSE_X, DENSE_Y, verbose=0)
    assert largest_difference(model.get_weights(), before) == 0
    bigbatch.accumulate(model, microbatch_size=8, batch_norm="pooled")
    model.fit(DENSE_X, DENSE_Y, verbose=0)
