"""One of several processes that train together with `jax.distributed`; prints the results.

The first argument is the number of devices of this process, the second a directory for compiled
programs, the others name what to train. Started by `workers/cluster.py`, which says in
`TF_CONFIG` who the others are.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections import Counter
from pathlib import Path

config = json.loads(os.environ["TF_CONFIG"])
PROCESSES, PROCESS = len(config["cluster"]["worker"]), config["task"]["index"]
PROGRAMS = Path(sys.argv[2]) / str(PROCESS)
os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_ENABLE_X64"] = "1"
os.environ["XLA_FLAGS"] = (
    f"--xla_force_host_platform_device_count={sys.argv[1]} "
    f"--xla_dump_to={PROGRAMS} --xla_dump_hlo_as_text "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

import keras
import numpy as np

import bigbatch

keras.distribution.initialize(config["cluster"]["worker"][0], PROCESSES, PROCESS)
keras.config.set_floatx("float64")
LENGTH, BATCH = 6, 16
COLLECTIVES = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
rng = np.random.default_rng(3)
X = rng.normal(size=(44, LENGTH, 3))  # two batches, and a tail of 12
Y = rng.normal(size=(44, LENGTH, 1))
W = rng.uniform(0.5, 2.0, size=44)
for row, end in enumerate(rng.integers(1, LENGTH + 1, 44)):
    X[row, end:] = 0  # masked
SEEN: set[Path] = set()


class Largest(keras.metrics.Metric):
    """A metric that is no sum over samples: processes cannot have their own."""

    def __init__(self):
        super().__init__(name="largest")
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        new = keras.ops.cast(keras.ops.max(keras.ops.abs(y_pred)), self.largest.dtype)
        self.largest.assign(keras.ops.maximum(self.largest.value, new))

    def result(self):
        return self.largest.value


def own(array, part):
    """Return the rows of this process, of batches that are put together from parts."""
    if keras.distribution.distribution() is None:
        return array
    rows = []
    for start in range(0, len(array), PROCESSES * part):
        batch = array[start : start + PROCESSES * part]
        size = len(batch) // PROCESSES
        rows.append(batch[PROCESS * size : (PROCESS + 1) * size])
    return np.concatenate(rows)


def train(size, *, masked=True, reduction="mean", metrics=(), **setting):
    keras.utils.set_random_seed(1)
    layers = keras.layers
    inputs = keras.Input((LENGTH, 3))
    hidden = layers.Masking()(inputs) if masked else inputs
    hidden = layers.Dense(8, "relu", kernel_regularizer="l2")(hidden)
    hidden = hidden if masked else layers.GlobalAveragePooling1D()(hidden)
    model = keras.Model(inputs, layers.Dense(1)(layers.Dropout(0.3)(hidden)))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5)
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    model.compile(optimizer, loss, metrics=["mae", *metrics])
    if setting:
        bigbatch.accumulate(model, **setting)
    data = [own(X, size), own(Y if masked else Y[:, 0], size)]
    if masked:
        history = model.fit(*data, batch_size=size, shuffle=False, verbose=0).history
        model.train_on_batch(data[0][:size], data[1][:size])
    else:  # of unknown length: the last window is closed when the epoch is over
        data.append(own(W, size))
        starts = range(0, len(data[0]), size)
        batches = (tuple(one[start : start + size] for one in data) for start in starts)
        history = model.fit(batches, verbose=0).history
    return [*model.get_weights(), *map(np.asarray, history.values())]


def difference(values, expected):
    return max(float(np.abs(a - b).max()) for a, b in zip(values, expected))


def collectives():
    """Return how many collectives each program has that was compiled since the last call."""
    found: Counter[str] = Counter()
    for path in sorted({*PROGRAMS.glob("*after_optimizations.txt")} - SEEN):
        SEEN.add(path)
        name = re.sub(r"^module_\d+\.jit_+(\w+?)\..*", r"\1", path.name)
        found[name] += len(
            re.findall(rf" = .* (?:{COLLECTIVES})(?:-start)?\(", path.read_text())
        )
    return {name: count for name, count in found.items() if count or "add" in name}


def main():
    cases = {
        "split": {},  # a loss that divides by a mask
        "streamed": {"masked": False},
        "summed": {"masked": False, "reduction": "sum"},
    }
    cases = {name: cases[name] for name in sys.argv[3:]}
    expected = {name: train(BATCH, **case) for name, case in cases.items()}
    smaller = train(11)
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(
            devices=keras.distribution.list_devices(), auto_shard_dataset=False
        )
    )
    part = BATCH // PROCESSES
    found = {
        "processes": PROCESSES,
        "smaller batch": difference(smaller, expected["split"]),  # the negative control
        "plain": difference(train(part), expected["split"]),
    }
    settings = {
        "split": (part, {"microbatch_size": 3}),
        "streamed": (part // 4, {"accumulation_steps": 4, "check": "off"}),
        "summed": (part, {"microbatch_size": 5, "check": "off"}),
    }
    for name in cases:
        size, setting = settings[name]
        collectives()
        found[name] = difference(train(size, **cases[name], **setting), expected[name])
        found[f"collectives of {name}"] = collectives()
    try:
        train(part, metrics=[Largest()], microbatch_size=3)
    except Exception as error:
        found["error"] = str(error)
    return found


with warnings.catch_warnings():
    warnings.simplefilter("error", bigbatch.NotEqualWarning)
    print(json.dumps(main()))
