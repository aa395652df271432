"""Programs of the guides and examples of Keras, made small: what people train with `fit`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable

import numpy as np
import tensorflow as tf

import bigbatch
from comparison import Fitted, recorded_warnings

from problems import TOLERANCE
from stack import keras

layers = keras.layers
SAMPLES = 29
rng = np.random.default_rng(28)
X, Y = rng.normal(size=(SAMPLES, 5)), rng.normal(size=(SAMPLES, 1))
TRIPLETS = tuple(rng.normal(size=(3, SAMPLES, 5)))


@dataclass(frozen=True)
class Program:
    """What people write: a function that returns a compiled model, and data."""

    make: Callable[[], Any]
    data: Any = field(default_factory=lambda: (X, Y))
    tolerance: float = TOLERANCE["float64"]
    draws: bool = False
    """Whether `train_step` itself draws random numbers: other ones if it runs eagerly."""

    def train(self, size: int, run_eagerly: bool = False, **setting: Any) -> Fitted:
        """Train with `fit`, accumulated if there is a setting."""
        keras.utils.set_random_seed(3)
        data = tf.data.Dataset.from_tensor_slices(self.data).batch(size)
        with recorded_warnings() as messages:
            model = self.make()
            model.run_eagerly = run_eagerly
            if setting:
                bigbatch.accumulate(model, **setting)
            history = model.fit(data, epochs=2, shuffle=False, verbose=0).history
        return Fitted(model, history, tuple(messages))


def compiled(model: Any, loss: Any = None, **options: Any) -> Any:
    model.compile(keras.optimizers.Adam(0.01), loss, **options)
    return model


def network(outputs: int = 1, inputs: int = 5) -> Any:
    return keras.Sequential(
        [keras.Input((inputs,)), layers.Dense(4, "tanh"), layers.Dense(outputs)]
    )


class FirstOfTheGuide(keras.Model):
    """The first `train_step` of "Customizing what happens in fit()"."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        trainable_vars = self.trainable_variables
        gradients = tape.gradient(loss, trainable_vars)
        self.optimizer.apply(gradients, trainable_vars)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


def functional(kind: type) -> Any:
    inputs = keras.Input((5,))
    return kind(inputs, layers.Dense(1)(layers.Dense(4, "tanh")(inputs)))


class GoingLower(keras.Model):
    """The second one: a tracker of its own, metrics that it lists itself."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = keras.losses.MeanSquaredError()

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_fn(y, y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.loss_tracker.update_state(loss)
        self.mae_metric.update_state(y, y_pred)
        return {"loss": self.loss_tracker.result(), "mae": self.mae_metric.result()}

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae_metric]


class ComputesLoss(keras.Model):
    """The variant with `compute_loss` and a tracker."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="squares")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = tf.reduce_mean(tf.square(y_pred - y)) + tf.add_n(self.losses or [0.0 * y[0, 0]])
        self.loss_tracker.update_state(loss)
        return loss


class Autoencoder(keras.Model):
    """The VAE, whose logs have other names than its metrics."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = network(4), network(5, 2)
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.reconstruction_loss_tracker = keras.metrics.Mean(name="reconstruction_loss")
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")
        self.seeds = keras.random.SeedGenerator(1)

    @property
    def metrics(self):
        return [
            self.total_loss_tracker,
            self.reconstruction_loss_tracker,
            self.kl_loss_tracker,
        ]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            z_mean, z_log_var = tf.split(self.encoder(data), 2, -1)
            noise = keras.random.normal(tf.shape(z_mean), seed=self.seeds)
            reconstruction = self.decoder(z_mean + tf.exp(0.5 * z_log_var) * noise)
            reconstruction_loss = tf.reduce_mean(
                tf.reduce_sum(tf.square(data - reconstruction), axis=1)
            )
            kl_loss = -0.5 * (1 + z_log_var - tf.square(z_mean) - tf.exp(z_log_var))
            kl_loss = tf.reduce_mean(tf.reduce_sum(kl_loss, axis=1))
            total_loss = reconstruction_loss + kl_loss
        grads = tape.gradient(total_loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights))
        self.total_loss_tracker.update_state(total_loss)
        self.reconstruction_loss_tracker.update_state(reconstruction_loss)
        self.kl_loss_tracker.update_state(kl_loss)
        return {
            "loss": self.total_loss_tracker.result(),
            "reconstruction_loss": self.reconstruction_loss_tracker.result(),
            "kl_loss": self.kl_loss_tracker.result(),
        }


class Siamese(keras.Model):
    """The triplet network: batches are (anchor, positive, negative), and nothing is built."""

    def __init__(self, margin=0.5):
        super().__init__()
        self.embedding = keras.Sequential([layers.Dense(4, "tanh"), layers.Dense(3)])
        self.margin = margin
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs):
        anchor, positive, negative = (self.embedding(one) for one in inputs)
        return (
            tf.reduce_sum(tf.square(anchor - positive), -1),
            tf.reduce_sum(tf.square(anchor - negative), -1),
        )

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self._compute_loss(data))
        gradients = tape.gradient(loss, self.embedding.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.embedding.trainable_weights))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def _compute_loss(self, data):  # a private name of Keras, as the example has it
        ap_distance, an_distance = self(data)
        return tf.maximum(ap_distance - an_distance + self.margin, 0.0)

    @property
    def metrics(self):
        return [self.loss_tracker]


class TwoTowers(keras.Model):
    """The candidate tower is used in `train_step` alone, the loss is a task of its own."""

    def __init__(self):
        super().__init__()
        self.query = keras.Sequential([layers.Embedding(9, 3), layers.Dense(3)])
        self.candidate = keras.Sequential([layers.Embedding(7, 3), layers.Dense(3)])
        self.task = keras.losses.BinaryCrossentropy(from_logits=True)

    def call(self, features):
        return self.query(features["user"])

    def train_step(self, features):
        with tf.GradientTape() as tape:
            scores = tf.reduce_sum(self(features) * self.candidate(features["item"]), -1)
            loss = self.task(features["clicked"], scores)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"loss": loss, "regularization_loss": 0, "total_loss": loss}


class Unpacks(keras.Model):
    """Gets a dict of inputs and targets, and calls itself with a part, changed."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(4, "tanh"), layers.Dense(1)

    def call(self, features):
        return self.out(self.hidden(features))

    def train_step(self, data):
        features = tf.concat([data["image"], tf.square(data["image"])], -1)
        with tf.GradientTape() as tape:
            y_pred = self(features, training=True)
            loss = self.compute_loss(y=data["label"], y_pred=y_pred)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {**self.compute_metrics(features, data["label"], y_pred), "loss": loss}


class LateHead(keras.Model):
    """A projection head that only `train_step` calls."""

    def __init__(self):
        super().__init__()
        self.encoder = layers.Dense(4, "tanh")
        self.head = keras.Sequential([layers.Dense(4, "tanh"), layers.Dense(1)])

    def call(self, x):
        return self.encoder(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self.head(self(x, training=True)))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        return {"loss": loss}


class LateInLoss(keras.Model):
    """A layer that only `compute_loss` calls; everything else is left to Keras."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = layers.Dense(4, "tanh"), layers.Dense(1)

    def call(self, x):
        return self.encoder(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_mean(tf.square(self.head(y_pred) - y))


class Logs(keras.Model):
    """Logs numbers of Python, vectors, nests, and a value for each sample."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)
        self.tracker = keras.metrics.Mean(name="hidden_from_keras")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            errors = tf.square(self(x, training=True) - y)
            loss = tf.reduce_mean(errors)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.tracker.update_state(loss)
        return {
            "loss": loss,
            "of_each_output": tf.reduce_mean(errors, 0),
            "nested": {"inner": {"tracked": self.tracker.result()}, "squares": loss},
            "half": 0.5,
            "three": 3,
            "of_each_sample": tf.reduce_mean(errors, 1),
        }


def ctc_loss(y_true: Any, y_pred: Any) -> Any:
    """The loss of the speech recognition example."""
    rows = tf.shape(y_true)[0]
    input_length = tf.ones([rows], tf.int32) * tf.shape(y_pred)[1]
    label_length = tf.ones([rows], tf.int32) * tf.shape(y_true)[1]
    return keras.ops.ctc_loss(tf.cast(y_true, tf.int32), y_pred, label_length, input_length)


def speech() -> Any:
    spectrogram = keras.Input((None, 4))
    hidden = layers.GRU(4, return_sequences=True)(spectrogram)
    return compiled(keras.Model(spectrogram, layers.Dense(6)(hidden)), ctc_loss)


PROGRAMS = {
    "guide": Program(
        lambda: compiled(functional(FirstOfTheGuide), "mse", metrics=["mae", "mse"])
    ),
    "guide, going lower": Program(lambda: compiled(functional(GoingLower))),
    "guide, compute_loss": Program(lambda: compiled(functional(ComputesLoss), metrics=["mae"])),
    "autoencoder": Program(lambda: compiled(Autoencoder()), X, draws=True),
    "siamese": Program(lambda: compiled(Siamese(), weighted_metrics=[]), TRIPLETS),
    "two towers": Program(
        lambda: compiled(TwoTowers()),
        {
            "user": rng.integers(0, 9, SAMPLES),
            "item": rng.integers(0, 7, SAMPLES),
            "clicked": rng.integers(0, 2, SAMPLES),
        },
    ),
    "unpacks": Program(
        lambda: compiled(Unpacks(), "mse", metrics=["mae"]), {"image": X, "label": Y}
    ),
    "late head": Program(lambda: compiled(LateHead(), "mse")),
    "late layer in compute_loss": Program(lambda: compiled(LateInLoss())),
    "logs": Program(lambda: compiled(Logs())),
    "speech": Program(
        speech,
        (rng.normal(size=(SAMPLES, 8, 4)), rng.integers(1, 6, (SAMPLES, 3))),
        TOLERANCE["float32"],  # in which TensorFlow computes the loss
    ),
}
