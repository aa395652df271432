"""`fit` on several devices: every replica cuts its part of the batch; one reduction per update.

It runs on all GPUs of the machine, or on two logical CPU devices if there is no GPU.
`microbatch_size` counts the samples on one device at a time.
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import bigbatch

if not tf.config.list_physical_devices("GPU"):
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], two)
devices = [device.name for device in tf.config.list_logical_devices("GPU")] or [
    "CPU:0",
    "CPU:1",
]
strategy = tf.distribute.MirroredStrategy(devices)

x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")

with strategy.scope():
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
    )
    model.compile(
        keras.optimizers.Adam(1e-2, global_clipnorm=1.0),  # clips the global gradient
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

bigbatch.accumulate(model, microbatch_size=32)
history = model.fit(x, y, batch_size=256, epochs=5, verbose=0)
for epoch in range(5):
    loss, accuracy = (history.history[name][epoch] for name in ("loss", "accuracy"))
    print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy:.3f}")
