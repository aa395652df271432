"""Random draws on torch: rows of the full batch's, where a CPU draws one after the other."""

from __future__ import annotations

import contextlib
import functools
import random
import time
import warnings
from unittest import mock

import keras
import numpy as np
import pytest
import torch

import bigbatch
from bigbatch.backends.torch import accumulation, compat, draws, trial
from bigbatch.backends.torch.normals import NormalStream
from bigbatch.core.python_random import are_same_states, python_states
from comparison import check_equals_full_batch, check_same
from fit_cases import DENSE_X, DENSE_Y, MODES, Case

layers = keras.layers
TOLERANCE = 5e-6


class Counts(layers.Layer):
    """Counts its calls, and adds noise that is the same for all samples."""

    def __init__(self):
        super().__init__()
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, x, training=False):
        if training:
            self.count.assign_add(1.0)
            x = x + 0.1 * keras.random.normal((8,), seed=self.seed_generator)
        return x


def model_with(*extra):
    """Return a model that draws in several places, the last after a layer of another width."""

    def make():
        hidden = [layers.Dense(16, "tanh"), *(one() for one in extra), layers.Dense(8, "tanh")]
        return keras.Sequential(
            [keras.Input((5,)), *hidden, *(one() for one in extra), layers.Dense(3)]
        )

    return make


SEEDED = {
    "dropout": lambda: layers.Dropout(0.3, seed=1),
    "dropout with a shape of noise": lambda: layers.Dropout(0.3, noise_shape=(None, 1), seed=2),
    "the same for all samples": lambda: layers.Dropout(0.3, noise_shape=(1, None), seed=2),
    "alpha dropout": lambda: layers.AlphaDropout(0.3, seed=2),
}


@pytest.mark.parametrize("name", SEEDED)
def test_seeded_draws_are_rows_of_the_full_batch(name, mode):
    case = Case(model_with(SEEDED[name]))
    check_same(case.accumulate(mode), case.train(), TOLERANCE)


def test_unseeded_dropout_draws_what_the_full_batch_draws(mode):
    case = Case(model_with(lambda: layers.Dropout(0.3), lambda: layers.Dropout(0.1)))
    check_same(case.accumulate(mode), case.train(), TOLERANCE)


class Noise(layers.Layer):
    """Draws without a seed, as functions of `keras.random` allow."""

    def call(self, x):
        return x + 0.1 * keras.random.normal(keras.ops.shape(x))


@pytest.mark.parametrize("is_made", [True, False])
def test_draws_without_a_seed_are_those_of_the_full_batch(mode, is_made):
    """Keras makes a generator of seeds for them; trying samples does not advance it."""

    def make():
        model = model_with(Noise)()
        keras.backend.clear_session()
        if is_made:
            keras.random.normal(())
        return model

    case = Case(make)
    check_same(case.accumulate(mode), case.train(), TOLERANCE)


def test_unseeded_dropout_without_passing_over_differs(mode):
    case = Case(model_with(lambda: layers.Dropout(0.3)))
    with mock.patch.object(draws.Draws, "_pass_over"), pytest.raises(AssertionError):
        check_same(case.accumulate(mode), case.train(), TOLERANCE)


class Sampling(layers.Layer):
    """As in a variational autoencoder: a few normal numbers for each sample."""

    def __init__(self, width, draw=keras.random.normal):
        super().__init__()
        self.width, self.draw = width, draw
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, x):
        noise = self.draw((x.shape[0], self.width), seed=self.seed_generator)
        return keras.ops.concatenate([x[:, : self.width] + noise, x[:, self.width :]], axis=1)


NORMAL = {
    "sampling, 1": lambda: Sampling(1),
    "sampling, 3": lambda: Sampling(3),
    "truncated": lambda: Sampling(3, keras.random.truncated_normal),
    "noise": lambda: layers.GaussianNoise(0.3),
    "dropout": lambda: layers.GaussianDropout(0.3),
}


@pytest.mark.parametrize("name", NORMAL)
def test_normal_draws_are_rows_of_the_full_batch_for_any_size(name):
    """torch makes blocks of 16, and draws the last 16 of a draw that is no multiple again."""
    case = Case(model_with(NORMAL[name]))
    check_equals_full_batch(case, TOLERANCE, sizes=(1, 8, 20), windows=(3,))


def test_normal_draws_that_just_go_on_differ():
    case = Case(model_with(NORMAL["sampling, 3"]))
    going_on = mock.patch.object(NormalStream, "next", lambda self, count, draw: draw(count))
    with going_on, pytest.raises(AssertionError, match="not the same"):
        check_same(case.accumulate("split"), case.train(), TOLERANCE)


def test_modules_of_torch_drop_out_what_the_full_batch_drops_out():
    def make():
        nn = torch.nn
        inner = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Linear(8, 4), nn.Dropout())
        return keras.Sequential(
            [keras.Input((5,)), layers.TorchModuleWrapper(inner), layers.Dense(3)]
        )

    check_equals_full_batch(Case(make), TOLERANCE, windows=(3,))


def test_what_does_not_depend_on_samples_changes_once(mode):
    case = Case(
        lambda: keras.Sequential(
            [keras.Input((5,)), layers.Dense(8), Counts(), layers.Dense(3)]
        )
    )
    expected = case.train()
    assert float(expected.model.layers[1].count.numpy()) == 6  # updates
    check_same(case.accumulate(mode), expected, TOLERANCE)


def spectral():
    hidden = layers.SpectralNormalization(layers.Dense(8))
    return keras.Sequential([keras.Input((5,)), hidden, layers.Dense(3)])


def test_a_layer_that_assigns_its_own_weight_does_so_once(mode):
    case = Case(spectral)
    check_same(case.accumulate(mode), case.train(), TOLERANCE)


def test_a_weight_that_every_micro_batch_assigns_differs():
    case = Case(spectral)
    with mock.patch.object(trial, "candidates_of", return_value=[]):
        found = case.accumulate("split", {"check": "off"})
    with pytest.raises(AssertionError, match="not the same"):
        check_same(found, case.train(), TOLERANCE)


class Views(keras.Model):
    """Draws for real and fake samples together: noise, labels, dropout of both kinds."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1)
        self.drop = [layers.Dropout(0.3, seed=2), layers.Dropout(0.3)]
        self.hidden, self.out = layers.Dense(7), layers.Dense(1)
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def call(self, x):
        hidden = self.drop[1](self.hidden(self.drop[0](x, training=True)), training=True)
        return self.out(hidden)

    def train_step(self, data):
        real, _ = data
        self.zero_grad()
        fake = keras.random.normal(real.shape, seed=self.seed_generator)
        both = torch.cat([fake, real])
        both = both + 0.1 * keras.random.normal(both.shape, seed=self.seed_generator)
        labels = torch.arange(len(both)).reshape(-1, 1) < len(real)
        labels = labels + keras.random.uniform(labels.shape, seed=self.seed_generator)
        loss = torch.mean(torch.square(labels - self(both))) + torch.mean(self(real) ** 2)
        loss.backward()
        weights = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([one.value.grad for one in weights], weights)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def test_draws_for_samples_that_are_concatenated_are_those_of_the_full_batch():
    check_equals_full_batch(Case(Views, loss=None), TOLERANCE, windows=(3,))


def test_draws_for_samples_that_are_concatenated_are_said_without_a_check(capsys):
    Case(Views, loss=None).accumulate("split", {"check": "off"}, verbose=2)
    said = " ".join(capsys.readouterr().out.split())
    assert "several rows for each sample, which are assumed to follow each other" in said


@pytest.mark.filterwarnings("ignore::bigbatch.NotEqualWarning")
def test_draws_for_samples_that_are_concatenated_are_told_if_they_differ():
    case = Case(Views, loss=None)
    with mock.patch.object(accumulation.SameForAll, "draw_in_blocks", return_value=False):
        found = case.accumulate("split")
    assert "training will differ from the full batch" in found.warnings[0]
    with pytest.raises(AssertionError, match="not the same"):
        check_same(found, case.train(), TOLERANCE)


def augmented(layer, **options):
    """Return a case with a layer that augments images; what it draws does not move them far."""

    def make():
        images = [keras.Input((5,)), layers.Dense(48, "sigmoid"), layers.Reshape((4, 4, 3))]
        augment = getattr(layers, layer)(value_range=(0, 1), **options)
        return keras.Sequential([*images, augment, layers.Flatten(), layers.Dense(3)])

    return Case(make)


@pytest.mark.filterwarnings("ignore::bigbatch.NotEqualWarning")  # which is compared
@pytest.mark.parametrize("layer", ["RandAugment", "AugMix"])
def test_layers_that_choose_what_to_do_choose_what_the_full_batch_does(layer, mode):
    """`AugMix` chooses by Python's own random numbers. Equalization mixes images: left out."""
    nothing = mock.patch.object(
        layers.Equalization, "transform_images", lambda self, images, *_, **__: images
    )
    with nothing:
        case = augmented(layer, seed=4)
        expected = case.train()
        check_same(case.accumulate(mode), expected, TOLERANCE, warns=["it equalizes images"])
        if layer == "AugMix" and mode == "split":
            going_on = lambda *_: contextlib.nullcontext()  # noqa: E731
            with mock.patch.object(accumulation.SameForAll, "_drawing_by_python", going_on):
                wrong = case.accumulate(mode, {"check": "off"})
            with pytest.raises(AssertionError, match="not the same"):
                check_same(wrong, expected, TOLERANCE)


@pytest.mark.filterwarnings("ignore:Tensor.T is deprecated")  # which Keras calls
def test_equalization_is_said_without_a_check(capsys):
    augmented("AugMix").accumulate("split", {"check": "off"}, verbose=2, epochs=1)
    said = " ".join(capsys.readouterr().out.split())
    assert "images are equalized with the values of a micro-batch: aug_mix" in said


class DrawsByPython(layers.Layer):
    """Draws as many of NumPy's numbers as there are samples."""

    def call(self, x, training=False):
        noise = np.random.normal(size=(len(x), 1)).astype("float32") if training else 0.0
        return x + keras.ops.convert_to_tensor(noise)


class Unseeded(layers.Layer):
    """Draws from the generators that belong to the process: of Keras, of Python, of NumPy."""

    def call(self, x, training=False):
        if training:  # Keras first: Python draws a seed for its generator, if there is none
            x = x + 0.1 * keras.random.normal(keras.ops.shape(x))
            x = x * random.uniform(0.9, 1.1) + np.random.rand() / 10
        return x


@pytest.mark.parametrize("options", [{}, {"coupled": True}, {"check": "off"}], ids=str)
def test_generators_of_the_process_draw_what_they_draw_for_the_full_batch(
    mode, options, capsys
):
    """And go on as after the full batch: nothing that is tried is left behind."""
    case = Case(model_with(Unseeded))

    def train(run):
        compat.forget_global_seeds()  # as in a new process
        keras.utils.set_random_seed(4)
        return run(), random.random(), np.random.rand(), keras.random.uniform(())

    expected, *after = train(lambda: case.train(epochs=1))
    found, *left = train(lambda: case.accumulate(mode, options, epochs=1, verbose=2))
    check_same(found, expected, TOLERANCE)
    assert "random draws" not in capsys.readouterr().out
    assert left == after


class Drawn(keras.utils.PyDataset):
    """Batches that threads, or Keras itself, draw by NumPy."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []

    def __len__(self):
        return 12

    def __getitem__(self, index):
        time.sleep(0.005)
        self.seen.append(np.random.rand(4, 5).astype("float32"))
        return self.seen[-1], DENSE_Y[:4]


@pytest.mark.parametrize("workers", [1, 3])
def test_data_that_is_drawn_while_python_draws_is_never_drawn_again(mode, workers, capsys):
    """Nor is it taken for draws of the model, in a window that is not held, as on a GPU."""
    model = Case(model_with(Unseeded)).build()
    setting = {"microbatch_size": 2, "coupled": True} if mode == "split" else MODES[mode][0]
    bigbatch.accumulate(model, **setting)
    data = Drawn(workers=workers)
    with mock.patch.object(accumulation.SameForAll, "draws_by_total", False):
        model.fit(data, epochs=2, verbose=2)
    assert len(data.seen) == len({one.tobytes() for one in data.seen})
    assert "Python's random" not in capsys.readouterr().out


class Attends(layers.Layer):
    """Attention that does not drop out, which torch has one operation for."""

    def build(self, shape):
        self.attention = layers.MultiHeadAttention(2, 3)
        self.attention.build(shape, shape)

    def call(self, x):
        return self.attention(x, x)


class OfTorch(layers.Layer):
    def call(self, x, training=False):
        return x + 0.1 * torch.randn_like(x) if training else x


def test_two_passes_draw_the_same_twice(mode):
    # Without a seed the order of draws is that of updates and epochs, which windows change.
    seed = None if mode == "split" else 4
    case = Case(
        model_with(lambda: layers.Dropout(0.3, seed=seed), lambda: layers.Dropout(0.3, seed=3))
    )
    check_same(case.accumulate(mode, {"coupled": True}), case.train(), TOLERANCE)


def test_the_banner_names_layers_with_other_draws(capsys):
    def said(mode, *extra, **options):
        model = Case(model_with(*extra)).build()
        setting, size = MODES[mode]
        bigbatch.accumulate(model, **setting, **options)
        model.fit(DENSE_X, DENSE_Y, batch_size=size, verbose=2)
        return capsys.readouterr().out

    unseeded, seeded = (lambda: layers.Dropout(0.3)), (lambda: layers.Dropout(0.3, seed=1))
    noise = lambda: layers.GaussianNoise(0.1)  # noqa: E731
    gamma = lambda: Sampling(3, functools.partial(keras.random.gamma, alpha=1.0))  # noqa: E731
    for one in ("split", "window"):
        assert "random draws" not in said(one, unseeded, seeded, noise)
    reshape = lambda: layers.Reshape((-1, 4))  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bigbatch.NotEqualWarning)
        assert "random draws differ from the full batch: sampling" in said("window", gamma)
        coupled = said("split", gamma, coupled=True)
        assert "random draws differ from the full batch: sampling" in coupled
        assert "random draws differ from the full batch: torch.randn_like" in said(
            "split", OfTorch
        )
        assert "Python's random or numpy.random" in said("window", DrawsByPython)
    assert "random draws" not in said("window", reshape, lambda: layers.LSTM(4, dropout=0.1))
    assert "random draws" not in said("split", reshape, Attends, layers.Flatten)


def test_a_failed_batch_gives_the_random_numbers_back():
    model = Case(model_with(lambda: layers.Dropout(0.3), Unseeded)).build()
    bigbatch.accumulate(model, microbatch_size=8)
    model.train_on_batch(DENSE_X, DENSE_Y)
    before, drawn = torch.get_rng_state(), python_states()
    bad = [DENSE_X, DENSE_Y[:, :2]]
    with pytest.raises(RuntimeError, match="must match the size"):
        model.train_on_batch(*bad)
    assert torch.equal(before, torch.get_rng_state())
    assert are_same_states(drawn, python_states())
