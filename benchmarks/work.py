"""The work that is measured: models, and data for them.

Only names that Keras 2 and 3 share: `peer.py` runs it on an old stack, too.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Any, Callable

import keras
import numpy as np

SEQUENCE, VOCABULARY = 64, 256
TABLE = 1_000_000, 32
ROWS_TOUCHED = 2_000


class CountTraces(keras.layers.Layer):
    """Passes its inputs on, and counts how often Python runs it: once per trace."""

    count = 0

    def call(self, inputs: Any) -> Any:
        """Return the inputs."""
        if not isinstance(inputs, getattr(keras, "KerasTensor", ())):
            self.count += 1
        return inputs


def convolutional() -> Any:
    x = inputs = keras.Input((24, 24, 3))
    for _ in range(3):
        x = keras.layers.Conv2D(32, 3, padding="same")(x)
        x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(10)(CountTraces()(x)))


def transformer() -> Any:
    """Return a small GPT: causal attention, a prediction for every token."""
    tokens = keras.Input((SEQUENCE,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, 128)(tokens)
    for _ in range(2):
        normal = keras.layers.LayerNormalization()(x)
        attention = keras.layers.MultiHeadAttention(4, 32)
        x = keras.layers.Add()([x, attention(normal, normal, use_causal_mask=True)])
        hidden = keras.layers.Dense(512, "gelu")(keras.layers.LayerNormalization()(x))
        x = keras.layers.Add()([x, keras.layers.Dense(128)(hidden)])
    return keras.Model(tokens, keras.layers.Dense(VOCABULARY)(CountTraces()(x)))


def mixed_bfloat16() -> Any:
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        return transformer()
    finally:
        keras.mixed_precision.set_global_policy("float32")


def wide(width: int = 2048) -> Any:
    layers = [keras.layers.Dense(width, "relu") for _ in range(2)]
    return keras.Sequential([keras.Input((512,)), *layers, CountTraces(), _head()])


def tiny(layers: int = 20) -> Any:
    hidden = [keras.layers.Dense(16, "relu") for _ in range(layers)]
    return keras.Sequential([keras.Input((16,)), *hidden, CountTraces(), _head()])


def smallest() -> Any:
    return tiny(2)


def embedding(rows: int = TABLE[0]) -> Any:
    return keras.Sequential(
        [
            keras.Input((16,), dtype="int32"),
            keras.layers.Embedding(rows, TABLE[1]),
            keras.layers.GlobalAveragePooling1D(),
            CountTraces(),
            _head(),
        ]
    )


def _head() -> Any:
    return keras.layers.Dense(10)


@dataclass(frozen=True)
class Work:
    """A model and what its inputs are."""

    make_model: Callable[[], Any]
    tokens: int = 0
    """How many different tokens inputs are drawn from; 0: they are no tokens."""
    updates: int = 3
    """How many updates are timed at once."""
    models: int = 3
    """How many models of each kind of training are compared."""
    peer: bool = True
    """Whether the old stack can run it."""

    @property
    def name(self) -> str:
        """What the tables call it."""
        return self.make_model.__name__.replace("_", " ")

    def data(self, samples: int) -> tuple[Any, Any]:
        """Return inputs and targets, the same ones every time."""
        generator = np.random.default_rng(0)
        model = self.make_model()
        shape = (samples, *model.input_shape[1:])
        if self.tokens:
            x = generator.integers(0, self.tokens, shape).astype("int32")
        else:
            x = generator.normal(size=shape).astype("float32")
        targets = (samples, *model.output_shape[1:-1])
        return x, generator.integers(0, model.output_shape[-1], targets).astype("int32")


WORK = {
    work.name: work
    for work in (
        Work(convolutional, updates=6),
        Work(transformer, VOCABULARY),
        Work(wide),
        Work(tiny, updates=48),
        Work(embedding, ROWS_TOUCHED, models=2, peer=False),  # large: half a gigabyte each
        Work(mixed_bfloat16, VOCABULARY, peer=False),
    )
}


DEEP = {2 * (layers + 1): Work(functools.partial(tiny, layers)) for layers in (4, 49, 499)}
"""Nets by the number of their variables."""

WIDE = {
    f"{4 * width * (512 + width) / 2**20:.0f} MiB": Work(functools.partial(wide, width))
    for width in (256, 1024, 4096)
}
"""Nets by the bytes of their variables."""

SMALLEST = Work(smallest, updates=1)
"""What the benchmarks are tried out on."""


def loss() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def traces_of(model: Any) -> int:
    """Return how often the model has been traced."""
    layers = model._flatten_layers() if hasattr(model, "_flatten_layers") else model.layers
    return sum(layer.count for layer in layers if isinstance(layer, CountTraces))


def time_of_epoch(model: Any, *data: Any, callbacks: Any = (), **options: Any) -> float:
    """Return how long the epoch of `fit` takes, without what comes before and after it.

    A data set takes up to half a second to go away, or none, by chance.
    """
    clock = [0.0, 0.0]
    callback = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda *_: clock.__setitem__(0, time.perf_counter()),
        on_epoch_end=lambda *_: clock.__setitem__(1, time.perf_counter()),
    )
    model.fit(*data, shuffle=False, verbose=0, callbacks=[callback, *callbacks], **options)
    return clock[1] - clock[0]
