"""One model, data of several structures: each is trained as in plain Keras."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from comparison import largest_difference

from problems import TOLERANCE
from stack import IS_KERAS_3, keras, only_on_tensorflow

rng = np.random.default_rng(5)
X = rng.normal(size=(20, 3)).astype("float32")
Y = rng.normal(size=(20, 2)).astype("float32")
WEIGHT = rng.uniform(0.1, 3, size=20).astype("float32")


@pytest.mark.skipif(not IS_KERAS_3, reason="the reduction is of Keras 3")
@pytest.mark.parametrize(
    ("setting", "size"),
    [({"microbatch_size": 3}, 10), ({"accumulation_steps": 2}, 5)],
    ids=["split", "window"],
)
def test_sample_weights_that_come_later(setting, size):
    """With them the loss divides by their sum: numbers of the whole batch are needed then."""

    def train(setting, size):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        model.compile(keras.optimizers.SGD(0.1), loss)
        if setting:
            bigbatch.accumulate(model, **setting)
        options = {"batch_size": size, "shuffle": False, "verbose": 0}
        losses = [
            model.fit(X, Y, **options, **more).history["loss"]
            for more in ({}, {"sample_weight": WEIGHT}, {})
        ]
        return model.get_weights(), losses

    weights, losses = train(setting, size)
    expected, expected_losses = train(None, 10)
    assert largest_difference(weights, expected) <= TOLERANCE["float32"]
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)


class Twice(keras.Model):
    """Computes its loss twice in a step, as consistency training does."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y, weight = data
        with tf.GradientTape() as tape:
            one = self.compute_loss(x, y, self(x), weight)
            loss = one + self.compute_loss(x, y, self(2 * x), weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"both": loss}


class InFunctions(keras.Model):
    """Has dropout, control flow and the update inside functions that TensorFlow traces."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.dropout = keras.layers.Dropout(0.5, seed=1)
        self.log = keras.metrics.Mean("loss")

    @tf.function
    def call(self, x, training=None):
        return self.dense(self.dropout(x, training=training))

    @tf.function
    def update(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            if self.optimizer.iterations >= 1:
                loss = 2 * loss
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return loss

    def train_step(self, data):
        self.log.update_state(self.update(*data))
        return {"loss": self.log.result()}


@pytest.mark.skipif(not IS_KERAS_3, reason="draws of the full batch are for Keras 3")
@pytest.mark.parametrize("how", ["graph", "xla", "eager"])
@only_on_tensorflow
def test_a_step_that_calls_functions_of_tensorflow(how, monkeypatch):
    """Draws in them are rows of the full batch's, and their update is the one of the batch."""
    if how == "xla":
        step = InFunctions.train_step
        monkeypatch.setattr(InFunctions, "train_step", tf.function(step, jit_compile=True))

    def train(size, **setting):
        keras.utils.set_random_seed(0)
        model = InFunctions()
        model(X[:1])
        model.compile(keras.optimizers.Adam(0.1), run_eagerly=how == "eager")
        if setting:
            bigbatch.accumulate(model, **setting)
        history = model.fit(X, Y, batch_size=size, epochs=2, shuffle=False, verbose=0).history
        return [*model.get_weights(), *history["loss"]]

    whole = train(10)
    for size, setting in ((10, {"microbatch_size": 3}), (5, {"accumulation_steps": 2})):
        assert largest_difference(train(size, **setting), whole) <= TOLERANCE["float32"]
    # In a graph of its own an update cannot be numbered.
    monkeypatch.setattr("bigbatch.backends.tensorflow.compat.polymorphic_function", None)
    with pytest.raises(bigbatch.errors.ContextError, match=r"another tf\.function"):
        train(10, microbatch_size=3)


class Loaded(keras.layers.Layer):
    """Calls a function that was loaded: its Python code is not there."""

    def __init__(self, path):
        super().__init__()
        module = tf.Module()
        module.weight = tf.Variable(tf.ones([3, 2]))
        module.call = tf.function(lambda x, training=False: x @ module.weight)
        module.call.get_concrete_function(tf.TensorSpec([None, 3]))
        tf.saved_model.save(module, path)
        self.module = tf.saved_model.load(path)

    def call(self, x):
        return self.module.call(x)


class Declares(keras.Model):
    """Its loss is a function that declares the types of its arguments."""

    def __init__(self):
        super().__init__()
        self.dense, self.dropout = keras.layers.Dense(2), keras.layers.Dropout(0.3, seed=1)

    def call(self, x, training=False):
        return self.dense(self.dropout(x, training=training))

    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([])])
    def loss_of(self, error, power):
        return tf.reduce_mean(error**2) * tf.sqrt(power)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(y - self(x, training=True), power=4)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class Compiled(keras.Model):
    """XLA compiles its forward pass."""

    def __init__(self):
        super().__init__()
        self.norm, self.dense = keras.layers.BatchNormalization(), keras.layers.Dense(2)
        self(X[:1])

    @tf.function(jit_compile=True)
    def call(self, x, training=False):
        return self.dense(self.norm(x, training=training))


@pytest.mark.skipif(not IS_KERAS_3, reason="draws of the full batch are for Keras 3")
@only_on_tensorflow
def test_functions_of_tensorflow_of_other_kinds(tmp_path):
    """Loaded, with declared arguments, of TensorFlow itself in eager mode, compiled by XLA."""
    counts = lambda: [keras.metrics.AUC(multi_label=True, num_labels=2)]  # noqa: E731
    dense = lambda: keras.layers.Dense(2, "sigmoid")  # noqa: E731
    kinds = {
        "loaded": (lambda: keras.Sequential([Loaded(str(tmp_path)), dense()]), {}),
        "declared": (Declares, {}),
        "eager": (
            lambda: keras.Sequential([dense()]),
            {"run_eagerly": True, "metrics": counts},
        ),
        "compiled": (Compiled, {"jit_compile": False}),
    }
    for name, (make, options) in kinds.items():

        def train(make=make, options=options, **setting):
            keras.utils.set_random_seed(0)
            model = make()
            made = {key: one() if callable(one) else one for key, one in options.items()}
            model.compile("sgd", "mse", **made)
            if setting:
                bigbatch.accumulate(model, **setting)
            model.fit(X, (Y > 0).astype("float32"), batch_size=10, shuffle=False, verbose=0)
            return model.get_weights()

        exact = {"batch_norm": "exact", "check": "off"} if name == "compiled" else {}
        found = train(microbatch_size=3, **exact)
        assert largest_difference(found, train()) <= TOLERANCE["float32"], name


class FixedSize(keras.layers.Layer):
    """Has to know how many samples there are when it is traced."""

    def call(self, x):
        return x * tf.ones([int(x.shape[0]), 1])


@pytest.mark.skipif(not IS_KERAS_3, reason="the reduction is of Keras 3")
@pytest.mark.parametrize("run_eagerly", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize(
    ("setting", "size"),
    [({"microbatch_size": 3}, 10), ({"accumulation_steps": 2}, 5)],
    ids=["split", "window"],
)
@only_on_tensorflow
def test_a_loss_that_is_computed_twice_in_a_custom_step(setting, size, run_eagerly):
    def train(setting, size):
        keras.utils.set_random_seed(0)
        model = Twice()
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        model.compile(keras.optimizers.SGD(0.01), loss, run_eagerly=run_eagerly)
        if setting:
            bigbatch.accumulate(model, **setting)
        options = {"batch_size": size, "shuffle": False, "verbose": 0}
        model.fit(X, Y, sample_weight=WEIGHT, **options)
        return model.get_weights()

    difference = largest_difference(train(setting, size), train(None, 10))
    assert difference <= TOLERANCE["float32"]


@pytest.mark.parametrize("coupled", [False, True])
@only_on_tensorflow
def test_a_model_that_must_know_the_number_of_samples(coupled):
    def train(**setting):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([FixedSize(), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        if setting:
            bigbatch.accumulate(model, **setting)
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(10, drop_remainder=True)
        model.fit(data, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    difference = largest_difference(train(microbatch_size=5, coupled=coupled), train())
    assert difference <= TOLERANCE["float32"]


class Auxiliary(keras.Model):
    """Has a second output, in training only."""

    def __init__(self):
        super().__init__()
        self.one, self.other = keras.layers.Dense(2), keras.layers.Dense(2)

    def call(self, x, training=False):
        return (self.one(x), self.other(x)) if training else self.one(x)


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 builds losses when it computes them")
@pytest.mark.parametrize(
    ("setting", "size"),
    [({"microbatch_size": 3}, 10), ({"accumulation_steps": 2}, 5)],
    ids=["split", "window"],
)
@only_on_tensorflow
def test_outputs_of_training_alone(setting, size):
    def train(setting, size):
        keras.utils.set_random_seed(0)
        model = Auxiliary()
        model.compile("sgd", ["mse", "mse"], loss_weights=[1, 0.4])
        if setting:
            bigbatch.accumulate(model, **setting)
        model.fit(X, [Y, Y[::-1]], batch_size=size, shuffle=False, verbose=0)
        return model.get_weights()

    difference = largest_difference(train(setting, size), train(None, 10))
    assert difference <= TOLERANCE["float32"]


@pytest.mark.parametrize("run_eagerly", [False, True], ids=["graph", "eager"])
def test_arrays_in_train_on_batch(run_eagerly):
    def train(**setting):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=run_eagerly)
        if setting:
            bigbatch.accumulate(model, **setting)
        model.train_on_batch(X, Y)
        return model.get_weights()

    assert largest_difference(train(microbatch_size=3), train()) <= TOLERANCE["float32"]


def test_the_size_of_micro_batches_is_not_zero():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    bigbatch.accumulate(model, accumulation_steps=1)
    model.fit(X, Y, verbose=0)
    assert bigbatch.microbatch_size(model) is None
