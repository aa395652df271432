"""`fit` on torch checks itself on the first batch: it warns of what differs, by name."""

from __future__ import annotations

import re
import warnings

import keras
import numpy as np
import pytest
import torch

import bigbatch
from bigbatch.backends.torch import accumulation
from bigbatch.backends.torch.draws import Draws
from bigbatch.backends.torch.normals import NormalStream
from bigbatch.engine.cause import Cause, with_equalizing
from bigbatch.engine.microbatch import MicroBatch
from bigbatch.errors import DifferenceError
from comparison import check_same
from fit_cases import DENSE_X, DENSE_Y, MODES, TOKEN_Y, TOKENS, Case
from torch_cases import CASES, OwnTrainStep

layers, ops = keras.layers, keras.ops
rng = np.random.default_rng(5)
IMAGES = rng.normal(size=(42, 8, 8, 3)).astype("float32")
WORDS = rng.integers(1, 30, (42, 12)) * (np.arange(12) < rng.integers(3, 13, (42, 1)))
Y = rng.normal(size=(42, 3)).astype("float32")


def fit(model, mode="split", loss="mse", x=DENSE_X, y=DENSE_Y, **options):
    """Train for an epoch; return what the check warned of."""
    model.compile("sgd", loss)
    setting, batch_size = MODES[mode]
    bigbatch.accumulate(model, **{**setting, **options})
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.fit(x, y, batch_size=batch_size, verbose=0, shuffle=False)
    return [str(one.message) for one in found if one.category is bigbatch.NotEqualWarning]


def sequential(*inner):
    return keras.Sequential(
        [keras.Input((5,)), layers.Dense(4, "tanh"), *inner, layers.Dense(3)]
    )


class Step(OwnTrainStep):
    """A custom `train_step` with the loss of its subclass."""

    def outputs_of(self, x):
        return self(x, training=True)

    def loss_of(self, y, z):
        return torch.mean(torch.square(y - z))

    def clipped(self, gradients):
        return gradients

    def logs(self, loss, z):
        return {"my_loss": loss}

    def train_step(self, data):
        x, y, *_ = data
        self.zero_grad()
        z = self.outputs_of(x)
        loss = self.loss_of(y, z)
        loss.backward()
        variables = list(self.trainable_weights)
        with torch.no_grad():
            gradients = self.clipped([variable.value.grad for variable in variables])
            self.optimizer.apply(gradients, variables)
        return self.logs(loss, z)


class Contrastive(Step):
    def loss_of(self, y, z):
        normal = torch.nn.functional.normalize
        logits = 5 * normal(y) @ normal(z).T
        return torch.nn.functional.cross_entropy(logits, torch.arange(len(z)))


class OfLabels(Step):
    """Of new weights all samples have about the same loss, whatever it is divided by."""

    def outputs_of(self, x):
        return 1e-3 * self(x, training=True)

    def loss_of(self, y, z):
        positive = (y[:, 0] > 0).float()
        losses = torch.logsumexp(z, 1) - z[:, 0]
        return torch.sum(positive * losses) / torch.sum(positive)


class Summed(Step):
    def loss_of(self, y, z):
        return torch.sum(torch.square(y - z))


class Clipped(Step):
    def clipped(self, gradients):
        norm = torch.sqrt(sum(torch.sum(torch.square(one)) for one in gradients))
        return [one * torch.clamp(0.1 / norm, max=1.0) for one in gradients]


class LogsLargest(Step):
    def logs(self, loss, z):
        return {"my_loss": loss, "largest": torch.max(z)}


class MovesWeights(Step):
    """Writes means of its samples into frozen weights."""

    def __init__(self):
        super().__init__()
        self.frozen = layers.Dense(3)
        self.frozen.build((None, 3))
        self.frozen.trainable = False

    def logs(self, loss, z):
        with torch.no_grad():
            self.frozen.bias.value.mul_(0.9).add_(0.1 * torch.mean(z, 0))
        return {"my_loss": loss}


class Stddev(layers.Layer):
    """The minibatch standard deviation of a discriminator."""

    def call(self, x):
        spread = ops.mean(ops.std(x, 0))
        return ops.concatenate([x, ops.ones_like(x[:, :1]) * spread], 1)


class Bank(layers.Layer):
    """A memory bank: every call writes its samples."""

    def build(self, shape):
        self.bank = self.add_weight(
            shape=(16, shape[-1]), initializer="random_normal", trainable=False, name="bank"
        )

    def call(self, x, training=False):
        outputs = x + 0.1 * ops.mean(self.bank.value.clone(), 0)
        if training:
            rows = ops.concatenate([ops.stop_gradient(x), self.bank.value], 0)
            self.bank.assign(rows[:16])
        return outputs


PLANTED = {
    "contrastive": (Contrastive, "train_step of Contrastive: its loss compares samples"),
    "divided by labels": (OfLabels, "train_step of OfLabels: its loss divides by something"),
    "clipped by hand": (Clipped, "train_step of Clipped: .*clipvalue="),
    "logged": (LogsLargest, "logged value 'largest'"),
    "weights": (MovesWeights, "variable '.*': every micro-batch"),
    "minibatch stddev": (
        lambda: sequential(Stddev()),
        r"layer 'stddev.*' \(Stddev\): it mixes",
    ),
    "stddev and noise": (
        lambda: sequential(layers.GaussianNoise(0.1), layers.Dropout(0.5), Stddev()),
        r"layer 'stddev.*' \(Stddev\): it mixes",
    ),
    "memory bank": (lambda: sequential(Bank()), "variable '.*bank.*': every micro-batch"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_difference_is_told_by_name(name, mode):
    make, expected = PLANTED[name]
    (message,) = fit(make(), mode)
    assert re.search(expected, message), message
    assert message.count("Fix:") == 1, message


def test_causes_in_one_place_are_all_told():
    of_step = [Cause("train_step of M", what, None, "") for what in ("it assigns", "it clips")]
    model = keras.Sequential([layers.Equalization(name="equal")])
    of_layer = Cause("layer 'equal' (Equalization)", "it mixes", 0.5, "")
    *others, equalizes = with_equalizing(model, [*of_step, of_layer])
    assert others == of_step
    assert equalizes.size == 0.5
    assert "it equalizes images" in equalizes.what
    assert len(with_equalizing(model, of_step)) == 3


def of_labels(y, z):
    weights = ops.abs(y)
    return ops.sum(weights * ops.square(y - z)) / ops.sum(weights)


def test_a_compiled_loss_is_told_and_the_fix_works():
    model = sequential()
    (message,) = fit(model, loss=of_labels, coupled=False)
    assert "loss 'of_labels'" in message
    assert not fit(model, loss=of_labels)


def test_batch_normalisation_is_no_difference_and_hides_none(mode):
    assert not fit(sequential(layers.BatchNormalization(), layers.BatchNormalization()), mode)
    (message,) = fit(sequential(layers.BatchNormalization(), Stddev()), mode)
    assert "(Stddev)" in message


def test_a_wrong_accumulator_is_found(monkeypatch, mode):
    """The negative control: a loss that is divided by the number of micro-batches."""
    keep = MicroBatch.keep

    def wrong(self, captured, weight=None):
        captured.is_weighted = False
        return keep(self, captured, torch.tensor(0.5, dtype=torch.float64))

    monkeypatch.setattr(MicroBatch, "keep", wrong)
    (message,) = fit(Step(), mode)
    assert "the gradient of" in message


# The check leaves nothing behind.


@pytest.mark.parametrize(
    "make",
    [lambda: sequential(Bank(), layers.Dropout(0.5)), MovesWeights],
    ids=["layer", "train_step"],
)
def test_raise_changes_nothing(make, mode):
    keras.utils.set_random_seed(1)
    model = make()
    model.compile("adam", "mse", metrics=["mae"])
    model.train_on_batch(*map(torch.Tensor, (DENSE_X, DENSE_Y)))
    setting, batch_size = MODES[mode]
    bigbatch.accumulate(model, **setting, check="raise")
    variables = [*model.variables, *model.optimizer.variables]
    before = [variable.numpy().copy() for variable in variables]
    weights = [one.value for one in model.trainable_variables]
    gradients = [(one.grad, None if one.grad is None else one.grad.clone()) for one in weights]
    generator = torch.get_rng_state()

    def train():
        for start in range(0, 21, batch_size):
            rows = slice(start, start + batch_size)
            model.train_on_batch(DENSE_X[rows], DENSE_Y[rows])

    with pytest.raises(DifferenceError, match="variable '"):
        train()
    assert torch.equal(torch.get_rng_state(), generator)
    for variable, value in zip(variables, before):
        np.testing.assert_array_equal(variable.numpy(), value)
    for weight, (gradient, value) in zip(weights, gradients):
        assert weight.grad is gradient
        assert value is None or torch.equal(gradient, value)


@pytest.mark.parametrize("name", ["masked", "own tracker", "own train_step, zeroes last"])
def test_training_is_the_same_with_and_without(name, mode):
    """Bit for bit: the check draws, counts and assigns, and all of it is undone."""
    on, off = (CASES[name].accumulate(mode, {"check": check}) for check in ("raise", "off"))
    check_same(on, off, 0)


def test_a_sum_in_a_custom_step_is_added_up(mode):
    case = Case(Summed, loss=None)
    # float32: sums of 21 samples in another order, a few updates.
    check_same(case.accumulate(mode), case.train(), 5e-6)


def test_off_does_not_look():
    assert not fit(Contrastive(), check="off")


# Equal models are quiet.


@pytest.mark.parametrize("name", CASES)
def test_equal_models_are_quiet(name, mode, capsys):
    CASES[name].accumulate(mode, {"check": "raise"}, epochs=1, verbose=2)
    assert "not checked" not in capsys.readouterr().out


def convolved(x, filters):
    x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
    return layers.BatchNormalization()(x)


def residual():
    x = image = keras.Input((8, 8, 3))
    x = layers.ReLU()(convolved(x, 8))
    for _ in range(4):
        inner = layers.ReLU()(convolved(x, 8))
        inner = layers.Dropout(0.2, noise_shape=(None, 1, 1, 1))(convolved(inner, 8))
        x = layers.ReLU()(x + inner)
    return keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


def transformer():
    x = tokens = keras.Input((12,), dtype="int32")
    x = layers.Embedding(30, 16, mask_zero=True)(x)
    for _ in range(2):
        normal = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(2, 8, dropout=0.1)(normal, normal)
        inner = layers.Dense(32, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dropout(0.1)(layers.Dense(16)(inner))
    return keras.Model(tokens, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


def random():
    return sequential(
        layers.Dropout(0.5),
        layers.Dropout(0.3, seed=1),
        layers.GaussianNoise(0.1),
        layers.GaussianDropout(0.2, seed=3),
        layers.AlphaDropout(0.1),
    )


def of_type(policy):
    keras.config.set_dtype_policy(policy)
    try:
        return sequential(layers.Dropout(0.2), layers.BatchNormalization())
    finally:
        keras.config.set_dtype_policy("float32")


NETS = {
    "residual": (residual, IMAGES, Y),
    "transformer": (transformer, WORDS, Y),
    "random": (random, DENSE_X, DENSE_Y),
    "mixed precision": (lambda: of_type("mixed_float16"), DENSE_X, DENSE_Y),
    # Matrices are multiplied in float32 by Keras on torch: rounding is that of float32.
    "float64": (lambda: of_type("float64"), DENSE_X, DENSE_Y),
}


@pytest.mark.parametrize("name", NETS)
def test_equal_nets_are_quiet(name, mode):
    make, x, y = NETS[name]
    assert not fit(make(), mode, x=x, y=y, check="raise")


def test_draws_of_parts_that_are_not_those_of_the_whole_are_found(monkeypatch):
    """The negative control: draws that just go on from one micro-batch to the next."""
    kept = lambda places, count: Draws()  # noqa: E731
    monkeypatch.setattr(accumulation, "WholeDraws", kept)
    monkeypatch.setattr(NormalStream, "next", lambda self, count, draw: draw(count))
    make, x, y = NETS["random"]
    (message,) = fit(make(), x=x, y=y)
    assert "it draws random numbers" in message


def test_several_outputs_and_masks_are_quiet(mode):
    x = tokens = keras.Input((7,), dtype="int32")
    x = layers.Embedding(6, 4, mask_zero=True)(x)
    outputs = {"one": layers.Dense(2, name="one")(x), "two": layers.Dense(2, name="two")(x)}
    model = keras.Model(tokens, outputs)
    losses = {"one": "mse", "two": "mae"}
    y = {"one": TOKEN_Y, "two": TOKEN_Y}
    assert not fit(model, mode, loss=losses, x=TOKENS, y=y, check="raise")


class Builds(Step):
    """Has layers that only `train_step` calls: a trial of the first batch builds them."""

    def __init__(self):
        super().__init__()
        self.head = layers.Dense(3, trainable=False)
        self.built = True

    def outputs_of(self, x):
        return self.head(self(x, training=True))


def test_what_the_first_batch_builds(mode, capsys):
    case = Case(Builds)
    check_same(case.accumulate(mode, {"check": "raise"}, verbose=2), case.train(), 5e-6)
    assert "not checked" not in capsys.readouterr().out


# What cannot be checked is said.


def test_draws_that_cannot_be_repeated(capsys):
    class DrawsAnew(layers.Layer):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator().manual_seed(1)

        def call(self, x):
            return x + torch.randn(x.shape, generator=self.generator)

    case = Case(lambda: sequential(DrawsAnew()))
    case.accumulate("split", epochs=1, verbose=2)
    assert "random draws that cannot be repeated" in capsys.readouterr().out
