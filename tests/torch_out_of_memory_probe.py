"""Trains on torch in a process with little address space: a real allocator that fails.

Run by `tests/torch_contract/test_torch_out_of_memory.py`; prints one line of JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import sys
import warnings
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch

import bigbatch

torch.set_num_threads(1)
layers = keras.layers
X = np.random.default_rng(0).normal(size=(64, 48, 48, 3)).astype("float32")
Y = X[:, 0, 0, :1]


LIMIT = 60 * 2**20
"""Less than the whole batch takes: an output of the first layer alone has 19 MB."""


def build():
    """Return a model of which the whole batch takes some hundred megabytes."""
    keras.utils.set_random_seed(1)
    hidden = [
        layers.Conv2D(32, 3, activation="relu", padding="same"),
        layers.Dropout(0.1),
        layers.Conv2D(32, 3, activation="relu", padding="same"),
        layers.GlobalAveragePooling2D(),
    ]
    model = keras.Sequential([keras.Input(X.shape[1:]), *hidden, layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def limit(extra):
    """Let the process map so many bytes more, or as many as it likes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or what was freed is there to be used again
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = -1 if extra is None else pages * resource.getpagesize() + extra
    resource.setrlimit(resource.RLIMIT_AS, (size, -1))


def values(model):
    """Return everything that training changes."""
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return [np.array(one.numpy()) for one in variables]


def largest(some, others):
    """Return the largest difference."""
    return max(float(np.max(np.abs(a - b), initial=0)) for a, b in zip(some, others))


def full_batch(weights, slots):
    """Return a model that plain Keras has trained on the whole batch, and its logs."""
    random = torch.get_rng_state()
    plain = build()
    plain.set_weights(weights)
    plain.optimizer.build(plain.trainable_variables)
    for variable, value in zip(plain.optimizer.variables, slots):
        variable.assign(value)
    torch.set_rng_state(random)
    return plain, plain.train_on_batch(X, Y, return_dict=True)


def main(what):
    """Run one experiment; print what it found."""
    model = bigbatch.accumulate(build(), microbatch_size=64 if what == "fixed" else "auto")
    model.train_on_batch(X[:2], Y[:2])  # what is made only once is there
    if what != "fixed":  # a size to be chosen now, or chosen when there was more memory
        size = None if what == "auto" else 64
        vars(model)["_bigbatch_hooks"].trainer.feed.size = size
    model.reset_metrics()
    state, random = values(model), torch.get_rng_state()
    weights, slots = model.get_weights(), [one.numpy() for one in model.optimizer.variables]
    # Before the limit: what oneDNN could not create once, it does not try to create again.
    plain, expected = full_batch(weights, slots)
    torch.set_rng_state(random)
    limit(LIMIT)
    result = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            logs = model.train_on_batch(X, Y, return_dict=True)
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"
    limit(None)
    result["warnings"] = [str(one.message) for one in caught if one.category is UserWarning]
    result["size"] = bigbatch.microbatch_size(model)
    if "error" in result:
        result["changed"] = largest(values(model)[: len(state)], state)
        result["random"] = bool(torch.equal(random, torch.get_rng_state()))
    else:
        result["difference"] = largest(model.get_weights(), plain.get_weights())
        result["difference of logs"] = max(abs(logs[name] - expected[name]) for name in logs)
        result["iterations"] = int(model.optimizer.iterations.numpy())
    print(json.dumps(result))


main(sys.argv[1])
