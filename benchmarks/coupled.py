"""What a coupled loss costs: time per update in `fit`, relative to plain accumulation.

    python benchmarks/coupled.py

An exact coupled loss needs one more forward pass: three passes' worth of work become four.
Candidates are interleaved in one process. Writes `benchmarks/results/coupled.md`.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import platform
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from fit import time_of_epoch
from models import convolutional, transformer

import bigbatch

MICROBATCH_SIZE, K, UPDATES, ROUNDS = 16, 8, 2, 9
RESULTS = Path(__file__).parent / "results"


def contrastive(_, outputs):
    """InfoNCE between the halves of each row."""
    one, two = tf.split(tf.math.l2_normalize(outputs, -1), 2, axis=-1)
    logits = tf.matmul(one, two, transpose_b=True) / 0.1
    labels = tf.range(tf.shape(logits)[0])
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def measure(make_model, jit_compile):
    """Return the ratios of the time with `coupled=True` to that without, round by round."""
    models = []
    for coupled in (False, True):
        model = make_model()
        model.compile(keras.optimizers.Adam(1e-4), contrastive, jit_compile=jit_compile)
        models.append(
            bigbatch.accumulate(model, microbatch_size=MICROBATCH_SIZE, coupled=coupled)
        )
    batch = MICROBATCH_SIZE * K
    shape = (batch * UPDATES, *models[0].input_shape[1:])
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    y = np.zeros(len(x), "int32")
    times = np.array(
        [
            [time_of_epoch(model, x, y, batch_size=batch) for model in models]
            for _ in range(ROUNDS + 1)  # the first traces
        ]
    )[1:]
    return times[:, 1] / times[:, 0]


if __name__ == "__main__":
    lines = [
        "# What a coupled loss costs",
        "",
        f"`python benchmarks/coupled.py`, {platform.machine()}, {os.cpu_count()} cores, "
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}, micro-batches of "
        f"{MICROBATCH_SIZE}, k = {K}, {ROUNDS} rounds. Time per update in `fit`, split mode, "
        "with `coupled=True` relative to without. GPUs were not measured.",
        "",
        "| encoder | relative to plain accumulation | quartiles |",
        "|---|---|---|",
    ]
    print("\n".join(lines))
    for name, make_model, jit_compile in (
        ("convolutional", convolutional, False),
        ("transformer", transformer, False),
        ("transformer, jit_compile", transformer, True),
    ):
        ratios = measure(make_model, jit_compile)
        low, middle, high = np.percentile(ratios, [25, 50, 75])
        lines.append(f"| {name} | {middle:.2f} | {low:.2f} to {high:.2f} |")
        print(lines[-1])
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "coupled.md").write_text("\n".join(lines) + "\n")
    print("wrote benchmarks/results/coupled.md")
