"""Time of `value_and_gradients` relative to the limit: the same passes without accumulation.

    python benchmarks/limit.py

The limit runs k forward and backward passes in one graph and keeps only the last gradients:
no accumulating library can be faster. Candidates are interleaved in one process; the figures
are ratios of medians, with the quartiles of the ratios in each round.
"""

from __future__ import annotations

import os
import platform
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from models import convolutional, transformer, wide

import bigbatch

MICROBATCH_SIZE, ROUNDS = 16, 15


def candidates(model):
    variables = model.trainable_variables

    def loss_fn(x, y):
        logits = model(x, training=True)
        return tf.reduce_mean(
            keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
        )

    @tf.function
    def limit(x, y):
        def body(index, _):
            rows = slice(index * MICROBATCH_SIZE, (index + 1) * MICROBATCH_SIZE)
            part = tf.ensure_shape(x[rows], [MICROBATCH_SIZE, *x.shape[1:]])
            with tf.GradientTape() as tape:
                loss = loss_fn(part, y[rows])
            return index + 1, tape.gradient(loss, variables)

        start = (tf.constant(0), [tf.zeros(variable.shape) for variable in variables])
        count = tf.shape(x)[0] // MICROBATCH_SIZE
        return tf.while_loop(lambda i, _: i < count, body, start, parallel_iterations=1)[1]

    @tf.function
    def accumulated(x, y):
        return bigbatch.value_and_gradients(
            loss_fn, variables, (x, y), microbatch_size=MICROBATCH_SIZE
        )

    return {"limit": limit, "value_and_gradients": accumulated}


def measure(model, k):
    samples = MICROBATCH_SIZE * k
    x = tf.random.normal([samples, *model.input_shape[1:]])
    y = tf.random.uniform([samples], 0, 10, tf.int32)
    functions = candidates(model)
    times = {name: [] for name in functions}
    for _ in range(ROUNDS + 2):
        for name, function in functions.items():
            start = time.perf_counter()
            tf.nest.map_structure(lambda tensor: tensor.numpy(), function(x, y))
            times[name].append(time.perf_counter() - start)
    limit, ours = (np.array(times[name][2:]) for name in functions)  # two rounds to warm up
    return np.median(ours) / np.median(limit), *np.percentile(ours / limit, [25, 75])


if __name__ == "__main__":
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores;", end=" ")
    print(f"TensorFlow {tf.__version__}, Keras {keras.__version__}; {ROUNDS} rounds")
    print("| model | k | time relative to the limit | quartiles |\n|---|---|---|---|")
    for make_model in (convolutional, transformer, wide):
        for k in (4, 16):
            keras.utils.set_random_seed(0)
            ratio, low, high = measure(make_model(), k)
            print(f"| {make_model.__name__} | {k} | {ratio:.3f} | {low:.3f} to {high:.3f} |")
