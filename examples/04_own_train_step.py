"""A variational autoencoder with a custom `train_step`, which runs on each micro-batch.

bigbatch collects the gradients for its optimizer, and makes one update per batch. It tries the
`train_step` on a few samples to find out whether the loss is a mean or a sum. The code is drawn
at random; every sample gets the same numbers as in the full batch, so the losses are the same.
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import bigbatch

x, _ = load_digits(return_X_y=True)
x = (x / 16).astype("float32")


class VariationalAutoencoder(keras.Model):
    def __init__(self, size=8):
        super().__init__()
        self.encoder = keras.Sequential(
            [keras.layers.Dense(64, "relu"), keras.layers.Dense(2 * size)]
        )
        self.decoder = keras.Sequential(
            [keras.layers.Dense(64, "relu"), keras.layers.Dense(64)]
        )
        self.seed = keras.random.SeedGenerator(0)
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, x):
        mean, log_variance = tf.split(self.encoder(x), 2, axis=-1)
        noise = keras.random.normal(tf.shape(mean), seed=self.seed)
        code = mean + noise * tf.exp(log_variance / 2)
        information = tf.square(mean) + tf.exp(log_variance) - log_variance - 1
        return self.decoder(code), tf.reduce_sum(information, -1) / 2

    def train_step(self, x):
        with tf.GradientTape() as tape:
            reconstruction, information = self(x)
            error = tf.reduce_sum(tf.square(x - reconstruction), -1)
            loss = tf.reduce_mean(error + 0.1 * information)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def train(prepare):
    keras.utils.set_random_seed(0)
    model = VariationalAutoencoder()
    model.compile(keras.optimizers.Adam(1e-3))
    prepare(model)
    history = model.fit(x, batch_size=256, epochs=10, shuffle=False, verbose=0)
    return history.history["loss"]


full = train(lambda model: model)
small = train(lambda model: bigbatch.accumulate(model, microbatch_size=32))  # the one line
print("epoch  full batch  micro-batches of 32")
for epoch in (0, 4, 9):
    print(f"{epoch + 1:5}  {full[epoch]:10.3f}  {small[epoch]:19.3f}")
    assert abs(full[epoch] - small[epoch]) < 1e-3
