"""Run in a process of its own, with a limit of memory: prints as JSON how training went.

    python out_of_memory_probe.py SCENARIO SETTING

SETTING is the JSON of what `accumulate` is given, or `null`.
"""

from __future__ import annotations

import json
import os
import sys
import warnings

os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"  # the limit comes from the test

import numpy as np
import tensorflow as tf

import bigbatch

from stack import keras

layers = keras.layers
rng = np.random.default_rng(0)


def convolutional():
    convolutions = [layers.Conv2D(16, 3, padding="same", activation="relu") for _ in range(3)]
    model = keras.Sequential(
        [
            keras.Input((24, 24, 3)),
            *convolutions,
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )
    x = rng.normal(size=(1200, 24, 24, 3)).astype("float32")
    return model, (x, np.arange(1200) % 10), {"batch_size": 512}


def perceptron():
    """Nearly all of its memory is for what samples are turned into."""
    dense = [layers.Dense(64, "relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((64, 1)), *dense, layers.Flatten(), layers.Dense(10)])
    x = rng.normal(size=(1200, 64, 1)).astype("float32")
    return model, (x, np.arange(1200) % 10), {"batch_size": 512}


def longer_later():
    """The third batch has sequences eight times as long."""
    model = keras.Sequential(
        [
            keras.Input((None, 8)),
            layers.Dense(128, "tanh"),
            layers.Dense(128, "tanh"),
            layers.GlobalAveragePooling1D(),
            layers.Dense(10),
        ]
    )
    batches = [
        (rng.normal(size=(64, length, 8)).astype("float32"), np.arange(64) % 10)
        for length in (100, 100, 800, 100)
    ]
    spec = (tf.TensorSpec([None, None, 8]), tf.TensorSpec([None], tf.int64))
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)
    return model, (data,), {}


def normalised():
    """Nearly all of its memory is for what stages of exact batch normalisation store."""
    model = keras.Sequential([keras.Input((16, 16, 3))])
    for _ in range(6):
        model.add(layers.Conv2D(8, 3, padding="same", use_bias=False))
        model.add(layers.BatchNormalization())
        model.add(layers.ReLU())
    model.add(layers.GlobalAveragePooling2D())
    model.add(layers.Dense(10))
    x = rng.normal(size=(1024, 16, 16, 3)).astype("float32")
    return model, (x, np.arange(1024) % 10), {"batch_size": 512}


def too_large():
    """One sample is too much."""
    model = keras.Sequential(
        [keras.Input((60_000, 8)), layers.Dense(128, "tanh"), layers.GlobalAveragePooling1D()]
    )
    return model, (rng.normal(size=(4, 60_000, 8)).astype("float32"), np.zeros((4, 128))), {}


def train(scenario, setting):
    keras.utils.set_random_seed(0)
    model, data, options = scenario()
    loss = "mse" if scenario is too_large else keras.losses.SparseCategoricalCrossentropy(True)
    model.compile(keras.optimizers.Adam(1e-3), loss)
    if setting:
        every = setting.pop("checkpoint_every", None)
        if every is not None:
            setting["batch_norm"] = bigbatch.ExactBatchNorm(every)
        bigbatch.accumulate(model, **setting)
    history = model.fit(*data, shuffle=False, verbose=0, **options)
    return model, history.history


def loop(setting):
    """Train without `fit`: return what `main` does."""
    keras.utils.set_random_seed(0)
    model, (x, y), _ = convolutional()
    optimizer = keras.optimizers.Adam(1e-3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss_fn(x, y):
        return loss(y, model(x, training=True))

    losses = []
    for start in (0, 512):
        batch = tf.constant(x[start : start + 512]), tf.constant(y[start : start + 512])
        value, gradients = bigbatch.value_and_gradients(
            loss_fn, model.trainable_variables, batch, **(setting or {"microbatch_size": 512})
        )
        optimizer.apply(gradients, model.trainable_variables)
        losses.append(float(value))
    weights = [weight.tolist() for weight in model.get_weights()]
    size = bigbatch.microbatch_size(loss_fn) if setting else None
    return {"weights": weights, "loss": losses, "updates": len(losses), "size": size}


def verified(setting):
    """Compare with a full batch that does not fit."""
    model, (x, y), _ = perceptron()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    result = bigbatch.verify(model, x[:512], y[:512], verbose=False, **setting)
    return result.to_dict()


def main(scenario, setting):
    if scenario in (loop, verified):
        return scenario(setting)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model, history = train(scenario, setting)
        except Exception as error:
            return {"error": type(error).__name__, "message": str(error)}
    result = {
        "weights": [weight.tolist() for weight in model.get_weights()],
        "loss": history["loss"],
        "updates": int(model.optimizer.iterations),
        "peak": tf.config.experimental.get_memory_info("CPU:0")["peak"],
        "messages": [str(one.message) for one in caught if "out of memory" in str(one.message)],
    }
    if setting:
        result["size"] = bigbatch.microbatch_size(model)
    return result


if __name__ == "__main__":
    scenario = globals()[sys.argv[1]]
    print(json.dumps(main(scenario, json.loads(sys.argv[2]))))
