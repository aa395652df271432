"""Start-up: how long the first update takes, with all that is built and traced for it."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np

from benchmarks.measuring import Settings, in_new_process, ratio, table, warm_up, write

BATCH, MICROBATCH, IMAGE, CLASSES = 32, 8, (64, 64, 3), 10
LAYERS, WIDTH, SEQUENCE, VOCABULARY = 12, 128, 64, 256
layers = keras.layers


def mobilenet() -> Any:
    """Return MobileNetV3Small for small images."""
    return keras.applications.MobileNetV3Small(
        weights=None, input_shape=IMAGE, classes=CLASSES, classifier_activation=None
    )


def resnet_50() -> Any:
    """Return ResNet50 for small images."""
    return keras.applications.ResNet50(
        weights=None, input_shape=IMAGE, classes=CLASSES, classifier_activation=None
    )


def transformer() -> Any:
    """Return an encoder of twelve layers, with dropout, that classifies sentences."""
    x = inputs = keras.Input((SEQUENCE,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH)(x)
    for _ in range(LAYERS):
        attended = layers.MultiHeadAttention(4, WIDTH // 4, dropout=0.1)(x, x)
        x = layers.LayerNormalization()(layers.add([x, attended]))
        hidden = layers.Dense(4 * WIDTH, "gelu")(x)
        hidden = layers.Dropout(0.1)(layers.Dense(WIDTH)(hidden))
        x = layers.LayerNormalization()(layers.add([x, hidden]))
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))


MODELS = {"MobileNetV3Small": mobilenet, "transformer, 12 layers": transformer}
MODELS["ResNet50"] = resnet_50
SPLIT, WINDOW = {"microbatch_size": MICROBATCH}, {"accumulation_steps": BATCH // MICROBATCH}
CANDIDATES: dict[str, Any] = {
    "plain Keras": None,
    "split": SPLIT,
    "window": WINDOW,
    "split, no check": {**SPLIT, "check": "off"},
    "window, no check": {**WINDOW, "check": "off"},
    'split, `"exact"`': {**SPLIT, "batch_norm": "exact"},
}


def run(settings: Settings) -> None:
    """Measure, and write `start-up.md`."""
    lines: list[str] = []
    for name in settings.some(MODELS):
        chosen = [one for one in CANDIDATES if "exact" not in one or "transformer" not in name]
        chosen = settings.some(chosen, 2)
        times: dict[str, list[Any]] = {one: [] for one in chosen}
        for index in range(settings.rounds):
            for one in chosen[:: -1 if index % 2 else 1]:
                times[one].append(in_new_process(first_update, name, one))
                print(f"{name}, {one}: {times[one][-1][0]:.1f} s", flush=True)
        rows = []
        for one in chosen:
            clock, processor = np.array(times[one]).T
            of_clock, of_processor = np.array(times["plain Keras"]).T
            ratios = ratio(clock, of_clock), ratio(processor, of_processor)
            rows.append([one, f"{np.median(clock):.1f}", *ratios])
        headings = ("training", "seconds", "to plain Keras", "processor time, likewise")
        lines += ["", f"## {name}", "", *table(headings, rows)]
    notes = [
        f"From the call of `fit` to the end of the first update, of {BATCH} samples in "
        f"micro-batches of {MICROBATCH}; images of {IMAGE[0]} × {IMAGE[1]}. Every figure is of "
        "a process of its own in which TensorFlow has trained a tiny model already; processes "
        "take turns. Ratios are the medians of those of each round, with quartiles."
    ]
    write(settings, "start-up", "Start-up", lines, notes)


def first_update(name: str, candidate: str) -> tuple[float, float]:
    """Return how long the first update of a new model takes, by the clock and of processors."""
    import bigbatch

    warm_up()
    keras.utils.set_random_seed(0)
    model = MODELS[name]()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(), loss)
    options = CANDIDATES[candidate]
    if options is not None:
        bigbatch.accumulate(model, **options)
    x = np.random.default_rng(0).normal(size=(BATCH, *model.input_shape[1:]))
    x = x.astype("float32") if x.ndim > 2 else np.abs(x * 60).astype("int32") % VOCABULARY
    rows = MICROBATCH if options and "accumulation_steps" in options else BATCH
    start = time.perf_counter(), time.process_time()
    model.fit(x, np.arange(BATCH) % CLASSES, batch_size=rows, verbose=0)
    return time.perf_counter() - start[0], time.process_time() - start[1]
