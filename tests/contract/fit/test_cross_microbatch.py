"""Layers and losses that couple samples train as with the full batch, by sums over it."""

from __future__ import annotations

import pytest

import bigbatch
from comparison import check_same, differences
from exact_cases import IMAGES, LABELS, MICROBATCH, case_of, exactly

from stack import IS_KERAS_3, keras

pytestmark = [
    pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 has no stages"),
    pytest.mark.usefixtures("float64"),
]
ops, layers = getattr(keras, "ops", None), keras.layers


class MinibatchStddev(layers.Layer):
    """The mean standard deviation over the batch as one more feature, as in GANs."""

    def call(self, x):
        ones = ops.ones_like(x[:, :1])
        count = bigbatch.cross_microbatch_sum(ops.sum(ones))
        mean = bigbatch.cross_microbatch_sum(ops.sum(x, axis=0)) / count
        variance = bigbatch.cross_microbatch_sum(ops.sum((x - mean) ** 2, axis=0)) / count
        return ops.concatenate([x, ones * ops.mean(ops.sqrt(variance + 1e-8))], axis=-1)


class BatchSoftmax(layers.Layer):
    """A softmax over the samples of the batch."""

    def call(self, x):
        top = ops.stop_gradient(ops.max(bigbatch.cross_microbatch_gather(x), axis=0))
        parts = ops.exp(x - top)
        return parts / bigbatch.cross_microbatch_sum(ops.sum(parts, axis=0))


class Attention(layers.Layer):
    """Every sample looks at all samples."""

    def call(self, x):
        everybody = bigbatch.cross_microbatch_gather(x)
        return x + ops.softmax(x @ ops.transpose(everybody)) @ everybody


class LoadBalance(layers.Layer):
    """The loss that balances the experts of a switch transformer: a product of two means."""

    def call(self, x):
        probabilities = ops.softmax(x)
        chosen = ops.one_hot(ops.argmax(x, axis=-1), x.shape[-1], dtype=x.dtype)
        count = bigbatch.cross_microbatch_sum(ops.sum(ops.ones_like(x[:, 0])))
        density, proxy = (
            bigbatch.cross_microbatch_sum(ops.sum(one, axis=0)) / count
            for one in (chosen, probabilities)
        )
        self.add_loss(ops.sum(density * proxy))
        return x


def model_with(layer):
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(6, activation="tanh"),
            layer(),
            layers.Dense(5),
        ]
    )


@pytest.mark.parametrize("layer", [MinibatchStddev, BatchSoftmax, Attention, LoadBalance])
def test_a_layer_that_couples_samples(layer):
    case = case_of(lambda: model_with(layer))
    check_same(case.train(exactly()), case.train(), 1e-10)


@pytest.mark.matrix
def test_rows_of_several_replicas(mirrored):
    """24 samples are 12 + 12; of the last one the second replica has none."""
    case = case_of(lambda: model_with(Attention), x=IMAGES[:25], y=LABELS[:25])
    with mirrored.scope():
        found = case.train(exactly(microbatch_size=5))
    check_same(found, case.train(), 1e-10)


def test_without_sums_over_micro_batches_the_same_layer_differs(monkeypatch):
    case = case_of(lambda: model_with(MinibatchStddev))
    expected = case.train().training
    monkeypatch.setitem(vars(bigbatch), "cross_microbatch_sum", lambda x: x)
    unchecked = exactly(microbatch_size=MICROBATCH, check="off")
    assert differences(case.train(unchecked).training, expected, 1e-4)


def test_a_product_of_sums_given_to_add_loss_is_named_with_what_helps(monkeypatch):
    model = case_of(lambda: model_with(LoadBalance)).build(exactly("frozen"))
    monkeypatch.setitem(vars(bigbatch), "cross_microbatch_sum", lambda x: x)
    with pytest.warns(bigbatch.NotEqualWarning, match=r"LoadBalance.*cross_microbatch_sum"):
        model.fit(case_of(None).x, LABELS, batch_size=24, verbose=0)


def test_micro_batches_one_after_the_other_cannot_be_summed_over():
    model = case_of(lambda: model_with(MinibatchStddev)).build(exactly("pooled"))
    with pytest.raises(bigbatch.errors.ContextError, match='batch_norm="exact"'):
        model.fit(case_of(None).x, LABELS, batch_size=24, verbose=0)
