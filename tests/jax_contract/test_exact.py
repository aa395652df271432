"""On JAX, too, micro-batches run in stages, and their layers see the whole batch."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from keras import layers, ops

import bigbatch
from bigbatch.backends.jax.exact import moments
from bigbatch.errors import ArgumentError, ContextError
from comparison import check_same
from fit_cases import DENSE_X, Case

from problems import TOLERANCE, largest_difference
from stack import keras


class OverBatch(layers.Layer):
    """Normalises with sums over the batch, as people write it."""

    def build(self, shape):
        self.gain = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        total = bigbatch.cross_microbatch_sum
        count = total(ops.cast(ops.shape(x)[0], x.dtype))
        mean = total(ops.sum(x, 0)) / count
        variance = total(ops.sum(ops.square(x - mean), 0)) / count
        return self.gain * (x - mean) / ops.sqrt(variance + 1e-3)


class OwnStep(keras.Model):
    """Makes two updates, one after the other, each through dropout and statistics."""

    def __init__(self):
        super().__init__()
        self.hidden, self.norm = layers.Dense(4, "tanh"), OverBatch()
        self.dropout, self.out = layers.Dropout(0.3, seed=3), layers.Dense(3)

    def call(self, x, training=False):
        return self.out(self.dropout(self.norm(self.hidden(x)), training=training))

    def train_step(self, state, data):
        trainable, others, slots, metrics = state
        x, y = data

        def loss_of(trainable, others):
            y_pred, others = self.stateless_call(trainable, others, x, training=True)
            return self.compute_loss(x, y, y_pred), others

        for _ in range(2):
            differentiate = jax.value_and_grad(loss_of, has_aux=True)
            (loss, others), gradients = differentiate(trainable, others)
            trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        return {"loss": loss}, (trainable, others, slots, metrics)


def stacked(*inner):
    def make():
        hidden = [layer for one in inner for layer in (layers.Dense(4, "tanh"), one())]
        return keras.Sequential([keras.Input((5,)), *hidden, layers.Dense(3)])

    return make


def own_step():
    model = OwnStep()
    model(DENSE_X[:1])
    return model


def masked():
    """Statistics of what is not masked; Keras computes them in float32 on JAX."""
    x = inputs = keras.Input((5,))
    x = layers.ReLU()(layers.Concatenate()([x, layers.Rescaling(-1.0)(x)]))  # half is masked
    x = layers.Reshape((10, 1))(x)
    x = layers.TimeDistributed(layers.Dense(3, "tanh"))(layers.Masking()(x))
    x = layers.GlobalAveragePooling1D()(layers.BatchNormalization(momentum=0.6)(x))
    return keras.Model(inputs, layers.Dense(3)(x))


CASES = {
    "layers": Case(stacked(OverBatch, OverBatch, lambda: layers.Dropout(0.3, seed=1))),
    "two updates": Case(own_step),
    "batch normalisation": Case(stacked(layers.BatchNormalization, layers.BatchNormalization)),
    "masked": Case(masked),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("layers", "split"),
        ("layers", "window"),
        ("two updates", "split"),
        ("batch normalisation", "window"),
        ("masked", "split"),
    ],
)
def test_equals_the_full_batch(name, mode):
    case = CASES[name]
    check = "warn" if name == "layers" else "off"
    found = case.accumulate(mode, {"batch_norm": "exact", "check": check})
    check_same(found, case.train(), TOLERANCE["float32"])


def test_what_is_stored_changes_nothing():
    case = CASES["batch normalisation"]
    whole = case.train()
    for every, storage in (("all", "host"), (3, "device")):
        choice = bigbatch.ExactBatchNorm(checkpoint_every=every, storage=storage)
        found = case.accumulate("split", {"batch_norm": choice, "check": "off"})
        check_same(found, whole, TOLERANCE["float32"])


def test_statistics_of_micro_batches_are_found(monkeypatch):
    """The negative control: only the gradient of the statistics is that of a micro-batch."""
    total = moments.cross_microbatch_sum

    def wrong(value):
        return jax.lax.stop_gradient(total(value) - value) + value

    case = CASES["batch normalisation"]
    monkeypatch.setattr(moments, "cross_microbatch_sum", wrong)
    found = case.accumulate("split", {"batch_norm": "exact", "check": "off"})
    assert largest_difference(found.model, case.train().model) > 1e-4


def test_what_cannot_be_exact_is_refused():
    model = keras.Sequential([keras.Input((5,)), layers.BatchNormalization(), layers.Dense(3)])
    model.compile("sgd", "mse", run_eagerly=True)
    bigbatch.accumulate(model, microbatch_size=2, batch_norm="exact")
    with pytest.raises(ArgumentError, match="run_eagerly"):
        model.fit(DENSE_X[:8], np.zeros((8, 3)), batch_size=8, verbose=0)
    model = keras.Sequential([keras.Input((5,)), OverBatch(), layers.Dense(3)])
    model.compile("sgd", "mse")
    bigbatch.accumulate(model, microbatch_size=2)
    with pytest.raises(ContextError, match='batch_norm="exact"'):
        model.fit(DENSE_X[:8], np.zeros((8, 3)), batch_size=8, verbose=0)
