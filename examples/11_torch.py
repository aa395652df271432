"""Keras on torch: `fit` with a batch of 256 and 64 samples on the device at a time.

TensorFlow need not be installed. The script trains the same model with the full batch, too: the
weights are equal up to rounding, with dropout, clipping and a short last batch.
"""

import os

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported

import keras
import numpy as np
from sklearn.datasets import load_digits

import bigbatch

BATCH, MICROBATCH, EPOCHS = 256, 64, 2

x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32").reshape(-1, 8, 8, 1)


def build():
    """Return a small convolutional net, the same each time."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=1.0)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


full_batch = build()
full_batch.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=2)

accumulated = bigbatch.accumulate(build(), microbatch_size=MICROBATCH)
accumulated.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=2)

pairs = zip(full_batch.get_weights(), accumulated.get_weights())
difference = max(float(np.abs(one - other).max()) for one, other in pairs)
updates = int(accumulated.optimizer.iterations.numpy())
print(f"{updates} updates; weights differ by {difference:.0e}")
