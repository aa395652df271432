"""Train on JAX where TensorFlow cannot be imported; print what was loaded."""

from __future__ import annotations

import json
import os
import sys

os.environ["KERAS_BACKEND"] = "jax"


class Blocker:
    """Makes an import of TensorFlow fail, as if it was not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tensorflow", "tf_keras"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if "tensorflow" not in sys.argv:  # the negative control
    sys.meta_path.insert(0, Blocker())

import keras
import numpy as np

import bigbatch

rng = np.random.default_rng(0)
x, y = rng.normal(size=(50, 5)).astype("float32"), rng.normal(size=(50, 3)).astype("float32")


def train(size, **setting):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.3), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((5,)), *layers])
    model.compile("adam", "mse", metrics=["mae"])
    if setting:
        bigbatch.accumulate(model, **setting)
    model.fit(x, y, batch_size=size, shuffle=False, verbose=0)
    return model.get_weights()


expected = train(21)
found = {
    mode: max(float(np.abs(a - b).max()) for a, b in zip(train(size, **setting), expected))
    for mode, size, setting in (
        ("split", 21, {"microbatch_size": 8}),
        ("window", 7, {"accumulation_steps": 3}),
    )
}
try:
    import tensorflow  # noqa: F401

    found["tensorflow"] = True
except ModuleNotFoundError:
    found["tensorflow"] = "tensorflow" in sys.modules
print(json.dumps(found))
