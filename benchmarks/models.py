"""The models that are measured."""

from __future__ import annotations

import keras


def convolutional():
    layers = [keras.layers.Conv2D(32, 3, padding="same", activation="relu") for _ in range(3)]
    return keras.Sequential(
        [
            keras.Input((24, 24, 3)),
            *layers,
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10),
        ]
    )


def transformer():
    inputs = keras.Input((64, 128))
    x = inputs
    for _ in range(2):
        x = keras.layers.LayerNormalization()(x + keras.layers.MultiHeadAttention(4, 32)(x, x))
        x = keras.layers.LayerNormalization()(
            x + keras.layers.Dense(128)(keras.layers.Dense(512, "gelu")(x))
        )
    outputs = keras.layers.Dense(10)(keras.layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, outputs)


def wide():
    layers = [keras.layers.Dense(2048, "relu") for _ in range(2)]
    return keras.Sequential([keras.Input((512,)), *layers, keras.layers.Dense(10)])


def convolutional_with_batch_norm():
    x = inputs = keras.Input((24, 24, 3))
    for _ in range(3):
        x = keras.layers.Conv2D(32, 3, padding="same")(x)
        x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def deep_tiny():
    layers = [keras.layers.Dense(16, "relu") for _ in range(20)]
    return keras.Sequential([keras.Input((16,)), *layers, keras.layers.Dense(10)])
