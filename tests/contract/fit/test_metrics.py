"""Metrics, logs and callbacks of `fit` are those of the full batch."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from comparison import check_same, paired
from fit_cases import CASES, DENSE_X, MODES, Case, dense, rng

from problems import TOLERANCE
from stack import keras, only_on_tensorflow


class Events(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.batches, self.logs = [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.batches.append(batch)

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append({name: float(value) for name, value in logs.items()})


def test_callbacks_fire_once_per_batch_of_the_data(mode):
    batches = -(-len(DENSE_X) // MODES[mode][1])
    events = Events()
    CASES["dense"].accumulate(mode, callbacks=[events], epochs=1)
    assert events.batches == list(range(batches))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["dense", "two outputs", "own train_step", "own tracker"])
def test_logs_of_a_batch_are_those_of_the_full_batch(name, mode):
    case, events, expected = CASES[name], Events(), Events()
    case.accumulate(mode, callbacks=[events])
    case.train(callbacks=[expected])
    if mode == "window":  # at the end of a full window; the last one is shorter
        per_update = MODES[mode][0]["accumulation_steps"]
        ends = [batch % per_update == per_update - 1 for batch in events.batches]
        events.logs = [logs for logs, end in paired(events.logs, ends) if end]
        expected.logs = [
            logs for logs, batch in paired(expected.logs, expected.batches) if batch < 2
        ]
    assert len(events.logs) == len(expected.logs) > 0
    for one, two in paired(events.logs, expected.logs):
        assert one.keys() == two.keys()
        for key in two:
            np.testing.assert_allclose(one[key], two[key], rtol=TOLERANCE["float32"])


@only_on_tensorflow
def test_a_loss_that_an_own_train_step_returns_and_no_metric_has(mode):
    """Keras has a metric of the same name, of which it says nothing here: zero."""

    class Own(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
            return {"loss": loss}

    case = Case(lambda: Own([keras.Input((5,)), keras.layers.Dense(3)]), loss=None)
    events, expected = Events(), Events()
    case.accumulate(mode, callbacks=[events])
    case.train(callbacks=[expected])
    assert expected.logs[0]["loss"] > 0
    ends = slice(2, 3) if mode == "window" else slice(0, 1)
    np.testing.assert_allclose(
        events.logs[ends][0]["loss"], expected.logs[0]["loss"], rtol=TOLERANCE["float32"]
    )


def test_metrics_that_are_no_means(mode):
    """A threshold curve, a sum over classes: exact because every sample is seen once."""
    case = Case(
        lambda: keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, "sigmoid")]),
        y=rng.integers(0, 2, len(DENSE_X)),
        loss=lambda: "binary_crossentropy",
    )

    def with_metrics():
        metrics = [keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="p")]
        # Its result is a slice of a variable, which TensorFlow lets assign.
        return case.compiled(metrics=[*metrics, keras.metrics.FalseNegatives(name="missed")])

    result, expected = with_metrics().accumulate(mode), with_metrics().train()
    check_same(result, expected, TOLERANCE["float32"])


@only_on_tensorflow
def test_an_integer_in_the_logs(mode):
    class Counts(keras.Sequential):
        def train_step(self, data):
            return {**super().train_step(data), "answer": 42}

    def make():
        return Counts([keras.Input((5,)), keras.layers.Dense(3)])

    _, history = Case(make).accumulate(mode)
    assert history["answer"] == [42, 42]


def test_weighted_metrics_and_sample_weights(mode):
    case = CASES["sample weights"].compiled(metrics=["mae"], weighted_metrics=["mae"])
    check_same(case.accumulate(mode), case.train(), TOLERANCE["float32"])


def test_metrics_are_reset_between_epochs(mode):
    events = Events()
    _, history = Case(dense, optimizer=lambda: keras.optimizers.SGD(0.0)).accumulate(
        mode, callbacks=[events]
    )
    assert history["loss"][0] == pytest.approx(history["loss"][1], rel=1e-6)
