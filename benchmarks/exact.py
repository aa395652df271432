"""Exact batch normalisation: memory and time of what is stored between stages."""

from __future__ import annotations

import functools
import time
from typing import Any, Callable

import keras
import numpy as np
import tensorflow as tf

import bigbatch
from benchmarks.measuring import Settings, interleaved, peak_bytes, ratio, table, write

BATCH, MICROBATCH, SHAPE, CLASSES = 64, 8, (32, 32, 3), 10
layers = keras.layers
CHOICES: dict[str, Any] = {
    "full batch": None,
    '`"pooled"` (not equal)': "pooled",
    'exact, `"all"`': bigbatch.ExactBatchNorm("all"),
    'exact, `"auto"`': bigbatch.ExactBatchNorm("auto"),
    "exact, 4": bigbatch.ExactBatchNorm(4),
    "exact, 8": bigbatch.ExactBatchNorm(8),
}


def _normalised(x: Any, filters: int, stride: int = 1) -> Any:
    x = layers.Conv2D(filters, 3, stride, padding="same", use_bias=False)(x)
    return layers.BatchNormalization()(x)


def resnet_20() -> Any:
    """Return the residual net for CIFAR of 19 BatchNormalization layers and a head."""
    inputs = keras.Input(SHAPE)
    x = layers.ReLU()(_normalised(inputs, 16))
    for filters in (16, 32, 64):
        for block in range(3):
            stride = 2 if filters > 16 and not block else 1
            straight = layers.ReLU()(_normalised(x, filters, stride))
            straight = _normalised(straight, filters)
            if stride > 1:
                x = layers.Conv2D(filters, 1, stride, use_bias=False)(x)
            x = layers.ReLU()(layers.add([x, straight]))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(CLASSES)(x))


def mobilenet_v2() -> Any:
    """Return MobileNetV2 for small images."""
    return keras.applications.MobileNetV2(
        weights=None,
        input_shape=SHAPE,
        alpha=0.35,
        classes=CLASSES,
        classifier_activation=None,
    )


MODELS = {"ResNet-20": resnet_20, "MobileNetV2 0.35": mobilenet_v2}


def run(settings: Settings) -> None:
    """Measure, and write `exact.md`."""
    if not settings.is_smoke:
        tf.config.threading.set_inter_op_parallelism_threads(1)
    lines: list[str] = []
    for name, make in settings.some(MODELS.items()):
        choices = settings.some(CHOICES, 3)
        runs = {one: _updates(make, CHOICES[one]) for one in choices}
        peaks = {one: peak_bytes(update) / 2**20 for one, update in runs.items()}
        timed = {one: functools.partial(_seconds, update) for one, update in runs.items()}
        times = interleaved(timed, settings.rounds)
        rows = [
            [one, f"{peaks[one]:.0f}", ratio(times[one], times["full batch"])] for one in runs
        ]
        headings = ("normalisation", "memory (MiB)", "processor time, of the full batch's")
        lines += ["", f"## {name}", "", *table(headings, rows)]
    notes = [
        f"Images of {SHAPE[0]} × {SHAPE[1]}, batch {BATCH} in micro-batches of {MICROBATCH}, "
        "SGD; peak allocator bytes of an update beyond the idle model; processor time, which "
        "other programs on the machine disturb less than time by the clock, in ratios of "
        "rounds (median, quartiles)."
    ]
    write(settings, "exact", "Exact batch normalisation", lines, notes)


def _updates(make: Callable[[], Any], batch_norm: Any) -> Callable[[], None]:
    """Return what makes an update of a new model."""
    keras.utils.set_random_seed(0)
    model = make()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    if batch_norm is not None:
        bigbatch.accumulate(
            model, microbatch_size=MICROBATCH, batch_norm=batch_norm, check="off"
        )
    x = tf.random.stateless_normal((BATCH, *SHAPE), [0, 1])
    data = tf.data.Dataset.from_tensors((x, tf.constant(np.arange(BATCH) % CLASSES)))
    return lambda: model.fit(data, shuffle=False, verbose=0)


def _seconds(update: Callable[[], None]) -> float:
    start = time.process_time()
    update()
    return time.process_time() - start
