"""Promise 6: the optimizer sees the sum over all replicas, once, or skips it on all of them."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from bigbatch.backends.tensorflow import v1_optimizers
from replica_cases import on_each_replica

from stack import HAS_LEGACY, gradients_for, keras, loss_scale, new_optimizers, with_loss_scale


@pytest.mark.parametrize("kind", ["v1", "new", "legacy"] if HAS_LEGACY else ["v1"])
def test_no_optimizer_sums_gradients_that_are_sums(mirrored, kind, monkeypatch):
    make = {
        "v1": lambda: tf.compat.v1.train.GradientDescentOptimizer(1.0),
        "new": lambda: new_optimizers().SGD(1.0),
        "legacy": lambda: keras.optimizers.legacy.SGD(1.0),
    }[kind]

    def update():
        with mirrored.scope():
            w = tf.Variable(0.0)
            accumulator = bigbatch.GradientAccumulator(make(), [w])
        tf.function(lambda: mirrored.run(lambda: accumulator.accumulate([tf.constant(1.0)])))()
        accumulator.flush()
        return [float(replica) for replica in mirrored.experimental_local_results(w)]

    assert update() == [-1.0, -1.0]
    if kind == "v1":  # those of Keras 2 fail, or have it right, if they are not told
        whole = lambda variable, gradient, share: gradient * 1.0  # noqa: E731
        monkeypatch.setattr(v1_optimizers, "as_gradient_of", whole)
        assert update() == [-2.0, -2.0]


@pytest.mark.parametrize("kind", ["new", "legacy"] if HAS_LEGACY else ["new"])
@pytest.mark.parametrize("bad_replica", [0, 1])
def test_not_finite_on_any_replica_skips_the_update_everywhere(mirrored, bad_replica, kind):
    with mirrored.scope():
        w = tf.Variable([1.0, 2.0])
        module = new_optimizers() if kind == "new" else keras.optimizers.legacy
        optimizer = with_loss_scale(module.SGD(1.0), initial_scale=8.0)
        accumulator = bigbatch.GradientAccumulator(optimizer, [w], accumulation_steps=1)

    def replica_fn(factor):
        accumulator.accumulate(gradients_for(optimizer, lambda: tf.reduce_sum(w * factor), [w]))

    @tf.function
    def micro_batch(factor):
        mirrored.run(replica_fn, args=(factor,))

    factors = [1.0, 1.0]
    factors[bad_replica] = float("inf")
    micro_batch(on_each_replica(mirrored, factors))
    accumulator.apply_when_full()
    np.testing.assert_array_equal(w.numpy(), [1.0, 2.0])
    assert loss_scale(optimizer) == 4.0
    micro_batch(on_each_replica(mirrored, [1.0, 3.0]))
    accumulator.apply_when_full()
    for replica in mirrored.experimental_local_results(w):
        np.testing.assert_allclose(replica, [-1.0, 0.0])
