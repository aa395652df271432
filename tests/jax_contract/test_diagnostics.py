"""`verify` and `plan` on JAX."""

from __future__ import annotations

import jax
import keras
import numpy as np
import pytest
from keras import layers

import bigbatch
from bigbatch.backends.jax.state import values_of, variables_of
from bigbatch.engine.microbatch import MicroBatch
from bigbatch.engine.trial import all_variables_of

rng = np.random.default_rng(0)
X = rng.normal(size=(22, 6)).astype("float32")
Y = rng.normal(size=(22, 3)).astype("float32")
IMAGES = rng.normal(size=(64, 16, 16, 3)).astype("float32")
LABELS = rng.integers(0, 3, 64)


def sequential(*inner):
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(4, "tanh"), *inner, layers.Dense(3)]
    )
    model.compile(keras.optimizers.AdamW(0.01, global_clipnorm=0.1), "mse", metrics=["mae"])
    return model


class Spread(layers.Layer):
    """Mixes samples: each is shown how much they differ."""

    def call(self, x):
        return x + keras.ops.std(x, 0, keepdims=True)


class Counts(layers.Layer):
    """Has a weight that every call changes."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), trainable=False, name="calls")

    def call(self, x):
        self.calls.assign_add(keras.ops.mean(x))
        return x * (1 + self.calls.value)


class Gamma(layers.Layer):
    """Draws numbers that cannot be those of the full batch."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(7)

    def call(self, x, training=False):
        if not training:
            return x
        return x * keras.random.gamma(keras.ops.shape(x), 2.0, seed=self.seed_generator)


def verified(model, x=X, y=Y, **options):
    """Return what `verify` says; it changes nothing."""
    model.fit(x, y, verbose=0)
    variables = all_variables_of(model)
    before = [np.array(one.value) for one in variables]
    options = {"microbatch_size": 7, "verbose": False, **options}
    result = bigbatch.verify(model, x, y, **options)
    for variable, value in zip(variables, before):
        np.testing.assert_array_equal(np.array(variable.value), value)
    return result


def test_the_same():
    result = verified(sequential(layers.Dropout(0.4)))
    assert result.ok, result
    assert result.samples == 22
    assert not result.hazards
    # Gradients were seen, and are as large in the full batch.
    assert len(result.differences) == 4
    assert 0 < max(one.gradient for one in result.differences) < 1e-5


@pytest.mark.parametrize("make", [Spread, Counts, layers.BatchNormalization])
def test_what_differs_is_named(make):
    layer = make()
    result = verified(sequential(layer))
    assert not result.ok
    assert {one.where.split()[1] for one in result.hazards} == {repr(layer.name)}


def test_draws_that_cannot_be_the_same_are_named():
    """What is left is compared without them."""
    result = verified(sequential(Gamma()))
    (hazard,) = result.hazards
    assert "(Gamma)" in hazard.where
    assert "draws random numbers" in hazard.what
    assert result.notes == ("Compared with random draws switched off.",)


def test_a_wrong_accumulator_is_found(monkeypatch):
    """The negative control: a loss that is divided by the number of micro-batches."""
    keep = MicroBatch.keep

    def wrong(self, captured, weight=None):
        captured.is_weighted = False
        return keep(self, captured, 0.5)

    monkeypatch.setattr(MicroBatch, "keep", wrong)
    assert not verified(sequential()).ok


def convolutional():
    model = keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Conv2D(16, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def bytes_of_plain_keras(model, samples):
    """Return what the step of Keras itself takes for so many samples, by the compiler."""
    state = tuple(map(values_of, variables_of(model)))
    data = IMAGES[:samples], LABELS[:samples]
    compiled = jax.jit(model.train_step).lower(state, data).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_plan_asks_the_compiler():
    model = convolutional()
    weights = model.get_weights()
    options = {"batch_size": 64, "verbose": False}
    plan = bigbatch.plan(model, IMAGES, LABELS, memory_limit="2MiB", **options)
    assert 1 < plan.microbatch_size < 64
    assert plan.peak(plan.microbatch_size) <= 2 * 2**20 < plan.peak(64)
    assert "compiler" in str(plan)
    # A sample more takes what it does in plain Keras. Within a tenth: the compiler may fuse
    # other operations, and inputs are counted.
    plain = (bytes_of_plain_keras(model, 64) - bytes_of_plain_keras(model, 32)) / 32
    assert plan.parts.activations_per_sample == pytest.approx(plain, rel=0.1)
    for one, other in zip(model.get_weights(), weights):
        np.testing.assert_array_equal(one, other)
    # It really trains with it.
    bigbatch.accumulate(model, microbatch_size=plan.microbatch_size)
    model.fit(IMAGES, LABELS, batch_size=64, verbose=0)


class Longer(keras.utils.PyDataset):
    """Batches of tokens of which the last one is the longest."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.ones((4, 2 + index), "int32"), np.ones((4, 1), "float32")


def test_plan_for_the_longest_samples_of_a_data_set():
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            layers.Embedding(5, 4),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1),
        ]
    )
    model.compile("sgd", "mse")
    plan = bigbatch.plan(model, Longer(), batch_size=4, verbose=False)
    assert plan.parts.batch == 4 * 4 * (4 + 1)
    assert bigbatch.verify(model, Longer(), microbatch_size=3, verbose=False).samples == 4
