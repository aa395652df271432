"""The demo: the same training twice, with a full batch and with accumulation.

A small network learns scikit-learn's handwritten digits, pixel by pixel, in a custom loop with
512 samples per update. The second run holds only 64 samples in memory at a time. The last
batch of each epoch is short: 261 samples, or four micro-batches of 64 and one of 5.
"""

import os

# The allocator that counts bytes; it must be chosen before TensorFlow starts.
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import bigbatch

BATCH_SIZE, MICROBATCH_SIZE, EPOCHS = 512, 64, 5

digits = load_digits()
x = (digits.data[..., np.newaxis] / 16).astype("float32")
y = digits.target.astype("int32")


def build():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((64, 1)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    optimizer = keras.optimizers.Adam(1e-3, global_clipnorm=1.0)
    optimizer.build(model.trainable_variables)
    return model, optimizer


def mean_loss(model, x, y):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, model(x))


def train(title, model, batch_size, learn, end_of_epoch=lambda: None):
    """Run `learn` on every batch of every epoch; return the final loss and the peak memory."""
    print(f"{title}: {EPOCHS} epochs of {len(x)} samples, {batch_size} in memory at a time")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)
    tf.config.experimental.reset_memory_stats("CPU:0")
    for epoch in range(EPOCHS):
        for batch in dataset:
            learn(*batch)
        end_of_epoch()
        print(f"  epoch {epoch + 1}/{EPOCHS} done")
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    return float(mean_loss(model, x, y)), peak / 2**20


def train_full_batch():
    model, optimizer = build()

    @tf.function(reduce_retracing=True)
    def learn(x, y):
        with tf.GradientTape() as tape:
            loss = mean_loss(model, x, y)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    return model, optimizer, *train("Full batch", model, BATCH_SIZE, learn)


def train_accumulated():
    model, optimizer = build()
    variables = model.trainable_variables
    accumulator = bigbatch.GradientAccumulator(
        optimizer, variables, accumulation_steps=BATCH_SIZE // MICROBATCH_SIZE
    )

    @tf.function(reduce_retracing=True)
    def learn(x, y):
        with tf.GradientTape() as tape:
            loss = mean_loss(model, x, y)
        accumulator.accumulate(tape.gradient(loss, variables), weight=tf.shape(x)[0])
        accumulator.apply_when_full()

    results = train("Accumulated", model, MICROBATCH_SIZE, learn, accumulator.flush)
    return model, optimizer, *results


full, full_optimizer, full_loss, full_peak = train_full_batch()
small, small_optimizer, small_loss, small_peak = train_accumulated()
difference = max(
    float(np.max(np.abs(one - two)))
    for one, two in zip(full.get_weights(), small.get_weights())
)
print()
print(f"{'':24}{'full batch':>14}{'accumulated':>14}")
print(f"{'samples in memory':24}{BATCH_SIZE:>14}{MICROBATCH_SIZE:>14}")
print(
    f"{'updates':24}{int(full_optimizer.iterations):>14}{int(small_optimizer.iterations):>14}"
)
print(f"{'final loss':24}{full_loss:>14.6f}{small_loss:>14.6f}")
print(f"{'peak memory (MiB)':24}{full_peak:>14.1f}{small_peak:>14.1f}")
print(f"largest difference of any weight: {difference:.1e}")
