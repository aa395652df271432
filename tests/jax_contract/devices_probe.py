"""Train on several devices of a CPU with `keras.distribution`; print differences.

The first argument is the number of devices, the second a directory for compiled programs.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path

DEVICES, PROGRAMS = int(sys.argv[1]), Path(sys.argv[2])
os.environ["KERAS_BACKEND"] = "jax"
os.environ["XLA_FLAGS"] = (
    f"--xla_force_host_platform_device_count={DEVICES} "
    f"--xla_dump_to={PROGRAMS} --xla_dump_hlo_as_text "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

import keras
import numpy as np

import bigbatch

LENGTH = 12
COLLECTIVES = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
SEEN: set[Path] = set()
rng = np.random.default_rng(3)
X = rng.normal(size=(62, LENGTH, 4)).astype("float32")
Y = rng.normal(size=(62, LENGTH, 1)).astype("float32")
for row, end in enumerate(rng.integers(1, LENGTH + 1, 62)):
    X[row, end:] = 0  # masked


class Largest(keras.metrics.Metric):
    """A metric that is no sum over samples: devices cannot have their own."""

    def __init__(self):
        super().__init__(name="largest")
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        new = keras.ops.max(keras.ops.abs(y_pred))
        self.largest.assign(keras.ops.maximum(self.largest.value, new))

    def result(self):
        return self.largest.value


def train(size, metrics=(), *, masked=True, verbose=0, **setting):
    keras.utils.set_random_seed(1)
    layers = keras.layers
    inputs = keras.Input((LENGTH, 4))
    hidden = layers.Masking()(inputs) if masked else inputs
    hidden = layers.Dense(8, "tanh", kernel_regularizer="l2")(hidden)
    hidden = hidden if masked else layers.GlobalAveragePooling1D()(hidden)
    model = keras.Model(inputs, layers.Dense(1)(layers.Dropout(0.3)(hidden)))
    optimizer = keras.optimizers.Adam(1e-2, global_clipnorm=0.05)
    model.compile(optimizer, "mse", metrics=["mae", *metrics])
    if setting:
        bigbatch.accumulate(model, **setting)
    fit = {"batch_size": size, "epochs": 2, "shuffle": False, "verbose": verbose}
    history = model.fit(X, Y if masked else Y[:, 0], **fit).history
    assert not setting or len(model.trainable_variables[0].value.sharding.device_set) == DEVICES
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


expected = {
    "split": train(16),
    "odd": train(15),
    "streamed": train(16, masked=False),
    "no sum": train(16, [Largest()]),
}
devices = keras.distribution.list_devices()
keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
collectives()
found = {}
for name, size, setting in (
    ("split", 16, {"microbatch_size": 8}),  # 8 + 8, and 8 + 6 at the end
    ("odd", 15, {"microbatch_size": 7}),  # neither divides by the devices; 2 at the end
    # Added up batch by batch, as no denominator has to be known before.
    ("streamed", 8, {"accumulation_steps": 2, "masked": False}),
):
    found[name] = difference(train(size, **setting), expected[name])
    found[f"collectives of {name}"] = collectives()
with contextlib.redirect_stdout(io.StringIO()) as said:
    values = train(16, [Largest()], microbatch_size=8, verbose=2)
found["said"] = [line for line in said.getvalue().splitlines() if "reduced" in line]
found["no sum"] = difference(values, expected["no sum"])
found["collectives of no sum"] = collectives()
found["half the batch"] = difference(train(8, microbatch_size=4), expected["split"])
mesh = keras.distribution.DeviceMesh((1, DEVICES), ("batch", "model"), devices)
layouts = keras.distribution.LayoutMap(mesh)
layouts[".*/kernel"] = "model", None  # rows of the kernels: four and eight
keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layouts))
found["parts of weights"] = difference(train(16, microbatch_size=8), expected["split"])
print(json.dumps(found))
