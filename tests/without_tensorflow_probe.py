"""Trains with bigbatch on torch where neither TensorFlow nor JAX can be imported.

Run by `tests/torch_contract/test_torch_fit.py`; prints the largest difference from plain Keras.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

os.environ["KERAS_BACKEND"] = "torch"
MISSING = ("tensorflow", "tf_keras", "jax")


class Hidden:
    """Finds what is installed, but for `MISSING`."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Return where a module is, or `None`."""
        if name.split(".")[0] in MISSING:
            return None
        return PathFinder.find_spec(name, path, target)


sys.meta_path[:] = [Hidden if finder is PathFinder else finder for finder in sys.meta_path]
for missing in MISSING:
    try:
        __import__(missing)
    except ModuleNotFoundError:
        continue
    sys.exit(f"{missing} can be imported")

import keras
import numpy as np

import bigbatch

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(50, 5)), rng.normal(size=(50, 3))


def build():
    """Return a model to train."""
    keras.utils.set_random_seed(3)
    hidden = [keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.2)]
    model = keras.Sequential([keras.Input((5,)), *hidden, keras.layers.Dense(3)])
    model.compile("adam", "mse", metrics=["mae"])
    return model


options = {"batch_size": 21, "epochs": 2, "shuffle": False, "verbose": 0}
expected = build()
expected.fit(X, Y, **options)
model = bigbatch.accumulate(build(), microbatch_size=8)
model.fit(X, Y, callbacks=[bigbatch.NoiseScale(), bigbatch.Monitor()], **options)
assert bigbatch.verify(build(), X, Y, microbatch_size=8, verbose=False).ok
assert bigbatch.plan(build(), X, Y, batch_size=50, verbose=False).microbatch_size == 50
pairs = zip(model.get_weights(), expected.get_weights())
print(max(float(np.max(np.abs(one - two))) for one, two in pairs))
