"""Run in a process of its own, whose allocator counts every byte: prints JSON.

    python plan_probe.py MODEL BATCH

What a plan on this device says of micro-batches as large as the batch, and the most samples
that it has measured; if that is all of them, also what it would have predicted from a quarter
of them, and what training takes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys

os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"  # a limit comes from the test

import keras
import tensorflow as tf

import bigbatch

# In one order, or the peak of the same update differs from time to time.
tf.config.threading.set_inter_op_parallelism_threads(1)
layers = keras.layers


def convolutional():
    made = [keras.Input((32, 32, 3))]
    for filters in (32, 64, 128):
        for _ in range(2):
            made += [layers.Conv2D(filters, 3, padding="same"), layers.BatchNormalization()]
            made += [layers.ReLU()]
        made += [layers.MaxPooling2D()]
    return [*made, layers.GlobalAveragePooling2D(), layers.Dense(10)]


def transformer():
    inputs = x = keras.Input((64, 64))
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 16)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(64)(layers.Dense(256, "gelu")(x)))
    return inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x))


def perceptron():
    return [
        keras.Input((512,)),
        *(layers.Dense(512, "relu") for _ in range(3)),
        layers.Dense(10),
    ]


def compiled(make):
    made = make()
    model = keras.Model(*made) if isinstance(made, tuple) else keras.Sequential(made)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss)
    return model


def data_for(model, count):
    return tf.random.normal((count, *model.input_shape[1:])), tf.zeros(count, tf.int32)


def of_any_count(tensor):
    """Return the same tensor, as data sets usually have it: of a size that is not known."""
    shape = [None, *tensor.shape[1:]]
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=shape)


def train(model, batch):
    """Return the peak of an update in `fit`."""
    bigbatch.accumulate(model, microbatch_size=batch)
    data = tf.data.Dataset.from_tensors(data_for(model, batch)).repeat(2)  # one copy of a batch
    data = data.map(lambda *parts: tuple(map(of_any_count, parts)))
    model.fit(data.take(1), verbose=0)  # what is made only once does not count
    tf.config.experimental.reset_memory_stats("CPU:0")
    model.fit(data, verbose=0)
    return tf.config.experimental.get_memory_info("CPU:0")["peak"]


if __name__ == "__main__":
    name, batch = sys.argv[1], int(sys.argv[2])
    model = compiled(globals()[name])
    plan = bigbatch.plan(model, *data_for(model, 8), batch_size=batch, verbose=False)
    most = plan.measured[-1].microbatch_size
    result = {"most": most, "peak": plan.peak(batch)}
    if most == batch:
        few = tuple(one for one in plan.measured if 4 * one.microbatch_size <= batch)
        result["predicted"] = dataclasses.replace(plan, measured=few).peak(batch)
        result["training"] = train(model, batch)
    print(json.dumps(result))
