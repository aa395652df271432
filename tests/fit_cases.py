"""Models and data for `fit`: one case for each way a loss can be put together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Callable

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from comparison import Fitted, recorded_warnings

from stack import BACKEND, IS_KERAS_3, keras, new_optimizers, ops

SAMPLES = 50
rng = np.random.default_rng(11)
DENSE_X, DENSE_Y = rng.normal(size=(SAMPLES, 5)), rng.normal(size=(SAMPLES, 3))
TOKENS = rng.integers(1, 6, (SAMPLES, 7))
TOKENS[:, 3:] *= rng.random((SAMPLES, 4)) < 0.4  # zero is padding; some rows are short
TOKEN_Y = rng.normal(size=(SAMPLES, 7, 2))
WEIGHTS = rng.random(SAMPLES)
layers = keras.layers


BATCH = 21
MODES = {
    "split": ({"microbatch_size": 8}, BATCH),  # 8 + 8 + 5 samples
    "window": ({"accumulation_steps": 3}, BATCH // 3),  # the last window: 7 + 1 samples
}
"""What `accumulate` is given, and the `batch_size` of `fit`, for updates of `BATCH` samples."""


def as_it_is(model: Any) -> None:
    """Prepare a model for plain training: the full batch."""


@dataclass(frozen=True)
class Case:
    """What to build, compile and fit; everything is made anew each time."""

    make_model: Callable[[], Any]
    x: Any = field(default_factory=lambda: DENSE_X)
    y: Any = field(default_factory=lambda: DENSE_Y)
    loss: Callable[[], Any] | None = lambda: "mse"
    optimizer: Callable[[], Any] = lambda: new_optimizers().Adam(
        0.01,
        global_clipnorm=0.1,
        use_ema=BACKEND != "jax",  # plain Keras cannot fit twice
    )
    compile: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)

    def build(self, prepare: Callable[[Any], Any] = as_it_is, seed: int = 3) -> Any:
        """Return the compiled model, made from a seed."""
        keras.utils.set_random_seed(seed)
        model = self.make_model()
        model.compile(self.optimizer(), self.loss() if self.loss else None, **self.compile)
        prepare(model)
        return model

    def train(
        self, prepare: Callable[[Any], Any] = as_it_is, seed: int = 3, **fit: Any
    ) -> Fitted:
        """Train with `fit`: by default a few updates, the last of an epoch on fewer samples."""
        options = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
        with recorded_warnings() as messages:
            model = self.build(prepare, seed)
            history = model.fit(self.x, self.y, **{**options, **self.fit, **fit}).history
        return Fitted(model, history, tuple(messages))

    def train_on_batches(
        self, batches: Iterable[Any], prepare: Callable[[Any], Any] = as_it_is
    ) -> Fitted:
        """Train with `train_on_batch`, on other data; the logs are those of the last batch."""
        with recorded_warnings() as messages:
            model = self.build(prepare)
            logs = [model.train_on_batch(*batch, return_dict=True) for batch in batches]
        return Fitted(model, logs[-1], tuple(messages))

    def accumulate(
        self, mode: str, options: dict[str, Any] | None = None, **fit: Any
    ) -> Fitted:
        """Return what `train` returns, accumulated in one of `MODES`.

        Other `accumulation_steps` that divide `BATCH` come with smaller or larger batches.
        """
        setting, batch_size = MODES[mode]
        setting = {**setting, **(options or {})}
        if mode == "window" and isinstance(setting["accumulation_steps"], int):
            batch_size, rest = divmod(BATCH, setting["accumulation_steps"])
            assert rest == 0, f"{setting} does not divide {BATCH}: pass batch_size to `train`"
        fit = {"batch_size": batch_size, **fit}
        return self.train(lambda model: bigbatch.accumulate(model, **setting), **fit)

    def compiled(self, **options: Any) -> Case:
        """Return the same case with other arguments of `compile`."""
        return replace(self, compile={**self.compile, **options})


def mostly_matrix(names: Iterable[Any], in_ci: Iterable[Any]) -> list[Any]:
    """Return parameters of a test of which CI runs some: `make test-all` runs all."""
    names, in_ci = list(names), set(in_ci)
    assert in_ci <= set(names)
    return [
        name if name in in_ci else pytest.param(name, marks=pytest.mark.matrix)
        for name in names
    ]


def dense() -> Any:
    return keras.Sequential(
        [keras.Input((5,)), layers.Dense(8, "tanh"), layers.Dropout(0.0), layers.Dense(3)]
    )


def regularised() -> Any:
    hidden = layers.Dense(8, "tanh", kernel_regularizer="l2", activity_regularizer="l2")
    return keras.Sequential([keras.Input((5,)), hidden, layers.Dense(3, bias_regularizer="l2")])


class AddsLoss(layers.Layer):
    def call(self, inputs):
        self.add_loss(0.1 * ops.mean(ops.square(inputs)))
        return inputs


def convolutional() -> Any:
    x = inputs = keras.Input((5,))
    x = layers.Conv1D(4, 3, activation="tanh")(layers.Reshape((5, 1))(x))
    x = layers.Conv2D(4, 2)(layers.Reshape((3, 4, 1))(x))
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x)))


def adds_loss() -> Any:
    return keras.Sequential(
        [keras.Input((5,)), layers.Dense(8, "tanh"), AddsLoss(), layers.Dense(3)]
    )


class Tracks(layers.Layer):
    """Has metrics of its own: one is updated with a number, one with a number per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.supports_masking = True
        self.mean = keras.metrics.Mean(name="mean")
        self.spread = keras.metrics.Mean(name="spread")

    def call(self, x: Any) -> Any:
        self.mean.update_state(ops.mean(x))
        self.spread.update_state(ops.max(x, (1, 2)) - ops.min(x, (1, 2)))
        return x


def tracks() -> Any:
    embedding = layers.Embedding(6, 4, mask_zero=True)
    inputs = keras.Input((7,), dtype="int32")
    return keras.Sequential([inputs, embedding, Tracks(), layers.Dense(2)])


def masked() -> Any:
    return keras.Sequential(
        [
            keras.Input((7,), dtype="int32"),
            layers.Embedding(6, 4, mask_zero=True),
            layers.Dense(6, "tanh"),
            layers.Dense(2),
        ]
    )


def recurrent() -> Any:
    tokens = keras.Input((7,), dtype="int32")
    embedded = layers.Embedding(6, 4, mask_zero=True)(tokens)
    return keras.Model(tokens, layers.Dense(2)(layers.LSTM(3, return_sequences=True)(embedded)))


def two_outputs() -> Any:
    tokens, x = keras.Input((7,), dtype="int32", name="tokens"), keras.Input((5,), name="x")
    hidden = layers.Dense(6, "tanh")(layers.Embedding(6, 4, mask_zero=True)(tokens))
    sequence = layers.Dense(2, name="sequence")(hidden)
    pooled = layers.Concatenate()([layers.GlobalAveragePooling1D()(hidden), layers.Dense(4)(x)])
    outputs = {"sequence": sequence, "single": layers.Dense(3, name="single")(pooled)}
    return keras.Model({"tokens": tokens, "x": x}, outputs)


class OwnTrainStepOnTensorFlow(keras.Model):
    """As in the Keras guide: its own tape, no scaling of the loss, its own logs."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(8, "tanh"), layers.Dense(3)

    def call(self, x):
        return self.out(self.hidden(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"my_loss": loss, "norm": tf.reduce_mean(tf.square(y_pred))}


OwnTrainStep: Any = OwnTrainStepOnTensorFlow
if BACKEND == "jax":
    from jax_cases import OwnTrainStep


class TrainStepIsAFunction(OwnTrainStepOnTensorFlow):
    """Decorated, as in custom loops; not needed in Keras, and seen all the same."""

    train_step = tf.function(OwnTrainStepOnTensorFlow.train_step)


class OwnComputeLoss(OwnTrainStep):
    train_step = keras.Model.train_step

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return (
            loss
            + 0.1 * ops.mean(ops.abs(y_pred))
            + 0.005 * ops.sum(ops.square(self.out.kernel))
        )


class TwoOptimizers(keras.Model):
    """Two networks, each with its own optimizer and loss."""

    def __init__(self):
        super().__init__()
        self.one, self.two = layers.Dense(3), layers.Dense(3)
        self.one_optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        self.two_optimizer = keras.optimizers.Adam(0.01, clipnorm=0.1)

    def call(self, x):
        return self.one(x) + self.two(x)

    def train_step(self, data):
        x, y = data
        pairs = ((self.one, self.one_optimizer), (self.two, self.two_optimizer))
        losses = {}
        with tf.GradientTape(persistent=True) as tape:
            for network, _ in pairs:
                losses[network.name] = tf.reduce_mean(tf.square(y - network(x)))
        for network, optimizer in pairs:
            variables = network.trainable_variables
            gradients = tape.gradient(losses[network.name], variables)
            optimizer.apply_gradients(zip(gradients, variables))
        return {"one": losses[self.one.name], "two": losses[self.two.name]}


class OwnTrackerOnTensorFlow(OwnTrainStepOnTensorFlow):
    """The pattern of the Keras guide: a metric that is updated with the loss of the batch."""

    def __init__(self):
        super().__init__()
        self.tracker = keras.metrics.Mean(name="loss")

    def train_step(self, data):
        self.tracker.update_state(super().train_step(data)["my_loss"])
        return {"loss": self.tracker.result()}


OwnTracker: Any = OwnTrackerOnTensorFlow
if BACKEND == "jax":
    from jax_cases import OwnTracker


class NoCall(OwnTrainStep):
    """Cannot be built before its first `train_step`."""

    call = keras.Model.call

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self.out(self.hidden(x))))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}


class OptimizerOfALayer(OwnTrainStep):
    """One optimizer belongs to a layer, one stands in a list."""

    def __init__(self):
        super().__init__()
        self.hidden.own_optimizer = keras.optimizers.SGD(0.1)
        self.optimizers = [keras.optimizers.SGD(0.2)]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(tf.square(y - self(x)))
        pairs = ((self.hidden, self.hidden.own_optimizer), (self.out, self.optimizers[0]))
        for layer, optimizer in pairs:
            variables = layer.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"loss": loss}


class OwnStateInLoss(OwnTrainStep):
    """Changes a metric whenever its loss is computed."""

    train_step = keras.Model.train_step

    def __init__(self):
        super().__init__()
        self.total = keras.metrics.Sum(name="total")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        self.total.update_state(ops.abs(y - y_pred))
        return super().compute_loss(x, y, y_pred, sample_weight)


def scalar_loss(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(y_true - y_pred))


def frozen_and_unused() -> Any:
    x = keras.Input((5,))
    frozen = layers.Dense(6, "tanh")
    frozen.trainable = False
    return keras.Model(x, layers.Dense(3)(frozen(x)))


def mean_squared_error(reduction: str) -> Callable[[], Any]:
    return lambda: keras.losses.MeanSquaredError(reduction=reduction)


TWO_OUTPUTS = {
    "x": {"tokens": TOKENS, "x": DENSE_X},
    "y": {"sequence": TOKEN_Y, "single": DENSE_Y},
    "loss": lambda: {"sequence": "mse", "single": "mae"},
    "compile": {
        "loss_weights": {"sequence": 0.7, "single": 2.0},
        "metrics": {"sequence": ["mae"], "single": ["mae"]},
    },
}
CASES = {
    "dense": Case(dense, compile={"metrics": ["mae"], "weighted_metrics": ["mse"]}),
    "regularised": Case(regularised),
    "add_loss": Case(adds_loss),
    "convolutional": Case(convolutional),
    "sum": Case(regularised, loss=mean_squared_error("sum")),
    "sample weights": Case(dense, fit={"sample_weight": WEIGHTS}),
    "mean with sample weights": Case(
        regularised,
        loss=mean_squared_error("mean_with_sample_weight"),
        fit={"sample_weight": WEIGHTS},
    ),
    "class weights": Case(
        dense,
        y=rng.integers(0, 3, SAMPLES),
        loss=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        fit={"class_weight": {0: 0.2, 1: 1.0, 2: 3.0}},
    ),
    "masked": Case(masked, TOKENS, TOKEN_Y, compile={"metrics": ["mae"]}),
    "recurrent": Case(recurrent, TOKENS, TOKEN_Y),
    "metrics of a layer": Case(tracks, TOKENS, TOKEN_Y),
    "masked, mean with sample weights": Case(
        masked, TOKENS, TOKEN_Y, loss=mean_squared_error("mean_with_sample_weight")
    ),
    "two outputs": Case(two_outputs, **TWO_OUTPUTS),
    "masked, reduced by the loss function": Case(
        masked, TOKENS, TOKEN_Y, loss=lambda: scalar_loss
    ),
    "reduced by the loss function": Case(dense, loss=lambda: scalar_loss),
    "no reduction": Case(dense, loss=mean_squared_error("none")),
    "own train_step": Case(OwnTrainStep),
    "train_step is a tf.function": Case(TrainStepIsAFunction),
    "own tracker": Case(OwnTracker),
    "no call": Case(
        NoCall,
        loss=None,
        optimizer=keras.optimizers.SGD,
    ),
    "optimizer of a layer": Case(OptimizerOfALayer, loss=None, optimizer=keras.optimizers.SGD),
    "own state in the loss": Case(
        OwnStateInLoss,
        loss=mean_squared_error("mean_with_sample_weight" if IS_KERAS_3 else "sum"),
        fit={"sample_weight": WEIGHTS},
    ),
    "own compute_loss": Case(OwnComputeLoss),
    "two optimizers": Case(TwoOptimizers, loss=None, optimizer=keras.optimizers.SGD),
    "frozen and unused": Case(frozen_and_unused),
}
if not IS_KERAS_3:  # which has no such reduction
    CASES = {name: case for name, case in CASES.items() if "mean with" not in name}
NOT_ON_JAX = (
    "no reduction",  # plain Keras fails there, too
    "metrics of a layer",
    "no call",
    "optimizer of a layer",  # the state that Keras hands over has one optimizer
    "two optimizers",
    "train_step is a tf.function",
)
if BACKEND == "jax":
    CASES = {name: case for name, case in CASES.items() if name not in NOT_ON_JAX}
