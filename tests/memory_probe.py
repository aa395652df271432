"""Run in a process of its own: prints as JSON the allocator bytes that accumulation takes.

One thread runs the operations, so that the peak is the same to the byte in every run.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"

import keras
import numpy as np
import tensorflow as tf

import bigbatch

tf.config.threading.set_inter_op_parallelism_threads(1)
MICROBATCH_SIZE = 16


def current() -> int:
    return tf.config.experimental.get_memory_info("CPU:0")["current"]


def peak(function, *arguments) -> int:
    """Return the bytes `function` takes at most, its results included."""
    function(*arguments)
    function(*arguments)
    tf.config.experimental.reset_memory_stats("CPU:0")
    before = current()
    function(*arguments)
    return tf.config.experimental.get_memory_info("CPU:0")["peak"] - before


def parameter_bound():
    layers = [keras.layers.Dense(1500, "relu") for _ in range(3)]
    return keras.Sequential([keras.Input((256,)), *layers, keras.layers.Dense(10)]), (256,)


def activation_bound():
    layers = [keras.layers.Dense(128, "relu") for _ in range(3)]
    model = [keras.Input((400, 8)), *layers, keras.layers.GlobalAveragePooling1D()]
    return keras.Sequential([*model, keras.layers.Dense(10)]), (400, 8)


def value_and_gradients(make_model) -> dict:
    model, shape = make_model()
    variables = model.trainable_variables

    def loss_fn(x, y):
        return tf.reduce_mean(
            keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True)
        )

    @tf.function(reduce_retracing=True)
    def one_microbatch(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(x, y)
        return loss, tape.gradient(loss, variables)

    @tf.function(reduce_retracing=True)
    def accumulated(x, y):
        return bigbatch.value_and_gradients(
            loss_fn, variables, (x, y), microbatch_size=MICROBATCH_SIZE
        )

    def batch(k):
        samples = MICROBATCH_SIZE * k
        return tf.zeros([samples, *shape]), tf.zeros([samples], tf.int32)

    measured = {
        "gradient_set": sum(4 * int(np.prod(v.shape)) for v in variables),
        "one_microbatch": peak(one_microbatch, *batch(1)),
    }
    small, large = batch(2), batch(3)
    before = current()
    accumulated(*small), accumulated(*large)  # the second trace serves every size
    measured["resident"] = current() - before
    del small, large
    measured["accumulated"] = {k: peak(accumulated, *batch(k)) for k in (2, 4, 16, 64)}
    eagerly = lambda x, y: accumulated.python_function(x, y)  # noqa: E731
    measured["eager"] = {k: peak(eagerly, *batch(k)) for k in (1, 8)}
    measured["full_batch"] = peak(one_microbatch, *batch(64))
    return measured


def sparse_accumulator() -> dict:
    table = tf.Variable(tf.zeros([200_000, 32]))
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([table])
    before = current()
    accumulator = bigbatch.GradientAccumulator(optimizer, [table], accumulation_steps=8)

    @tf.function
    def micro_batch(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.gather(table, ids))
        accumulator.accumulate(tape.gradient(loss, [table]), weight=tf.shape(ids)[0])

    tf.config.experimental.reset_memory_stats("CPU:0")
    for start in range(0, 1600, 100):
        micro_batch(tf.range(start, start + 100))
        accumulator.apply_when_full()
    highest = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    return {"table": 200_000 * 32 * 4, "extra": highest - before}


PROBES = {
    "parameter_bound": lambda: value_and_gradients(parameter_bound),
    "activation_bound": lambda: value_and_gradients(activation_bound),
    "sparse_accumulator": sparse_accumulator,
}

if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]]()))
