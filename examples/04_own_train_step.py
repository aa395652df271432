"""A model with its own `train_step`: it runs as it is, on each micro-batch.

What it hands to its optimizers is collected; each optimizer makes one update per batch. A loss
of its own is taken to be a mean over samples.
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import bigbatch

x, _ = load_digits(return_X_y=True)
x = (x / 16).astype("float32")


class Autoencoder(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.layers.Dense(16, "relu")
        self.decoder = keras.layers.Dense(64)

    def call(self, x):
        return self.decoder(self.encoder(x))

    def train_step(self, x):
        with tf.GradientTape() as tape:
            code = self.encoder(x)
            error = tf.reduce_mean(tf.square(x - self.decoder(code)))
            loss = error + 1e-3 * tf.reduce_mean(code)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"error": error}


model = Autoencoder()
model.compile(keras.optimizers.Adam(1e-2))
bigbatch.accumulate(model, microbatch_size=32)
dataset = tf.data.Dataset.from_tensor_slices(x).batch(256)
history = model.fit(dataset, epochs=5, shuffle=False, verbose=0)
for epoch, error in enumerate(history.history["error"], 1):
    print(f"epoch {epoch}: error {error:.4f}")
print(f"{int(model.optimizer.iterations)} updates")
