"""`NoiseScale` and `Monitor` on JAX; what is not there yet says so."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
import numpy as np

import bigbatch
from bigbatch.core.noise import NoiseScaleEstimator

rng = np.random.default_rng(0)
X = rng.normal(size=(70, 6)).astype("float32")
Y = rng.normal(size=(70, 2)).astype("float32")
PARTS = [[(0, 10), (10, 20), (20, 30), (30, 35)], [(35, 45), (45, 55), (55, 65), (65, 70)]]


def build():
    keras.utils.set_random_seed(2)
    layers = [keras.layers.Dense(5, "tanh"), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def expected_estimate():
    model, estimator = build(), NoiseScaleEstimator()
    weights = [one.value for one in model.trainable_variables]

    @jax.jit
    def gradients(weights, x, y):
        def loss(weights):
            return jnp.mean(jnp.square(model.stateless_call(weights, [], x)[0] - y))

        return jax.grad(loss)(weights)

    def squared_norm(arrays):
        return sum(float(np.sum(np.square(np.asarray(one, "float64")))) for one in arrays)

    for parts in PARTS:
        norms = [squared_norm(gradients(weights, X[a:b], Y[a:b])) for a, b in parts]
        first, last = parts[0][0], parts[-1][1]
        whole = gradients(weights, X[first:last], Y[first:last])
        estimator.add([b - a for a, b in parts], norms, squared_norm(whole))
        weights = [one - 0.01 * gradient for one, gradient in zip(weights, whole)]
    return estimator.estimate


def test_the_estimate_is_that_of_plain_gradients():
    model, noise = build(), bigbatch.NoiseScale()
    bigbatch.accumulate(model, microbatch_size=10)
    callbacks = [noise, bigbatch.Monitor()]
    history = model.fit(X, Y, batch_size=35, shuffle=False, verbose=0, callbacks=callbacks)
    expected = expected_estimate()
    assert noise.estimate.updates == expected.updates == 2
    np.testing.assert_allclose(noise.estimate.average, expected.average, rtol=1e-3)
    assert history.history["micro_batches"] == [8]
    assert history.history["effective_batch_size"] == [35]
