"""Models and data for `fit` on torch: the cases of `fit_cases`, custom steps in torch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import torch

from fit_cases import CASES as ALL_CASES
from fit_cases import TOKEN_Y, TOKENS, WEIGHTS, Case, mean_squared_error

layers, ops = keras.layers, keras.ops


class AddsLoss(layers.Layer):
    def call(self, inputs):
        self.add_loss(0.1 * ops.mean(ops.square(inputs)))
        return inputs


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


class OwnTrainStep(keras.Model):
    """As in the Keras guide for torch: its own backward pass, no scaling, its own logs."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(8, "tanh"), layers.Dense(3)

    def call(self, x):
        return self.out(self.hidden(x))

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        y_pred = self(x, training=True)
        loss = self.compute_loss(x, y, y_pred)
        loss.backward()
        variables = list(self.trainable_weights)
        gradients = [variable.value.grad for variable in variables]
        with torch.no_grad():
            self.optimizer.apply(gradients, variables)
        return {"my_loss": loss, "norm": torch.mean(torch.square(y_pred))}


class ZeroesLast(OwnTrainStep):
    """Clears the gradients when it has used them, in place, and scales its loss."""

    def train_step(self, data):
        x, y = data
        y_pred = self(x, training=True)
        loss = self.compute_loss(x, y, y_pred)
        self.optimizer.scale_loss(loss).backward()
        variables = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in variables], variables)
        self.zero_grad(set_to_none=False)
        return {"my_loss": loss}


class NoGradAttribute(OwnTrainStep):
    """Asks autograd for gradients; `.grad` is never used."""

    def train_step(self, data):
        x, y = data
        loss = self.compute_loss(x, y, self(x, training=True))
        variables = list(self.trainable_weights)
        gradients = torch.autograd.grad(loss, [v.value for v in variables])
        with torch.no_grad():
            self.optimizer.apply(gradients, variables)
        return {"my_loss": loss}


class OwnComputeLoss(OwnTrainStep):
    train_step = keras.Model.train_step

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        norm = torch.sum(torch.square(self.out.kernel.value))
        return loss + 0.1 * torch.mean(torch.abs(y_pred)) + 0.005 * norm


class OwnTracker(OwnTrainStep):
    """The pattern of the Keras guide: a metric that is updated with the loss of the batch."""

    def __init__(self):
        super().__init__()
        self.tracker = keras.metrics.Mean(name="loss")

    def train_step(self, data):
        self.tracker.update_state(super().train_step(data)["my_loss"])
        return {"loss": self.tracker.result()}


class OwnStateInLoss(OwnTrainStep):
    """Changes a metric whenever its loss is computed."""

    train_step = keras.Model.train_step

    def __init__(self):
        super().__init__()
        self.total = keras.metrics.Sum(name="total")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        self.total.update_state(ops.abs(y - y_pred))
        return super().compute_loss(x, y, y_pred, sample_weight)


class TwoOptimizers(keras.Model):
    """Two networks, each with its own optimizer and loss, from one backward pass."""

    def __init__(self):
        super().__init__()
        self.one, self.two = layers.Dense(3), layers.Dense(3)
        self.one_optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        self.two_optimizer = keras.optimizers.Adam(0.01, clipnorm=0.1)

    def call(self, x):
        return self.one(x) + self.two(x)

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        losses = {}
        for network, optimizer in (
            (self.one, self.one_optimizer),
            (self.two, self.two_optimizer),
        ):
            loss = losses[network.name] = torch.mean(torch.square(y - network(x)))
            loss.backward()
            variables = list(network.trainable_weights)
            with torch.no_grad():
                optimizer.apply([v.value.grad for v in variables], variables)
        return {"one": losses[self.one.name], "two": losses[self.two.name]}


def scalar_loss(y_true: Any, y_pred: Any) -> Any:
    return torch.mean(torch.square(y_true - y_pred))


LABELS = np.random.default_rng(5).integers(0, 3, len(WEIGHTS))
SAME = [
    "dense",
    "regularised",
    "convolutional",
    "sum",
    "sample weights",
    "mean with sample weights",
    "class weights",
    "masked",
    "recurrent",
    "masked, mean with sample weights",
    "two outputs",
    "frozen and unused",
]
CASES = {name: ALL_CASES[name] for name in SAME} | {
    "add_loss": Case(adds_loss),
    "metrics of a layer": Case(tracks, TOKENS, TOKEN_Y),
    "masked, reduced by the loss function": Case(
        ALL_CASES["masked"].make_model, TOKENS, TOKEN_Y, loss=lambda: scalar_loss
    ),
    "reduced by the loss function": Case(
        ALL_CASES["dense"].make_model, loss=lambda: scalar_loss
    ),
    "own train_step": Case(OwnTrainStep),
    "own train_step, zeroes last": Case(ZeroesLast),
    "own train_step, autograd.grad": Case(NoGradAttribute),
    "own tracker": Case(OwnTracker),
    "own compute_loss": Case(OwnComputeLoss),
    "own state in the loss": Case(
        OwnStateInLoss,
        loss=mean_squared_error("mean_with_sample_weight"),
        fit={"sample_weight": WEIGHTS},
    ),
}
