"""What cannot be equal in `fit`, batch normalisation and some draws, and what is equal."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import bigbatch
from comparison import check_same_models
from fit_cases import BATCH, DENSE_X, MODES, TOKENS, Case, rng

from problems import TOLERANCE, largest_difference
from stack import BACKEND, HAS_RENORM, IS_KERAS_2_10, IS_KERAS_3, keras, only_on_tensorflow

X = 5 + 3 * DENSE_X  # a mean that is not zero
EPOCHS = {"epochs": 4}  # with a ragged tail in each
layers = keras.layers


class MyBatchNorm(layers.BatchNormalization):
    """A subclass, with something of its own."""

    def call(self, inputs, training=None, **mask):
        return 2 * super().call(inputs, training=training, **mask)


def model_of(norm, shape=(5,)):
    outputs = [layers.Flatten(), layers.Dense(3)] if len(shape) > 1 else [layers.Dense(3)]
    return keras.Sequential([keras.Input(shape), norm, *outputs])


def norm_of(model):
    return next(one for one in model.layers if hasattr(one, "moving_variance"))


def check_statistics(model, expected, rtol=1e-6):
    for name in ("moving_mean", "moving_variance"):
        one, two = (getattr(norm_of(m), name).numpy() for m in (model, expected))
        np.testing.assert_allclose(one, two, rtol=rtol)


KINDS = {
    "default": layers.BatchNormalization,
    "momentum": functools.partial(layers.BatchNormalization, momentum=0.8),
    "no scale, no centre": functools.partial(
        layers.BatchNormalization, scale=False, center=False
    ),
    "synchronized": functools.partial(layers.BatchNormalization, synchronized=True)
    if not IS_KERAS_2_10
    else layers.experimental.SyncBatchNormalization,
    "subclass": MyBatchNorm,
}
if BACKEND != "tensorflow":
    del KINDS["synchronized"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_pooled_statistics_are_those_of_the_full_batch(kind, mode):
    case = Case(lambda: model_of(KINDS[kind]()), x=X, fit=EPOCHS)
    check_statistics(case.accumulate(mode).model, case.train().model)
    # Averaging the variances of the micro-batches, as others do, is not the same.
    micro = [np.var(X[start : start + 7], 0) for start in range(0, BATCH, 7)]
    assert np.max(np.abs(np.mean(micro, 0) / np.var(X[:BATCH], 0) - 1)) > 1e-3


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["default", "synchronized"])
def test_on_two_replicas(kind, mode, mirrored):
    case = Case(lambda: model_of(KINDS[kind]()), x=X, fit=EPOCHS)
    expected, _ = case.train()
    with mirrored.scope():
        model, _ = case.accumulate(mode)
    check_statistics(model, expected, rtol=2e-6)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((5,), -1),
        ((4, 4, 3), -1),
        ((3, 4, 4), 1),
        pytest.param((4, 5), -1, marks=pytest.mark.matrix),
        pytest.param((2, 2, 2, 3), -1, marks=pytest.mark.matrix),
    ],
)
def test_every_rank(shape, axis, mode):
    x = 5 + rng.normal(size=(len(X), *shape)).astype("float32")
    case = Case(lambda: model_of(layers.BatchNormalization(axis=axis), shape), x=x, fit=EPOCHS)
    check_statistics(case.accumulate(mode).model, case.train().model)


def test_masked_elements_do_not_count(mode):
    def make():
        embedding = layers.Embedding(6, 4, mask_zero=True, embeddings_initializer="normal")
        embedding.trainable = False
        pooling = layers.GlobalAveragePooling1D()
        norm = layers.BatchNormalization(momentum=0.5)
        return keras.Sequential([keras.Input((7,)), embedding, norm, pooling, layers.Dense(3)])

    case = Case(make, x=TOKENS, fit=EPOCHS)
    # Keras adds 1e-7 to the number of elements, once per micro-batch. Keras 2.10 counts what is
    # masked, too: one of its means is nearer to zero, with more of the rounding.
    rtol = 1e-5 if IS_KERAS_2_10 else 5e-6
    check_statistics(case.accumulate(mode).model, case.train().model, rtol=rtol)


def test_a_layer_that_is_called_twice_moves_twice(mode):
    def make():
        one, two = keras.Input((5,)), keras.Input((5,))
        norm = layers.BatchNormalization(momentum=0.5)
        both = layers.Concatenate()([norm(one), norm(two)])
        return keras.Model([one, two], layers.Dense(3)(both))

    case = Case(make, x=[X, X[::-1] * 0.5], fit=EPOCHS)
    check_statistics(case.accumulate(mode).model, case.train().model)


def test_frozen_layers_stay_as_they_are(mode):
    def make():
        norm = layers.BatchNormalization()
        norm.trainable = False
        return model_of(norm)

    case = Case(make, x=X)
    model, _ = case.accumulate(mode)
    assert np.all(norm_of(model).moving_mean.numpy() == 0)
    check_same_models(model, case.train().model, TOLERANCE["float32"])


def test_outputs_are_normalised_by_micro_batch(mode):
    """The difference that is left, and said before training."""
    case = Case(lambda: model_of(layers.BatchNormalization()), x=X)
    (model, history), (expected, reference) = case.accumulate(mode), case.train()
    assert largest_difference(model, expected) > 1e-4
    assert abs(history["loss"][-1] / reference["loss"][-1] - 1) > 1e-3


def test_micro_batch_statistics_move_with_every_micro_batch(mode):
    case = Case(lambda: model_of(layers.BatchNormalization(momentum=0.8)), x=X)
    model, _ = case.accumulate(mode, {"batch_norm": "microbatch"})
    expected, _ = case.train()
    # They start at zero and go to five.
    moved, once = (norm_of(one).moving_mean.numpy() for one in (model, expected))
    assert np.all(moved > once)


def test_frozen_statistics_normalise_and_do_not_move(mode):
    case = Case(lambda: model_of(layers.BatchNormalization(momentum=0.8)), x=X)
    model, _ = case.accumulate(mode, {"batch_norm": "frozen"})
    assert np.all(norm_of(model).moving_mean.numpy() == 0)

    def freeze(model):
        call = norm_of(model).call
        norm_of(model).call = lambda inputs, training=None, **mask: call(inputs, False, **mask)

    check_same_models(model, case.train(freeze).model, TOLERANCE["float32"])


@pytest.mark.skipif(not HAS_RENORM, reason="this Keras 3 has no renorm")
def test_renorm_is_left_to_keras(mode):
    case = Case(lambda: model_of(layers.BatchNormalization(momentum=0.8, renorm=True)), x=X)
    model, _ = case.accumulate(mode)
    expected, _ = case.accumulate(mode, {"batch_norm": "microbatch"})
    check_statistics(model, expected, rtol=0)


def test_statistics_are_valid_in_the_middle_of_a_window():
    """A callback that evaluates or saves there must not see those of one micro-batch."""
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(norm_of(self.model).moving_mean.numpy().copy())

    case = Case(lambda: model_of(layers.BatchNormalization()), x=X, fit={"epochs": 1})
    case.accumulate("window", callbacks=[Look()])
    steps = MODES["window"][0]["accumulation_steps"]
    assert all(np.all(one == 0) for one in seen[: steps - 1])
    assert np.array_equal(seen[steps - 1], seen[2 * steps - 2])


@pytest.mark.skipif(not IS_KERAS_3, reason="nothing is drawn by the rows there")
@only_on_tensorflow
def test_truncated_draws_differ(mode):
    """They take a varying count of random numbers: rows cannot be told apart."""

    class Truncated(layers.Layer):
        def __init__(self):
            super().__init__()
            self.seed_generator = keras.random.SeedGenerator(1)

        def call(self, x):
            return x + keras.random.truncated_normal(
                keras.ops.shape(x), seed=self.seed_generator
            )

    case = Case(lambda: keras.Sequential([keras.Input((5,)), Truncated(), layers.Dense(3)]))
    with pytest.warns(bigbatch.NotEqualWarning, match="it draws random numbers"):
        model, _ = case.accumulate(mode)
    assert largest_difference(model, case.train().model) > 1e-4


@only_on_tensorflow
def test_dropout_draws_are_not_repeated_in_the_micro_batches_of_a_batch(mode):
    """All samples are equal: a repeated draw would repeat outputs."""
    outputs = []

    class Look(keras.Sequential):
        def train_step(self, data):
            logs = super().train_step(data)
            outputs.append(self(data[0], training=True))
            return logs

    keras.utils.set_random_seed(3)
    model = Look([keras.Input((20,)), layers.Dropout(0.5), layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    setting, size = MODES[mode]
    bigbatch.accumulate(model, **setting)
    model.fit(np.ones((BATCH, 20)), np.ones((BATCH, 1)), batch_size=size, verbose=0)
    outputs = outputs[-3:]  # before them one micro-batch was tried, and undone
    rows = np.concatenate([output.numpy()[:, 0] for output in outputs])
    assert len(np.unique(rows)) > BATCH // 2
    assert not np.array_equal(outputs[0].numpy(), outputs[1].numpy())
