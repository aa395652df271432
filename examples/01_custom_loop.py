"""Gradient accumulation in a custom training loop: batches of 256 on a device that holds 32.

Comments mark the three new lines. The last window of an epoch is shorter than the others;
`flush` applies it, weighted by the samples that it has.
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import bigbatch

x, y = load_digits(return_X_y=True)
dataset = tf.data.Dataset.from_tensor_slices(((x / 16).astype("float32"), y)).batch(32)

model = keras.Sequential(
    [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
)
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.Adam(1e-2)
variables = model.trainable_variables

accumulator = bigbatch.GradientAccumulator(optimizer, variables, accumulation_steps=8)  # new


@tf.function(reduce_retracing=True)
def micro_batch(x, y):
    with tf.GradientTape() as tape:
        loss = loss_fn(y, model(x, training=True))
    accumulator.accumulate(tape.gradient(loss, variables), weight=tf.shape(x)[0])
    accumulator.apply_when_full()  # new: instead of optimizer.apply_gradients
    return loss


for epoch in range(5):
    loss = keras.metrics.Mean()
    for x, y in dataset:
        loss.update_state(micro_batch(x, y), sample_weight=len(x))
    accumulator.flush()  # new: the last, short window
    updates = int(optimizer.iterations)
    print(f"epoch {epoch + 1}: loss {float(loss.result()):.4f}, {updates} updates")
