"""The same loop on several devices, which communicate once per update, not per micro-batch.

It runs on all GPUs of the machine, or on two logical CPU devices if there is no GPU.
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
dataset = tf.data.Dataset.from_tensor_slices(((x / 16).astype("float32"), y)).batch(64)

with strategy.scope():  # the accumulator belongs here, like the model and the optimizer
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
    )
    optimizer = keras.optimizers.Adam(1e-2, global_clipnorm=1.0)  # clips the global gradient
    accumulator = bigbatch.GradientAccumulator(
        optimizer, model.trainable_variables, accumulation_steps=4
    )


def replica_fn(x, y):
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        per_sample = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
        loss = tf.reduce_mean(per_sample)  # over the samples of this replica
    gradients = tape.gradient(loss, model.trainable_variables)
    accumulator.accumulate(gradients, weight=tf.shape(x)[0])  # stays on this device
    return tf.reduce_sum(per_sample)


@tf.function(reduce_retracing=True)
def micro_batch(x, y):
    return strategy.reduce("SUM", strategy.run(replica_fn, args=(x, y)), axis=None)


for epoch in range(5):
    total = 0.0
    for x, y in strategy.experimental_distribute_dataset(dataset):
        total += float(micro_batch(x, y))
        accumulator.apply_when_full()  # outside strategy.run: the one reduction
    accumulator.flush()
    updates = int(optimizer.iterations.numpy())
    print(f"epoch {epoch + 1}: loss {total / 1797:.4f}, {updates} updates")
