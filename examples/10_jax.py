"""Gradient accumulation in Keras 3 on JAX with the same line; TensorFlow need not be installed.

pip install "bigbatch[jax]"
KERAS_BACKEND=jax python 10_jax.py
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import bigbatch

BATCH, MICROBATCH = 256, 48  # 256 = 5 × 48 + 16: the last micro-batch is short

rng = np.random.default_rng(0)
x = rng.normal(size=(1000, 32)).astype("float32")
y = (x[:, 0] * x[:, 1] > 0).astype("int32")


def train(microbatch_size=None):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(64, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((32,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.AdamW(1e-2, global_clipnorm=1.0)
    model.compile(optimizer, loss, metrics=["accuracy"])
    if microbatch_size:
        bigbatch.accumulate(model, microbatch_size=microbatch_size)
    history = model.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0)
    return model, history.history


accumulated, logs = train(MICROBATCH)
full, expected = train()
pairs = zip(accumulated.get_weights(), full.get_weights())
difference = max(float(np.abs(one - two).max()) for one, two in pairs)
print(f"backend: {keras.backend.backend()}, updates: {int(accumulated.optimizer.iterations)}")
print(f"loss with micro-batches {logs['loss'][-1]:.6f}, full batch {expected['loss'][-1]:.6f}")
print(f"largest difference of a weight: {difference:.1e}")
assert difference < 1e-5
