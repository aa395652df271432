"""An exact contrastive loss with micro-batches; plain accumulation is silently wrong for it.

The example trains SimCLR on digits: two views of each image should be close to each other, and
far from the other images *of the batch*. A micro-batch alone has few other images, so plain
accumulation learns something different from the full batch. With `coupled=True` it learns the
same.
"""

import warnings

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

import bigbatch

BATCH, MICROBATCH, EPOCHS = 256, 4, 30
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32").reshape(-1, 8, 8)
train, test = slice(0, 1280), slice(1280, None)


def view(images, rng):
    """Return images moved by up to a pixel, with noise."""
    moves = rng.integers(-1, 2, (len(images), 2))
    moved = [np.roll(image, move, (0, 1)) for image, move in zip(images, moves)]
    return (np.array(moved) + rng.normal(0, 0.2, images.shape)).astype("float32")


rng = np.random.default_rng(0)
views = np.stack([view(images[train], rng), view(images[train], rng)], axis=1)


class SimCLR(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential(
            [
                keras.Input((8, 8)),
                keras.layers.Flatten(),
                keras.layers.Dense(128, "relu"),
                keras.layers.Dense(8),
                keras.layers.UnitNormalization(),
            ]
        )
        self.temperature = self.add_weight(shape=(), initializer="ones")

    def call(self, views):
        return tf.stack([self.encoder(views[:, i]) for i in (0, 1)], axis=1)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        one, two = tf.unstack(y_pred, axis=1)
        logits = tf.exp(self.temperature) * tf.matmul(one, two, transpose_b=True)
        labels = tf.range(tf.shape(logits)[0])
        both = [logits, tf.transpose(logits)]
        losses = [tf.nn.sparse_softmax_cross_entropy_with_logits(labels, one) for one in both]
        return tf.reduce_mean(losses)


def run(prepare):
    """Train an encoder; return the accuracy of a linear classifier on its codes, by epoch."""
    keras.utils.set_random_seed(0)
    model = SimCLR()
    model.compile(keras.optimizers.Adam(3e-3))
    prepare(model)

    accuracies = []

    def probe(epoch, _):
        if epoch % 3 == 2:
            codes = model.encoder.predict(images, verbose=0)
            few = slice(0, 100)  # few labels
            classifier = LogisticRegression().fit(codes[few], labels[few])
            accuracies.append(classifier.score(codes[test], labels[test]))

    history = model.fit(
        views,
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=probe)],
    )
    return accuracies, history.history["loss"][-1], float(model.temperature)


warnings.simplefilter("ignore", bigbatch.NotEqualWarning)  # expected here
runs = {
    f"full batch of {BATCH}": run(lambda model: model),
    f"micro-batches of {MICROBATCH}": run(
        lambda model: bigbatch.accumulate(model, microbatch_size=MICROBATCH, coupled=False)
    ),
    f"micro-batches of {MICROBATCH}, coupled": run(
        lambda model: bigbatch.accumulate(model, microbatch_size=MICROBATCH, coupled=True)
    ),
}
print(f"{'':30}{'loss':>8}{'temperature':>13}{'linear probe':>14}")
for name, (accuracies, loss, temperature) in runs.items():
    print(f"{name:30}{loss:8.4f}{temperature:13.4f}{accuracies[-1]:14.1%}")
    style = "--" if "coupled" in name else "-"
    plt.plot(range(3, EPOCHS + 1, 3), accuracies, style, label=name)
plt.xlabel("epoch")
plt.ylabel("accuracy of a linear probe")
plt.legend()
plt.savefig("contrastive.png", dpi=150)
print("wrote contrastive.png")
