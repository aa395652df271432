"""`fit` checks itself on the first batch: it warns of what differs, by name."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from bigbatch.engine.microbatch import MicroBatch
from bigbatch.errors import ArgumentError, DifferenceError
from fit_cases import MODES

from stack import IS_KERAS_3, keras

layers = keras.layers
rng = np.random.default_rng(5)
X = rng.normal(size=(42, 5)).astype("float32")
Y = rng.normal(size=(42, 3)).astype("float32")


def fit(model, mode="split", loss="mse", x=X, y=Y, **options):
    """Train for an epoch; return what the check warned of."""
    model.compile("sgd", loss)
    setting, batch_size = MODES[mode]
    bigbatch.accumulate(model, **{**setting, **options})
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.fit(x, y, batch_size=batch_size, verbose=0, shuffle=False)
    return [str(one.message) for one in found if one.category is bigbatch.NotEqualWarning]


def sequential(*inner):
    return keras.Sequential(
        [keras.Input((5,)), layers.Dense(4, "tanh"), *inner, layers.Dense(3)]
    )


class Step(keras.Model):
    """A custom `train_step` with the loss of its subclass."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(4, "tanh"), layers.Dense(3)

    def call(self, x):
        return self.out(self.hidden(x))

    def loss_of(self, y, z):
        return tf.reduce_mean(tf.square(y - z))

    def clipped(self, gradients):
        return gradients

    def logs(self, loss, z):
        return {"my_loss": loss}

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            z = self(x, training=True)
            loss = self.loss_of(y, z)
        gradients = self.clipped(tape.gradient(loss, self.trainable_variables))
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return self.logs(loss, z)


class Contrastive(Step):
    def loss_of(self, y, z):
        logits = tf.matmul(tf.nn.l2_normalize(y, 1), tf.nn.l2_normalize(z, 1), transpose_b=True)
        labels = tf.range(tf.shape(z)[0])
        return tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels, 5 * logits)
        )


class TwoUpdates(Contrastive):
    """The second update is of the weights after the first."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x)))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return super().train_step(data)


class TwoUpdatesWithDropout(TwoUpdates):
    """Draws that follow the first update are not to blame."""

    def __init__(self):
        super().__init__()
        self.dropout = layers.Dropout(0.5, seed=1)

    def call(self, x):
        return self.out(self.dropout(self.hidden(x), training=True))


class Perturbed(Step):
    """Sharpness-aware: the gradient is that of weights moved along another gradient."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self(x, training=True))
        variables = self.trainable_variables
        moves = tf.clip_by_global_norm(tape.gradient(loss, variables), 0.1)[0]
        for variable, move in zip(variables, moves):
            variable.assign_add(move)
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self(x, training=True))
        gradients = tape.gradient(loss, variables)
        for variable, move in zip(variables, moves):
            variable.assign_sub(move)
        self.optimizer.apply_gradients(zip(gradients, variables))
        return self.logs(loss, None)


class Clipped(Step):
    def clipped(self, gradients):
        return tf.clip_by_global_norm(gradients, 0.1)[0]


class OfPositives(Step):
    """Divides by the number of positive labels."""

    def loss_of(self, y, z):
        return tf.reduce_sum(y * tf.square(y - z)) / (tf.reduce_sum(y) + 1)


class LogsLargest(Step):
    def logs(self, loss, z):
        return {"my_loss": loss, "largest": tf.reduce_max(z)}


class Stddev(layers.Layer):
    """The minibatch standard deviation of a discriminator."""

    def call(self, x):
        spread = tf.reduce_mean(tf.math.reduce_std(x, 0))
        return tf.concat([x, tf.fill([tf.shape(x)[0], 1], spread)], 1)


class Gram(layers.Layer):
    def call(self, x):
        return x + 0.01 * tf.matmul(x, tf.tensordot(x, x, [[0], [0]]))


class Bank(layers.Layer):
    """A memory bank: every call writes its samples."""

    def build(self, shape):
        self.bank = self.add_weight(
            shape=(16, shape[-1]), initializer="random_normal", trainable=False, name="bank"
        )

    def call(self, x, training=False):
        outputs = x + 0.1 * tf.reduce_mean(tf.convert_to_tensor(self.bank), 0)
        if training:
            rows = tf.concat([tf.stop_gradient(x), tf.convert_to_tensor(self.bank)], 0)
            self.bank.assign(tf.ensure_shape(rows[:16], self.bank.shape))
        return outputs


class Similarities(layers.Layer):
    """B × B numbers, of which a loss may do what it likes."""

    def call(self, z):
        return tf.matmul(z, z, transpose_b=True)


class Pairs(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.similarities = layers.Dense(4), Similarities()

    def call(self, x):
        return self.similarities(self.hidden(x))


def log_sum(_, similarities):
    return tf.reduce_mean(tf.reduce_logsumexp(similarities, 1))


PLANTED = {
    "contrastive": (Contrastive, "train_step of Contrastive: its loss compares samples"),
    "two updates": (TwoUpdates, "train_step of TwoUpdates: its loss compares samples"),
    "two updates, dropout": (
        TwoUpdatesWithDropout,
        "train_step of .*: its loss compares samples",
    ),
    "perturbed": (Perturbed, "train_step of Perturbed: it assigns values"),
    "clipped by hand": (Clipped, "train_step of Clipped: .*clipvalue="),
    "logged": (LogsLargest, "logged value 'largest'"),
    "minibatch stddev": (
        lambda: sequential(Stddev()),
        r"layer 'stddev.*' \(Stddev\): it mixes",
    ),
    "tensordot": (lambda: sequential(Gram()), r"layer 'gram.*' \(Gram\): it mixes"),
    "memory bank": (lambda: sequential(Bank()), "variable '.*bank.*': every micro-batch"),
}


def mostly_split():
    """Every difference in split mode; in window mode CI runs two of them."""
    for name in PLANTED:
        for mode in MODES:
            in_ci = mode == "split" or name in ("clipped by hand", "memory bank")
            yield pytest.param(name, mode, marks=() if in_ci else pytest.mark.matrix)


@pytest.mark.parametrize(("name", "mode"), list(mostly_split()))
def test_a_difference_is_told_by_name(name, mode):
    make, expected = PLANTED[name]
    (message,) = fit(make(), mode)
    assert re.search(expected, message), message


def test_few_labels_are_positive():
    """Two of them are among the samples that are tried, one in each part."""
    x, y = np.ones((400, 5), "float32"), np.zeros((400, 1), "float32")
    y[[123, 301]] = 1
    model = OfPositives()
    model.compile("sgd")
    bigbatch.accumulate(model, microbatch_size=100)
    with pytest.warns(bigbatch.NotEqualWarning, match="OfPositives: its loss divides by"):
        model.fit(x, y, batch_size=400, verbose=0)


class Centers(Step):
    """Compares samples with the center of their class."""

    def loss_of(self, y, z):
        same = tf.matmul(y, y, transpose_b=True)
        centers = tf.matmul(same, z) / tf.reduce_sum(same, 1, keepdims=True)
        return tf.reduce_mean(tf.square(z)) + tf.reduce_mean(tf.square(z - centers))


def test_classes_that_are_one_hot():
    """Two samples of a class are tried, one in each part, however far others are apart."""
    labels = np.arange(42) % 7
    x, y = X + 10 * labels[:, None], np.eye(7, dtype="float32")[labels]
    assert "compares samples" in fit(Centers(), x=x, y=y)[0]


def test_outputs_that_are_no_rows():
    (message,) = fit(Pairs(), loss=log_sum)
    assert re.search(r"layer 'similarities.*' \(Similarities\): it mixes", message), message


def of_labels(y, z):
    weights = tf.abs(y)
    return tf.reduce_sum(weights * tf.square(y - z)) / tf.reduce_sum(weights)


def test_two_passes_are_checked(mode, capsys):
    (message,) = fit(sequential(Bank()), mode, loss=of_labels)
    assert re.search(PLANTED["memory bank"][1], message), message
    model = sequential(layers.Dropout(0.5 if IS_KERAS_3 else 0.0))
    assert not fit(model, mode, loss=of_labels)
    model.compile("sgd", of_labels)
    assert not said(capsys, model)


def test_batch_normalisation_is_no_difference_and_hides_none(mode):
    assert not fit(sequential(layers.BatchNormalization(), layers.BatchNormalization()), mode)
    (message,) = fit(sequential(layers.BatchNormalization(), Stddev()), mode)
    assert "(Stddev)" in message


@pytest.mark.skipif(not IS_KERAS_3, reason="nothing is drawn by the rows there")
def test_draws_that_cannot_be_those_of_the_full_batch():
    class Truncated(layers.Layer):
        def __init__(self):
            super().__init__()
            self.seed_generator = keras.random.SeedGenerator(1)

        def call(self, x):
            shape = keras.ops.shape(x)
            return x + keras.random.truncated_normal(shape, seed=self.seed_generator)

    (message,) = fit(sequential(Truncated()))
    assert re.search(r"\(Truncated\): it draws random numbers", message)


def test_a_wrong_accumulator_is_found(monkeypatch, mode):
    """The negative control: a loss that is divided by the number of micro-batches."""
    keep = MicroBatch.keep

    def wrong(self, captured, weight=None):
        captured.is_weighted = False
        return keep(self, captured, tf.constant(0.5, tf.float64))

    monkeypatch.setattr(MicroBatch, "keep", wrong)
    (message,) = fit(Step(), mode)
    assert "the gradient of" in message


def test_raise_changes_nothing(mode):
    keras.utils.set_random_seed(1)
    # Keras 2 cannot repeat its draws: nothing would be checked.
    model = sequential(Bank(), layers.Dropout(0.5 if IS_KERAS_3 else 0.0))
    model.compile("adam", "mse", metrics=["mae"])
    model.train_on_batch(X, Y)
    setting, batch_size = MODES[mode]
    bigbatch.accumulate(model, **setting, check="raise")
    variables = [*model.variables, *model.optimizer.variables]
    before = [variable.numpy() for variable in variables]
    with pytest.raises(DifferenceError, match=r"variable '.*bank"):
        model.fit(X, Y, batch_size=batch_size, verbose=0)
    for variable, value in zip(variables, before):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_two_passes_with_draws_name_a_memory_bank(mode):
    def by_labels(y_true, y_pred):
        return tf.reduce_sum(abs(y_true) * (y_true - y_pred) ** 2) / tf.reduce_sum(abs(y_true))

    (message,) = fit(sequential(Bank(), layers.Dropout(0.5, seed=1)), mode, loss=by_labels)
    assert "bank" in message


def test_off_does_not_look():
    assert not fit(Contrastive(), check="off")


def test_a_wrong_argument():
    with pytest.raises(ArgumentError, match="'warn', 'raise', 'off'"):
        bigbatch.accumulate(sequential(), microbatch_size=2, check="never")


def test_there_is_no_second_trace_and_no_second_check(mode):
    traces = []

    class Counts(Step):
        def loss_of(self, y, z):
            if not tf.executing_eagerly():
                traces.append(z)
            return super().loss_of(y, z)

    def train(**options):
        traces.clear()
        model = Counts()
        fit(model, mode, **options)
        model.fit(X, Y, batch_size=MODES[mode][1], verbose=0)
        return len(traces)

    assert train() == train(check="off")


def said(capsys, model, batch_size=21, **setting):
    bigbatch.accumulate(model, **(setting or {"microbatch_size": 7}))
    x = X[:, :, None] if len(model.input_shape) == 3 else X
    model.fit(x, Y, batch_size=batch_size, verbose=2)
    lines = capsys.readouterr().out.replace("\n" + 10 * " ", " ").splitlines()
    return [line for line in lines if "not checked" in line]


class CallsPython(layers.Layer):
    def call(self, x):
        return x + tf.ensure_shape(tf.numpy_function(lambda one: one, [x], x.dtype), x.shape)


class DrawsAnew(layers.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


def test_what_cannot_be_checked_is_said(capsys):
    model = sequential(CallsPython())
    model.compile("sgd", "mse")
    (line,) = said(capsys, model)
    assert "cannot be undone (PyFunc)" in line
    model = sequential(DrawsAnew())
    model.compile("sgd", "mse")
    (line,) = said(capsys, model)
    assert "random draws that cannot be repeated" in line
    x = keras.Input(batch_shape=(7, 5, 1))
    model = keras.Model(x, layers.Dense(3)(layers.LSTM(2, stateful=True)(x)))
    model.compile("sgd", "mse")
    (line,) = said(capsys, model, 7, accumulation_steps=3)
    assert "a stateful layer" in line


@pytest.mark.parametrize("mode", ["split", pytest.param("window", marks=pytest.mark.matrix)])
def test_on_two_replicas(mirrored, mode):
    with mirrored.scope():
        (message,) = fit(sequential(Stddev()), mode)
        assert "(Stddev)" in message
        assert not fit(sequential(layers.BatchNormalization(), layers.Dropout(0.5)), mode)


# Equal models, in float32: deep, with a true gradient of zero, recurrent.


def convolved(x, filters):
    x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
    return layers.BatchNormalization()(x)


def residual():
    x = image = keras.Input((8, 8, 3))
    x = layers.ReLU()(convolved(x, 8))
    for _ in range(8):
        inner = layers.ReLU()(convolved(x, 8))
        x = layers.ReLU()(x + convolved(inner, 8))
    return keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


def inverted_residual():
    """As EfficientNet: depthwise, swish, squeeze and excitation, dropout of samples."""
    x = image = keras.Input((8, 8, 3))
    x = layers.Activation("swish")(convolved(x, 8))
    for _ in range(5):
        inner = layers.Conv2D(16, 1, use_bias=False)(x)
        inner = layers.Activation("swish")(layers.BatchNormalization()(inner))
        inner = layers.DepthwiseConv2D(3, padding="same", use_bias=False)(inner)
        inner = layers.Activation("swish")(layers.BatchNormalization()(inner))
        gate = layers.Dense(4, "swish")(layers.GlobalAveragePooling2D()(inner))
        gate = layers.Reshape((1, 1, 16))(layers.Dense(16, "sigmoid")(gate))
        inner = layers.BatchNormalization()(layers.Conv2D(8, 1)(inner * gate))
        x = x + layers.Dropout(0.2, noise_shape=(None, 1, 1, 1))(inner)
    return keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


def transformer():
    x = tokens = keras.Input((12,), dtype="int32")
    x = layers.Embedding(30, 16, mask_zero=True)(x)
    for _ in range(4):
        normal = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(2, 8, dropout=0.1)(normal, normal)
        inner = layers.Dense(32, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dropout(0.1)(layers.Dense(16)(inner))
    return keras.Model(tokens, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


def recurrent():
    x = tokens = keras.Input((12,), dtype="int32")
    x = layers.Embedding(30, 16, mask_zero=True)(x)
    x = layers.LSTM(16)(layers.LSTM(16, return_sequences=True)(x))
    return keras.Model(tokens, layers.Dense(3)(x))


IMAGES = rng.normal(size=(42, 8, 8, 3)).astype("float32")
TOKENS = rng.integers(1, 30, (42, 12)) * (np.arange(12) < rng.integers(3, 13, (42, 1)))
EQUAL = {
    "residual": (residual, IMAGES),
    "inverted residual": (inverted_residual, IMAGES),
    "transformer": (transformer, TOKENS),
    "recurrent": (recurrent, TOKENS),
}


@pytest.mark.slow
@pytest.mark.skipif(not IS_KERAS_3, reason="nets of Keras 3")
@pytest.mark.parametrize("name", EQUAL)
def test_equal_models_are_quiet(name):
    make, x = EQUAL[name]
    assert not fit(make(), x=x, check="raise")
