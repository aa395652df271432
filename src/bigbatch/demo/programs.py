"""The programs of the demo: each trains as a user would, in a process of its own.

Two run on a device with little memory, which is real (TensorFlow's allocator for GPUs with a
limit, on the CPU), and one runs without a limit to compare with.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from bigbatch.demo.sizes import (
    BATCH,
    EPOCHS,
    LIMIT,
    MICROBATCH,
    NORM_EPOCHS,
    NORM_MICROBATCH,
)


def _data() -> tuple[Any, Any]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = (digits.data[..., np.newaxis] / 16).astype("float32")  # pixel by pixel
    return x, digits.target.astype("int32")


def _model(**options: Any) -> Any:
    import keras

    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((64, 1)),
            *(layers.Dense(64, "relu") for _ in range(3)),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3, epsilon=1e-3, **options), loss)
    return model


def _set_up(is_limited: bool) -> None:
    """Use a GPU if there is one, with the same limit, and in full precision."""
    import tensorflow as tf

    tf.config.experimental.enable_tensor_float_32_execution(False)
    for gpu in tf.config.list_physical_devices("GPU")[:1]:
        tf.config.set_visible_devices(gpu, "GPU")
        if is_limited:
            limit = tf.config.LogicalDeviceConfiguration(memory_limit=LIMIT)
            tf.config.set_logical_device_configuration(gpu, [limit])
        else:
            tf.config.experimental.set_memory_growth(gpu, True)


def _full() -> tuple[dict[str, Any], dict[str, Any]]:
    """Try to train on the small device as one would."""
    import tensorflow as tf

    x, y = _data()
    result = "fits"
    try:
        _model().fit(x, y, batch_size=BATCH, verbose=0)
    except tf.errors.ResourceExhaustedError:
        result = "out of memory"
    return {"result": result}, {}


def _small() -> tuple[dict[str, Any], dict[str, Any]]:
    """Train on the small device; return what was found, and the weights."""
    from bigbatch.diagnostics.monitor import Monitor
    from bigbatch.diagnostics.noise_scale import NoiseScale
    from bigbatch.engine.accumulate import accumulate, microbatch_size
    from bigbatch.planner.measure import plan

    x, y = _data()
    model, noise = accumulate(_model(), microbatch_size="auto"), NoiseScale()
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[noise, Monitor()],
    )
    planned = plan(_model(), x, y, batch_size=BATCH, verbose=False)
    result = {
        "microbatch_size": microbatch_size(model),
        "loss": history.history["loss"][-1],
        "peak": max(history.history["peak_memory"][1:]),  # the first epoch tries sizes
        "peaks": [(one.microbatch_size, one.peak) for one in planned.measured],
        "predicted": [(size, planned.peak(size)) for size in range(1, BATCH + 1)],
        "advice": noise.advice(),
        "noise": [(one.average, one.updates) for one in noise.history],
    }
    return result, _weights("auto", model)


def _free() -> tuple[dict[str, Any], dict[str, Any]]:
    """Train without a limit: with the full batch, and as others accumulate."""
    from bigbatch.engine.trial import memory_of

    x, y = _data()
    options = {"epochs": EPOCHS, "shuffle": False, "verbose": 0}
    steps = BATCH // MICROBATCH
    full = _model()
    losses = {"full": full.fit(x, y, batch_size=BATCH, **options).history["loss"][-1]}
    peak = memory_of(full).peak()
    keras_own = _model(gradient_accumulation_steps=steps)
    history = keras_own.fit(x, y, batch_size=MICROBATCH, **options).history
    losses["keras"] = history["loss"][-1]
    by_hand, losses["hand"] = _by_hand(x, y, steps)
    weights = {
        **_weights("full", full),
        **_weights("keras", keras_own),
        **_weights("hand", by_hand),
        **_normalised(x, y),
    }
    return {"samples": len(x), "loss": losses, "peak": peak}, weights


def _normalised(x: Any, y: Any) -> dict[str, Any]:
    """Return weights and statistics of a net with BatchNormalization, trained three ways."""
    import keras

    from bigbatch.engine.accumulate import accumulate

    def trained(name: str, setting: dict[str, Any]) -> dict[str, Any]:
        keras.utils.set_random_seed(0)
        layers = keras.layers
        model = keras.Sequential([keras.Input((64, 1)), layers.Flatten()])
        for _ in range(2):
            model.add(layers.Dense(64))
            model.add(layers.BatchNormalization())
            model.add(layers.Activation("tanh"))
        model.add(layers.Dense(10))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
        if setting:
            accumulate(model, **setting)
        options = {"epochs": NORM_EPOCHS, "shuffle": False, "verbose": 0}
        model.fit(x, y, batch_size=BATCH, **options)
        values = enumerate(variable.numpy() for variable in model.weights)
        return {f"{name} {index:03}": value for index, value in values}

    size = {"microbatch_size": NORM_MICROBATCH}
    return {
        **trained("norm", {}),
        **trained("exact", {**size, "batch_norm": "exact"}),
        **trained("pooled", {**size, "batch_norm": "pooled"}),
    }


def _by_hand(x: Any, y: Any, steps: int) -> tuple[Any, float]:
    """Train with the loop everybody copies: loss / k, an update every k, and one at the end."""
    import tensorflow as tf

    model = _model()
    variables = model.trainable_variables
    sums = [tf.Variable(tf.zeros(variable.shape)) for variable in variables]

    @tf.function(reduce_retracing=True)
    def add(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = model.loss(y, model(x, training=True))
            part = loss / steps
        for total, gradient in zip(sums, tape.gradient(part, variables)):
            total.assign_add(gradient)
        return loss

    @tf.function
    def apply() -> None:
        model.optimizer.apply(list(sums), variables)
        for total in sums:
            total.assign(tf.zeros(total.shape))

    model.optimizer.build(variables)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(MICROBATCH)
    losses: list[float] = []
    for _ in range(EPOCHS):
        losses = []
        for index, batch in enumerate(data):
            losses.append(float(add(*batch)))
            if index % steps == steps - 1 or index == len(data) - 1:
                apply()
    return model, float(np.mean(losses))


def _weights(name: str, model: Any) -> dict[str, Any]:
    values = (variable.numpy() for variable in model.trainable_variables)
    return {f"{name} {index:03}": value for index, value in enumerate(values)}


if __name__ == "__main__":
    part, scratch = sys.argv[1:]
    _set_up(is_limited=part != "free")
    found, values = {"full": _full, "small": _small, "free": _free}[part]()
    np.savez(Path(scratch, f"{part}.npz"), **values)
    Path(scratch, part).write_text(json.dumps(found))
