"""A batch that does not fit, on a device with little memory, and the line that makes it fit.

The same script runs three times: without a limit, with a limit of 100 MB, and with the limit
and one more line. The limit is real: the CPU uses TensorFlow's allocator for GPUs.
"""

import os
import subprocess
import sys

LIMIT = 100  # MB

if len(sys.argv) == 1:
    for name, line, limit in (
        ("no limit", "", None),
        (f"{LIMIT} MB", "", LIMIT),
        (f"{LIMIT} MB, auto", "auto", LIMIT),
    ):
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        environment["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
        if limit:
            environment["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(limit)
        done = subprocess.run(
            [sys.executable, __file__, "train", line],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        last = (done.stdout.splitlines() or done.stderr.splitlines() or [""])[-1]
        print(f"{name:16}{last}")
    sys.exit()

import keras
import numpy as np
import tensorflow as tf

import bigbatch

keras.utils.set_random_seed(0)
convolutions = [keras.layers.Conv2D(16, 3, padding="same", activation="relu") for _ in range(3)]
model = keras.Sequential(
    [
        keras.Input((24, 24, 3)),
        *convolutions,
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(10),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(1e-2), loss)
if sys.argv[2] == "auto":
    bigbatch.accumulate(model, microbatch_size="auto")  # the line
x = np.random.default_rng(0).normal(size=(1024, 24, 24, 3)).astype("float32")
x += (np.arange(1024) % 10)[:, None, None, None] / 10  # something to learn
try:
    history = model.fit(x, np.arange(1024) % 10, batch_size=512, epochs=3, verbose=0)
except tf.errors.ResourceExhaustedError:
    print("out of memory")
else:
    micro = bigbatch.microbatch_size(model) or 512
    print(f"loss {history.history['loss'][-1]:.6f}, micro-batches of {micro}")
