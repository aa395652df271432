"""One trace of `train_step` for a whole run of `fit`, whatever the tails do."""

from __future__ import annotations

import pytest
import tensorflow as tf

import bigbatch
from fit_cases import DENSE_X, DENSE_Y, MODES, TOKEN_Y, TOKENS

from stack import IS_KERAS_3, keras


class Counting(keras.Sequential):
    traces = 0

    def train_step(self, data):
        Counting.traces += not tf.executing_eagerly()  # as the check runs a few samples
        return super().train_step(data)


@pytest.fixture(autouse=True)
def _reset():
    Counting.traces = 0


def fit(model, x, y, setting, size, **options):
    model.compile("adam", "mse", **options)
    bigbatch.accumulate(model, **setting)
    for rows in (50, 50, 33):
        model.fit(x[:rows], y[:rows], batch_size=size, epochs=2, verbose=0)


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_ragged_tails_epochs_and_fits(mode, steps_per_execution):
    model = Counting([keras.Input((5,)), keras.layers.Dense(3)])
    options = {"steps_per_execution": steps_per_execution}
    fit(model, DENSE_X, DENSE_Y, *MODES[mode], **options)
    assert Counting.traces == 1


def test_a_schedule():
    model = Counting([keras.Input((5,)), keras.layers.Dense(3)])
    fit(model, DENSE_X, DENSE_Y, {"accumulation_steps": lambda updates: 1 + updates % 4}, 6)
    assert Counting.traces == 1


def test_masks(mode):
    layers = [keras.Input((7,)), keras.layers.Embedding(6, 4, mask_zero=True)]
    model = Counting([*layers, keras.layers.Dense(2)])
    fit(model, TOKENS, TOKEN_Y, *MODES[mode])
    assert Counting.traces == 1


def test_a_model_that_is_built_by_its_first_batch(mode):
    """Traces that make its variables, and one that adds up their gradients; then no other."""
    setting, size = MODES[mode]
    model = Counting([keras.layers.Dense(3)])
    model.compile("adam", "mse")
    bigbatch.accumulate(model, **setting)
    model.fit(DENSE_X[:21], DENSE_Y[:21], batch_size=size, verbose=0)
    first = Counting.traces
    assert first <= (3 if IS_KERAS_3 else 1)
    for rows in (50, 33):
        model.fit(DENSE_X[:rows], DENSE_Y[:rows], batch_size=size, epochs=2, verbose=0)
    assert Counting.traces == first


def test_two_replicas(mode, mirrored):
    with mirrored.scope():
        model = Counting([keras.Input((5,)), keras.layers.Dense(3)])
        fit(model, DENSE_X, DENSE_Y, *MODES[mode])
    assert Counting.traces == 2  # one for each, as in plain Keras
