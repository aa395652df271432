"""Bad input to `accumulate` and `fit`: received, expected, what to do; nothing has changed."""

from __future__ import annotations

import ast
import re

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from bigbatch.errors import ArgumentError, ContextError
from comparison import paired
from fit_cases import DENSE_X, DENSE_Y, dense

from stack import keras

SETTINGS = [{"microbatch_size": 4}, {"accumulation_steps": 3}]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "neither of microbatch_size and accumulation_steps"),
        ({"microbatch_size": 4, "accumulation_steps": 2}, "both of microbatch_size and acc"),
        ({"microbatch_size": 0}, "microbatch_size=0"),
        ({"microbatch_size": 2.5}, r"microbatch_size=2\.5 \(float\)"),
        ({"microbatch_size": "all"}, "microbatch_size='all'"),
        ({"accumulation_steps": -1}, "accumulation_steps=-1"),
        ({"accumulation_steps": True}, "accumulation_steps=True"),
        ({"accumulation_steps": lambda updates: 0}, r"accumulation_steps\(0\)=0"),
        ({"microbatch_size": 4, "batch_norm": "synced"}, "batch_norm='synced'"),
        ({"microbatch_size": 4, "coupled": "yes"}, "coupled='yes'"),
    ],
)
def test_bad_arguments_leave_the_setting_as_it_was(arguments, text):
    model = bigbatch.accumulate(dense(), microbatch_size=5)
    before = dict(vars(model))
    with pytest.raises(ArgumentError, match=f"(?s){text}.*Expected: .*Fix: "):
        bigbatch.accumulate(model, **arguments)
    assert vars(model) == before


@pytest.mark.parametrize(
    ("arguments", "spelling"),
    [
        ({"microbatch_size": "Auto"}, 'microbatch_size="auto"'),
        ({"microbatch_size": "32"}, "microbatch_size=32"),
        ({"microbatch_size": 32.0}, "microbatch_size=32"),
        ({"accumulation_steps": "8"}, "accumulation_steps=8"),
        ({"micro_batch_size": 32}, "microbatch_size=32"),
        ({"micro_batch_size": "auto"}, "microbatch_size='auto'"),
        ({"microbatchsize": 32}, "microbatch_size=32"),
        ({"gradient_accumulation_steps": 8}, "accumulation_steps=8"),
        ({"accumulation_step": 8}, "accumulation_steps=8"),
        ({"batch_norms": "frozen", "microbatch_size": 8}, "batch_norm='frozen'"),
    ],
)
def test_the_right_spelling(arguments, spelling):
    """The message has it, and what it says works."""
    model = dense()
    with pytest.raises(ArgumentError, match=r"(?s)Received: .*Expected: .*Fix: ") as error:
        bigbatch.accumulate(model, **arguments)
    (fix,) = (line for line in str(error.value).splitlines() if line.startswith("Fix: "))
    assert spelling in fix
    name, value = spelling.split("=")
    given = {"microbatch_size": 8} if name == "batch_norm" else {}
    assert bigbatch.accumulate(model, **given, **{name: ast.literal_eval(value)}) is model


def test_a_size_without_a_name():
    model = dense()
    with pytest.raises(ArgumentError, match=r"Received: accumulate\(model, 32\)") as error:
        bigbatch.accumulate(model, 32)
    fixes = re.findall(r"accumulate\(model, \w+=32\)", str(error.value).split("Fix: ")[1])
    assert len(fixes) == 2
    for fix in fixes:
        assert eval(f"bigbatch.{fix}") is model


@pytest.mark.parametrize("model", ["model", None, keras.layers.Dense(2)])
@pytest.mark.parametrize(
    "function", [lambda m: bigbatch.accumulate(m, microbatch_size=4), bigbatch.restore]
)
def test_not_a_model(model, function):
    with pytest.raises(ArgumentError, match="a Keras 3 model"):
        function(model)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.SGD(gradient_accumulation_steps=2),
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(gradient_accumulation_steps=2)
        ),
    ],
)
def test_an_optimizer_that_accumulates_itself(setting, optimizer):
    model = bigbatch.accumulate(dense(), **setting)
    model.compile(optimizer(), "mse")
    with pytest.raises(ArgumentError, match="remove gradient_accumulation_steps"):
        model.fit(DENSE_X, DENSE_Y, batch_size=9, verbose=0)


class InBranch(keras.Sequential):
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(data[0]))
        gradients = tape.gradient(loss, self.trainable_variables)

        def apply():
            self.optimizer.apply(gradients, self.trainable_variables)
            return loss

        return {"loss": tf.cond(loss < 1e9, apply, lambda: loss)}


class InLoop(keras.Sequential):
    def train_step(self, data):
        def apply(index, _):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(data[0]))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return index + 1, loss

        start = (0, tf.zeros([], self.compute_dtype))
        return {"loss": tf.while_loop(lambda index, _: index < 3, apply, start)[1]}


class Never(keras.Sequential):
    def train_step(self, data):
        return {"loss": tf.reduce_mean(self(data[0]))}


class Elsewhere(keras.Sequential):
    """Its optimizer is no attribute of the model."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(data[0]))
        gradients = tape.gradient(loss, self.trainable_variables)
        OPTIMIZERS[0].apply(gradients, self.trainable_variables)
        return {"loss": loss}


OPTIMIZERS = [keras.optimizers.SGD(0.0)]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (InBranch, "applies gradients of the optimizer 'adam.*' inside tf.cond"),
        (InLoop, "applies gradients of the optimizer 'adam.*' inside tf.cond, tf.while_loop"),
        (Never, r"passes no gradients to an optimizer of the model \('adam.*'\)"),
        (Elsewhere, r"passes no gradients to an optimizer of the model \('adam.*'\)"),
    ],
)
def test_a_train_step_whose_updates_have_no_number_or_are_never_made(kind, text, setting):
    OPTIMIZERS[0] = keras.optimizers.SGD(0.0)
    model = kind([keras.Input((5,)), keras.layers.Dense(3)])
    model.compile("adam", "mse")
    bigbatch.accumulate(model, **setting)
    before = model.get_weights()
    with pytest.raises(ContextError, match=text):
        model.fit(DENSE_X, DENSE_Y, batch_size=9, verbose=0)
    assert all(np.array_equal(*pair) for pair in paired(before, model.get_weights()))
    assert "apply" not in vars(model.optimizer)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_model_without_trainable_weights_is_warned_of_as_by_keras(setting):
    """There is nothing to train, but there are losses and metrics to log."""
    logged = []
    for prepare in (lambda model: None, lambda model: bigbatch.accumulate(model, **setting)):
        model = dense()
        model.trainable = False
        model.set_weights([np.ones_like(weight) for weight in model.get_weights()])
        model.compile("sgd", "mse", metrics=["mae"])
        prepare(model)
        with pytest.warns(UserWarning, match="does not have any trainable weights"):
            history = model.fit(DENSE_X, DENSE_Y, batch_size=9, shuffle=False, verbose=0)
        assert all(np.all(weight == 1) for weight in model.get_weights())
        logged.append(history.history)
    for name, values in logged[0].items():
        np.testing.assert_allclose(logged[1][name], values, rtol=1e-5)


def test_a_schedule_that_goes_wrong_later_leaves_the_last_update():
    model = dense()
    model.compile("sgd", "mse")
    bigbatch.accumulate(model, accumulation_steps=lambda updates: 2 if updates < 2 else "three")
    with pytest.raises(ArgumentError, match=r"accumulation_steps\(2\)='three'"):
        model.fit(DENSE_X, DENSE_Y, batch_size=5, verbose=0)
    assert int(model.optimizer.iterations) == 2
