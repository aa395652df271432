"""Run in a process of its own: prints as JSON the allocator bytes that accumulation takes.

One thread runs the operations: in a loop the peak is the same to the byte in every run, in
`fit` but for one activation, that is there or not yet when another goes.
"""

from __future__ import annotations

import gc
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


def layers_of_one_size():
    """The allocator hands out up to twice what is asked for, unless it has the very size."""
    layers = [keras.layers.Dense(1024, "relu") for _ in range(6)]
    return keras.Sequential([keras.Input((1024,)), *layers, keras.layers.Dense(10)]), (1024,)


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


def fit(make_model) -> dict:
    """Train with `fit`; the data set is not counted, as it is not with any batch size."""

    def compiled():
        model, shape = make_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
        return model, shape

    def peak_of_fit(setting, samples, batch_size) -> int:
        model, shape = compiled()
        x, y = tf.zeros([samples, *shape]), tf.zeros([samples], tf.int32)
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)
        if setting:
            bigbatch.accumulate(model, **setting)
        gc.collect()
        before = current()  # and before buffers are made, which stay between updates
        for _ in range(2):
            model.fit(data, shuffle=False, verbose=0)
        tf.config.experimental.reset_memory_stats("CPU:0")
        for _ in range(4):  # the peak of plain Keras differs from one `fit` to the next
            model.fit(data, shuffle=False, verbose=0)
        return tf.config.experimental.get_memory_info("CPU:0")["peak"] - before

    model, shape = compiled()
    size = MICROBATCH_SIZE
    measured: dict = {
        "gradient_set": sum(4 * int(np.prod(v.shape)) for v in model.trainable_variables),
        "microbatch_of_data": 2 * size * int(np.prod(shape)) * 4,  # one is prefetched
        "activation": size * int(np.prod(model.layers[0].output.shape[1:])) * 4,
        "one_microbatch": peak_of_fit({}, size, size),
        "full_batch": peak_of_fit({}, 32 * size, 32 * size),
    }
    for coupled in (False, True):
        name = " coupled" if coupled else ""
        for k in (2, 32):
            measured.setdefault("split" + name, {})[k] = peak_of_fit(
                {"microbatch_size": size, "coupled": coupled}, k * size, k * size
            )
            measured.setdefault("window" + name, {})[k] = peak_of_fit(
                {"accumulation_steps": k, "coupled": coupled}, k * size, size
            )
    return measured


PROBES = {
    "fit_parameter_bound": lambda: fit(layers_of_one_size),
    "fit_activation_bound": lambda: fit(activation_bound),
    "parameter_bound": lambda: value_and_gradients(parameter_bound),
    "activation_bound": lambda: value_and_gradients(activation_bound),
    "sparse_accumulator": sparse_accumulator,
}

if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]]()))
