"""A custom `train_step` whose loss is a sum over samples: found by trying, and added up."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from apply_cases import Gan, case_of, gradients_of
from bigbatch.core.outcome import GRADIENT, LOG, Item, Outcome, sums_among
from bigbatch.engine import self_check
from comparison import check_same
from fit_cases import BATCH, Case

from stack import IS_KERAS_3, keras

pytestmark = pytest.mark.skipif(not IS_KERAS_3, reason="the programs are written for Keras 3")
layers = keras.layers
EXACT = 1e-12
"""In float64: the same sums in another order, over a few updates."""
X = np.random.default_rng(3).integers(0, 6, (50, 4))
Y = np.random.default_rng(4).normal(size=(50, 1))


class Summed(keras.Model):
    """The step of many tutorials, with `compute_average_loss`: a sum, divided by a constant."""

    def __init__(self, rate=0.3):
        super().__init__()
        self.table, self.hidden = layers.Embedding(6, 3), layers.Dense(4, "tanh")
        self.dropout, self.out = layers.Dropout(rate, seed=1), layers.Dense(1)
        self.summed = keras.metrics.Mean(name="summed")
        self.error = keras.metrics.MeanAbsoluteError(name="error")

    @property
    def metrics(self):
        return [self.summed, self.error]

    def call(self, x, training=False):
        hidden = self.hidden(tf.reduce_mean(self.table(x), 1))
        return self.out(self.dropout(hidden, training=training))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            z = self(x, training=True)
            each = tf.reduce_mean(tf.square(y - z), -1)
            loss = tf.nn.compute_average_loss(each, global_batch_size=BATCH)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        self.summed.update_state(loss)
        self.error.update_state(y, z)
        mean = tf.reduce_mean(each)
        return {"loss": self.summed.result(), "error": self.error.result(), "mean": mean}


class SummedGan(Gan):
    """Updates that depend on each other: the first of a sum, the second of a mean."""

    def train_step(self, data):
        real, code = data
        with tf.GradientTape() as tape:
            fake, true = self.critic(self.generator(code)), self.critic(real)
            of_critic = tf.reduce_sum(tf.nn.softplus(fake) + tf.nn.softplus(-true))
        self.of_critic.apply(*gradients_of(tape, of_critic, self.critic))
        with tf.GradientTape() as tape:
            fake = self.critic(self.generator(code))
            of_generator = tf.reduce_mean(tf.nn.softplus(-fake))
        self.of_generator.apply(*gradients_of(tape, of_generator, self.generator))
        return {"critic": of_critic, "generator": of_generator}


def summed(rate=0.3):
    return Case(lambda: Summed(rate), x=X, y=Y, loss=None)


def test_sums_add_up(mode, float64):
    check_same(summed().accumulate(mode), summed().train(), EXACT)


def test_on_replicas(mode, float64, mirrored):
    # Without draws, of which Keras makes the same on every replica.
    with mirrored.scope():
        found = summed(rate=0.0).accumulate(mode)
    check_same(found, summed(rate=0.0).train(), EXACT)


def test_compiled_by_xla(float64):
    case = summed().compiled(jit_compile=True)
    check_same(case.accumulate("split"), case.train(), EXACT)


def test_loss_scaling(mode):
    def case():
        def optimizer():
            return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), 2.0)

        return Case(Scaled, x=X, y=Y, loss=None, optimizer=optimizer)

    class Scaled(Summed):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(y - self(x, training=True)))
                scaled = self.optimizer.scale_loss(loss)
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(scaled, variables), variables)
            return {"loss": loss}

    # float32: sums of 21 samples in another order, a few updates.
    check_same(case().accumulate(mode), case().train(), 5e-6)


def test_in_updates_that_depend_on_each_other(mode, float64):
    case = case_of("gan", SummedGan)
    check_same(case.accumulate(mode, epochs=1), case.train(epochs=1), EXACT)


def test_a_sum_taken_for_a_mean_is_found(float64, monkeypatch):
    """The negative control."""
    monkeypatch.setattr(self_check, "sums_among", lambda *_: (set(), set()))
    with pytest.warns(bigbatch.NotEqualWarning, match="divides by something other"):
        found = summed().accumulate("split")
    with pytest.raises(AssertionError, match="not the same"):
        check_same(found, summed().train(), 1e-3)


def outcome(*gradients, **logs):
    return Outcome([[("kernel", one)] for one in gradients], logs, {})


def test_sums_are_told_from_means():
    first, second, share = np.array([3.0, 1.0]), np.array([2.0, -4.0]), 0.6
    mean = share * first + (1 - share) * second
    found = {Item(GRADIENT, "kernel"): 1.0, Item(LOG, "sum"): 1.0, Item(LOG, "max"): 1.0}
    cut = outcome(mean, mean, sum=mean[0], max=mean[1])
    whole = outcome(first + second, mean, sum=5.0, max=1.0)
    part = outcome(first, first, sum=3.0, max=1.0)
    assert sums_among(found, whole, cut, part, share, 1e-9) == ({0}, {"sum"})


def test_rows_of_the_same_index_are_added_before_they_are_compared():
    rows = (np.array([[1.0], [2.0], [4.0]]), np.array([2, 0, 2]))
    cut = (rows[0] * [[2 / 3], [2 / 3], [1 / 3]], rows[1])
    first = (rows[0][:2], rows[1][:2])
    found = {Item(GRADIENT, "kernel"): 1.0}
    sums = sums_among(found, outcome(rows), outcome(cut), outcome(first), 2 / 3, 1e-9)
    assert sums == ({0}, set())
