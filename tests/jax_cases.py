"""Models with a `train_step` of their own, as one writes them on JAX; see `fit_cases`."""

from __future__ import annotations

from typing import Any

import jax
import keras
from keras import layers, ops


class OwnTrainStep(keras.Model):
    """As in the Keras guide: its own gradient, no scaling of the loss, its own logs."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(8, "tanh"), layers.Dense(3)

    def call(self, x):
        return self.out(self.hidden(x))

    def gradients_of(self, state: Any, data: Any) -> Any:
        trainable, others, _, _ = state
        x, y = data

        def loss_of(trainable: Any) -> Any:
            y_pred, new = self.stateless_call(trainable, others, x)
            return self.compute_loss(x, y, y_pred), (y_pred, new)

        return jax.value_and_grad(loss_of, has_aux=True)(trainable)

    def train_step(self, state, data):
        (loss, (y_pred, others)), gradients = self.gradients_of(state, data)
        trainable, _, slots, metrics = state
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        logs = {"my_loss": loss, "norm": ops.mean(ops.square(y_pred))}
        return logs, (trainable, others, slots, metrics)


class OwnTracker(OwnTrainStep):
    """The pattern of the Keras guide: a metric that is updated with the loss of the batch."""

    def __init__(self):
        super().__init__()
        self.tracker = keras.metrics.Mean(name="loss")

    def train_step(self, state, data):
        logs, (trainable, others, slots, metrics) = super().train_step(state, data)
        new: list[Any] = []
        for metric in self.metrics:
            own = metrics[len(new) : len(new) + len(metric.variables)]
            if metric is self.tracker:
                own = metric.stateless_update_state(own, logs["my_loss"])
                logs = {"loss": metric.stateless_result(own)}
            new += own
        return logs, (trainable, others, slots, new)
