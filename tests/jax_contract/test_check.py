"""`fit` checks itself on JAX: it warns of what differs, by name, and of nothing else."""

from __future__ import annotations

import re
import warnings

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import bigbatch
from bigbatch.engine.microbatch import MicroBatch
from bigbatch.errors import DifferenceError
from comparison import largest_difference

rng = np.random.default_rng(5)
X = rng.normal(size=(42, 5)).astype("float32")
Y = rng.normal(size=(42, 3)).astype("float32")
MODES = {"split": ({"microbatch_size": 7}, 21), "window": ({"accumulation_steps": 3}, 7)}


def fit(model, mode="split", x=X, y=Y, verbose=0, **options):
    """Train for an epoch; return what the check warned of."""
    model.compile("sgd", "mse")
    setting, batch_size = MODES[mode]
    bigbatch.accumulate(model, **{**setting, **options})
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.fit(x, y, batch_size=batch_size, verbose=verbose, shuffle=False)
    return [str(one.message) for one in found if one.category is bigbatch.NotEqualWarning]


def sequential(*inner):
    return keras.Sequential(
        [keras.Input((5,)), layers.Dense(4, "tanh"), *inner, layers.Dense(3)]
    )


class Step(keras.Model):
    """A custom `train_step` with the loss of its subclass."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(4, "tanh"), layers.Dense(3)

    def call(self, x):
        return self.out(self.hidden(x))

    def loss_of(self, y, z):
        return ops.mean(ops.square(y - z))

    def clipped(self, gradients):
        return gradients

    def logs(self, loss, z):
        return {"my_loss": loss}

    def train_step(self, state, data):
        trainable, others, slots, metrics = state
        x, y = data

        def loss_of(trainable):
            z, new = self.stateless_call(trainable, others, x)
            return self.loss_of(y, z), (z, new)

        differentiated = jax.value_and_grad(loss_of, has_aux=True)
        (loss, (z, others)), gradients = differentiated(trainable)
        gradients = self.clipped(gradients)
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        return self.logs(loss, z), (trainable, others, slots, metrics)


def normal(x):
    return x / ops.norm(x, axis=1, keepdims=True)


class Contrastive(Step):
    def loss_of(self, y, z):
        logits = 5 * ops.matmul(normal(y), ops.transpose(normal(z)))
        return ops.mean(ops.logsumexp(logits, 1) - ops.diagonal(logits))


class Summed(Step):
    def loss_of(self, y, z):
        return ops.sum(ops.square(y - z))


class Clipped(Step):
    def clipped(self, gradients):
        norm = ops.sqrt(sum(ops.sum(ops.square(one)) for one in gradients))
        return [one * ops.minimum(1.0, 0.1 / norm) for one in gradients]


class LogsLargest(Step):
    def logs(self, loss, z):
        return {"my_loss": loss, "largest": ops.max(z)}


class Stddev(layers.Layer):
    """The minibatch standard deviation of a discriminator."""

    def call(self, x):
        spread = ops.mean(ops.std(x, 0))
        return ops.concatenate([x, ops.full((ops.shape(x)[0], 1), spread)], 1)


class Bank(layers.Layer):
    """A memory bank: every call writes its samples."""

    def build(self, shape):
        self.bank = self.add_weight(
            shape=(16, shape[-1]), initializer="random_normal", trainable=False, name="bank"
        )

    def call(self, x, training=False):
        outputs = x + 0.1 * ops.mean(self.bank.value, 0)
        if training:
            rows = ops.concatenate([ops.stop_gradient(x), self.bank.value], 0)
            self.bank.assign(rows[:16])
        return outputs


PLANTED = {
    "contrastive": (Contrastive, "train_step of Contrastive: its loss compares samples"),
    "clipped by hand": (Clipped, "train_step of Clipped: .*clipvalue="),
    "logged": (LogsLargest, "logged value 'largest'"),
    "minibatch stddev": (
        lambda: sequential(Stddev()),
        r"layer 'stddev.*' \(Stddev\): it mixes",
    ),
    "memory bank": (lambda: sequential(Bank()), "variable '.*bank.*': every micro-batch"),
}


def mostly_split():
    """Every difference in split mode; in window mode CI runs one of them."""
    for name in PLANTED:
        for mode in MODES:
            in_ci = mode == "split" or name == "contrastive"
            yield pytest.param(name, mode, marks=() if in_ci else pytest.mark.matrix)


@pytest.mark.parametrize(("name", "mode"), list(mostly_split()))
def test_a_difference_is_told_by_name(name, mode):
    make, expected = PLANTED[name]
    (message,) = fit(make(), mode)
    assert re.search(expected, message), message


@pytest.mark.parametrize("mode", MODES)
def test_a_sum_is_found_and_added_up(mode):
    """As in plain Keras with the full batch; without the check it is taken for a mean."""

    def trained(**options):
        keras.utils.set_random_seed(4)
        model = Summed()
        if options:
            assert not fit(model, mode, **options)
        else:
            model.compile("sgd", "mse")
            model.fit(X, Y, batch_size=21, verbose=0, shuffle=False)
        return model.get_weights()

    full = trained()
    # float32, after two updates of weights of about one.
    assert largest_difference(trained(check="raise"), full) <= 5e-6
    assert largest_difference(trained(check="off"), full) > 1e-2


@pytest.mark.parametrize("size", [7, 5])
def test_batch_normalisation_is_no_difference_and_hides_none(size):
    """It stands still for the samples only: training normalises with micro-batches.

    Micro-batches of five have the size of the few samples, and must not run their program.
    """
    model = sequential(layers.BatchNormalization(), Stddev())
    (message,) = fit(model, microbatch_size=size)
    assert "(Stddev)" in message
    weights = []
    for check in ("warn", "off"):
        keras.utils.set_random_seed(2)
        model = sequential(layers.BatchNormalization(), layers.BatchNormalization())
        assert not fit(model, microbatch_size=size, check=check)
        weights.append(model.get_weights())
    assert largest_difference(*weights) == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_wrong_accumulator_is_found(monkeypatch, mode):
    """The negative control: a loss that is divided by the number of micro-batches."""
    keep = MicroBatch.keep

    def wrong(self, captured, weight=None):
        captured.is_weighted = False
        return keep(self, captured, 0.5)

    monkeypatch.setattr(MicroBatch, "keep", wrong)
    (message,) = fit(Step(), mode)
    assert "the gradient of" in message


@pytest.mark.parametrize("mode", MODES)
def test_raise_changes_nothing(mode):
    keras.utils.set_random_seed(1)
    model = sequential(Bank(), layers.Dropout(0.5))
    model.compile("adam", "mse", metrics=["mae"])
    model.train_on_batch(X, Y)
    setting, batch_size = MODES[mode]
    bigbatch.accumulate(model, **setting, check="raise")
    variables = [*model.variables, *model.optimizer.variables]
    before = [variable.numpy() for variable in variables]
    with pytest.raises(DifferenceError, match=r"variable '.*bank"):
        model.fit(X, Y, batch_size=batch_size, verbose=0)
    for variable, value in zip(variables, before):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_off_does_not_look():
    assert not fit(Contrastive(), check="off")


class Writes(layers.Layer):
    """Writes outside of its program, which cannot be undone."""

    def call(self, x):
        jax.debug.callback(lambda _: None, x, ordered=True)
        return x


def test_what_cannot_be_checked_is_said(capsys):
    def said(model, batch_size=21, **setting):
        model.compile("sgd", "mse")
        bigbatch.accumulate(model, **(setting or {"microbatch_size": 7}))
        model.fit(X, Y, batch_size=batch_size, verbose=2)
        lines = capsys.readouterr().out.splitlines()
        return [line for line in lines if "not checked" in line]

    (line,) = said(sequential(Writes()))
    assert "cannot be undone" in line
    fixed = keras.Input(batch_shape=(7, 5))
    (line,) = said(keras.Model(fixed, layers.Dense(3)(fixed)), 7, accumulation_steps=3)
    assert "fixed batch size" in line


# Equal models, in float32.


def several_outputs():
    x = inputs = keras.Input((5,))
    x = layers.Dropout(0.3)(layers.Dense(8, "tanh", kernel_regularizer="l2")(x))
    x = layers.GaussianNoise(0.1)(layers.BatchNormalization()(x))
    return keras.Model(inputs, [layers.Dense(3, name="a")(x), layers.Dense(3, name="b")(x)])


def attention():
    """With embeddings, masks, dropout by sample, and key biases whose gradient is zero."""
    x = tokens = keras.Input((12,), dtype="int32")
    x = layers.Embedding(30, 16, mask_zero=True)(x)
    for _ in range(2):
        normal = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(2, 8, dropout=0.1)(normal, normal)
        x = x + layers.Dropout(0.1)(layers.Dense(16, "gelu")(x))
    x = layers.LSTM(8)(x)
    return keras.Model(tokens, layers.Dense(3)(x))


def convolved():
    x = image = keras.Input((8, 8, 3))
    for _ in range(4):
        inner = layers.Conv2D(8, 3, padding="same", use_bias=False)(x)
        inner = layers.ReLU()(layers.BatchNormalization()(inner))
        x = layers.Dropout(0.2, noise_shape=(None, 1, 1, 1))(inner)
    return keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


TOKENS = rng.integers(1, 30, (42, 12)) * (np.arange(12) < rng.integers(3, 13, (42, 1)))
IMAGES = rng.normal(size=(42, 8, 8, 3)).astype("float32")
EQUAL = {
    "a custom step": (Step, X, Y),
    "several outputs": (several_outputs, X, {"a": Y, "b": Y[::-1]}),
    "attention": (attention, TOKENS, Y),
    "convolutions": (convolved, IMAGES, Y),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_models_are_quiet(name, capsys):
    make, x, y = EQUAL[name]
    assert not fit(make(), x=x, y=y, check="raise", verbose=2)
    assert "not checked" not in capsys.readouterr().out
