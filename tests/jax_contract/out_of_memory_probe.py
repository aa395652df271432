"""Train with less memory than a batch takes, in a process of its own; print what happened."""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import warnings
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import keras
import numpy as np

import bigbatch

X = np.random.default_rng(0).normal(size=(192, 64, 64, 3)).astype("float32")
Y = X[:, 0, 0, :1]
BATCH, FIRST, SPARE = 96, 96, 230 * 2**20


def build():
    keras.utils.set_random_seed(1)
    layers = keras.layers
    convolutions = [layers.Conv2D(64, 3, activation="relu", padding="same") for _ in range(2)]
    last = [layers.GlobalAveragePooling2D(), layers.Dropout(0.2), layers.Dense(1)]
    model = keras.Sequential([keras.Input((64, 64, 3)), *convolutions, *last])
    model.compile("adam", "mse")
    return model


def allow(more=None):
    """Let the process have so many bytes more than now, or as many as it likes."""
    size = re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())
    limit = resource.RLIM_INFINITY if more is None else int(size.group(1)) * 1024 + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def fit(model, **options):
    return model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0, **options)


class Limit(keras.callbacks.Callback):
    """Takes memory away when everything has been compiled that fits."""

    def on_train_begin(self, logs=None):
        allow(SPARE)


expected = build()
bigbatch.accumulate(expected, microbatch_size=8)
fit(expected)
model, found = build(), {}
if sys.argv[1] == "auto":
    bigbatch.accumulate(model, microbatch_size="auto")
    hooks = vars(model)["_bigbatch_hooks"]
    choose = hooks.make_train_function

    def make(force=False):
        made = choose(force)
        hooks.trainer.feed.size = FIRST  # as if memory had been taken away since it was chosen
        return made

    vars(model)["make_train_function"] = make
else:
    bigbatch.accumulate(model, microbatch_size=FIRST)
before = model.get_weights()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        fit(model, callbacks=[Limit()])
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
        found["weights are as before"] = all(map(np.array_equal, before, model.get_weights()))
allow()
found["warnings"] = [str(one.message) for one in caught if "bigbatch" in str(one.message)]
found["size"] = bigbatch.microbatch_size(model)
found["updates"] = int(model.optimizer.iterations)
pairs = zip(model.get_weights(), expected.get_weights())
found["difference"] = max(float(np.abs(one - two).max()) for one, two in pairs)
print(json.dumps(found))
