"""Train on two devices of a CPU with `keras.distribution.DataParallel`; print differences."""

from __future__ import annotations

import json
import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import keras
import numpy as np

import bigbatch

LENGTH = 12
rng = np.random.default_rng(3)
X = rng.normal(size=(62, LENGTH, 4)).astype("float32")
Y = rng.normal(size=(62, LENGTH, 1)).astype("float32")
for row, end in enumerate(rng.integers(1, LENGTH + 1, 62)):
    X[row, end:] = 0  # masked


def train(size, **setting):
    keras.utils.set_random_seed(1)
    layers = keras.layers
    inputs = keras.Input((LENGTH, 4))
    hidden = layers.Dense(8, "tanh", kernel_regularizer="l2")(layers.Masking()(inputs))
    model = keras.Model(inputs, layers.Dense(1)(layers.Dropout(0.3)(hidden)))
    model.compile(keras.optimizers.Adam(1e-2, global_clipnorm=0.05), "mse", metrics=["mae"])
    if setting:
        bigbatch.accumulate(model, **setting)
    history = model.fit(X, Y, batch_size=size, epochs=2, shuffle=False, verbose=0).history
    return [*model.get_weights(), *map(np.asarray, history.values())], model


expected, _ = train(16)
devices = keras.distribution.list_devices()
keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
found = {}
for name, size, setting in (
    ("split", 16, {"microbatch_size": 6}),  # 6 + 6 + 4, and 6 + 6 + 2 at the end
    ("odd", 16, {"microbatch_size": 5}),  # does not divide by the devices
    ("window", 8, {"accumulation_steps": 2}),
):
    values, model = train(size, **setting)
    found[name] = max(float(np.abs(a - b).max()) for a, b in zip(values, expected))
    found["devices"] = len(model.trainable_variables[0].value.sharding.device_set)
wrong, _ = train(8)
found["half the batch"] = max(float(np.abs(a - b).max()) for a, b in zip(wrong, expected))
print(json.dumps(found))
