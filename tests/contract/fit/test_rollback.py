"""A batch of `fit` that fails leaves no trace: weights, statistics, metrics, random state."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from bigbatch.backends import keras as compat
from comparison import paired
from fit_cases import MODES

from problems import largest_difference
from stack import keras, only_on_tensorflow, random_state_of, set_steps_per_execution

pytestmark = [pytest.mark.usefixtures("repeatable"), only_on_tensorflow]

X = np.arange(84, dtype="float32").reshape(42, 2) / 10
Y = np.ones((42, 1), "float32")
BAD = 35  # in the second batch, and not in its first micro-batch


class Checks(keras.layers.Layer):
    """Fails, when the graph runs, for one sample."""

    def call(self, inputs):
        tf.debugging.assert_less(inputs, 1e6, message="the bad sample")
        return inputs


def build(batch_norm="pooled", **setting):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((2,)),
            Checks(),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"])
    if setting:
        bigbatch.accumulate(model, batch_norm=batch_norm, **setting)
    return model


def state(model):
    keras = compat.backend_of(model)
    variables = keras.state_of(model) + [keras.native(w) for w in model.weights]
    variables += [keras.native(v) for v in keras.optimizer_variables(model.optimizer)]
    return [variable.numpy() for variable in variables]


def same(one, two):
    return all(np.array_equal(*pair) for pair in paired(one, two))


class Note(keras.callbacks.Callback):
    """Notes the state after the first update."""

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations.numpy()) == 1 and not hasattr(self, "state"):
            self.state = state(self.model)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("batch_norm", ["pooled", "microbatch"])
@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_a_failure_in_the_second_batch_leaves_the_state_after_the_first(
    mode, batch_norm, steps_per_execution
):
    setting, size = MODES[mode]
    bad = X.copy()
    bad[BAD] = 1e7

    def fit(model, x, batches, **options):
        rows = slice(0, batches * size)
        return model.fit(x[rows], Y[rows], batch_size=size, shuffle=False, verbose=0, **options)

    per_batch = 1 if mode == "split" else setting["accumulation_steps"]
    expected = build(batch_norm, **setting)
    fit(expected, X, per_batch)
    model = build(batch_norm, **setting)
    set_steps_per_execution(model, steps_per_execution)
    before = model.get_weights()  # metrics and the optimizer have no variables yet
    with pytest.raises(tf.errors.InvalidArgumentError, match="the bad sample"):
        fit(model, bad, 2 * per_batch)
    assert not same(model.get_weights(), before)
    assert same(state(model), state(expected))
    # And it goes on from there.
    for one in (model, expected):
        fit(one, X, 2 * per_batch)
    assert largest_difference(model, expected) == 0


def test_an_exception_of_a_callback_in_the_middle_of_a_window():
    class Raise(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 4:
                raise KeyboardInterrupt

    setting, size = MODES["window"]
    model, note = build(**setting), Note()
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y, batch_size=size, callbacks=[note, Raise()], verbose=0)
    assert same(state(model), note.state)
    # The forgotten window is not part of the next.
    expected = build(**setting)
    for variable, value in paired(expected.weights, model.get_weights()):
        variable.assign(value)
    for one in (model, expected):
        one.compile(keras.optimizers.SGD(0.01), "mse")
        keras.utils.set_random_seed(3)
        state_of_dropout = random_state_of(one.layers[2])
        state_of_dropout.assign(tf.ones_like(state_of_dropout))
        one.fit(X, Y, batch_size=size, shuffle=False, verbose=0)
    assert largest_difference(model, expected) == 0


def test_on_two_replicas(mode, mirrored):
    setting, size = MODES[mode]
    bad = X.copy()
    bad[BAD] = 1e7
    note = Note()
    with mirrored.scope():
        model = build(**setting)
    with pytest.raises(tf.errors.InvalidArgumentError, match="the bad sample"):
        model.fit(bad, Y, batch_size=size, callbacks=[note], shuffle=False, verbose=0)
    assert same(state(model), note.state)


def test_a_failure_before_anything_ran(mode):
    setting, size = MODES[mode]
    model = build(**setting)
    model.fit(X, Y, batch_size=size, verbose=0)
    before = [weight.numpy() for weight in model.weights]
    errors = (ValueError, tf.errors.InvalidArgumentError)  # while tracing; when it runs
    with pytest.raises(errors, match=r"(?i)incompatible"):
        model.train_on_batch(np.ones((len(X), 3)), Y)
    assert same([weight.numpy() for weight in model.weights], before)
