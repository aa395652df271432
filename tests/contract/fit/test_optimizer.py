"""The user's optimizer in `fit` is left alone and sees updates only."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import bigbatch
from comparison import check_same
from fit_cases import CASES, DENSE_X, DENSE_Y, Case, dense, mostly_matrix

from problems import TOLERANCE, built_in_optimizers
from stack import HAS_LEGACY, keras, loss_scale, new_optimizers, with_loss_scale


def constrained():
    hidden = keras.layers.Dense(8, "tanh", kernel_constraint=keras.constraints.MaxNorm(0.5))
    return keras.Sequential([keras.Input((5,)), hidden, keras.layers.Dense(3)])


class Halves(keras.optimizers.SGD):
    """Changes gradients where many examples do."""

    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        halves = [(0.5 * gradient, variable) for gradient, variable in grads_and_vars]
        return super().apply_gradients(halves, *args, **kwargs)


OPTIMIZERS = {
    "apply_gradients of its own": lambda: Halves(0.1),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.PiecewiseConstantDecay([1, 3], [0.1, 0.01, 0.2])
    ),
    "clipvalue": lambda: keras.optimizers.Adam(0.01, clipvalue=0.01),
    "clipnorm": lambda: keras.optimizers.Adam(0.01, clipnorm=0.05),
    "weight decay": lambda: new_optimizers().AdamW(0.01, weight_decay=0.1),
    "EMA with overwrite": lambda: new_optimizers().SGD(
        0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "EMA without overwrite": lambda: new_optimizers().SGD(0.1, use_ema=True, ema_momentum=0.5),
    "loss scaling": lambda: with_loss_scale(
        keras.optimizers.SGD(0.1), 2.0**10, dynamic_growth_steps=2
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_settings(name, mode):
    case = Case(constrained, optimizer=OPTIMIZERS[name])
    result, expected = case.accumulate(mode), case.train()
    check_same(result, expected, TOLERANCE["float32"])


@pytest.mark.parametrize(
    "units", mostly_matrix([(5, 1), (1, 5), (4, 1, 3, 1)], [(4, 1, 3, 1)]), ids=str
)
def test_clipping_of_variables_of_many_shapes(units, mode):
    """TensorFlow's optimizer of graphs once took a bias of one for a bias of five."""

    def make():
        layers = (keras.layers.Dense(count) for count in units)
        return keras.Sequential([keras.Input((5,)), *layers])

    y = DENSE_Y[:, :1] * np.ones(units[-1], "float32")
    case = Case(make, y=y, optimizer=OPTIMIZERS["clipnorm"], fit={"epochs": 1})
    check_same(case.accumulate(mode), case.train(), TOLERANCE["float32"])


@pytest.mark.parametrize(
    "name",
    mostly_matrix(
        ["schedule", "clipnorm", "EMA with overwrite", "loss scaling"],
        ["loss scaling"],
    ),
)
def test_settings_on_two_replicas(name, mode, mirrored):
    case = Case(constrained, optimizer=OPTIMIZERS[name])
    expected = case.train()
    with mirrored.scope():
        result = case.accumulate(mode)
    check_same(result, expected, TOLERANCE["float32"])


LEGACY = {
    "adam": lambda legacy: legacy.Adam(0.01, global_clipnorm=0.1),
    "momentum": lambda legacy: legacy.SGD(0.1, momentum=0.9, clipvalue=0.01),
}


@pytest.mark.skipif(not HAS_LEGACY, reason="of Keras 2")
@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("name", LEGACY)
def test_legacy_optimizers(name, is_scaled, mode, mirrored):
    def make():
        optimizer = LEGACY[name](keras.optimizers.legacy)
        return with_loss_scale(optimizer, 2.0**8) if is_scaled else optimizer

    case = Case(constrained, optimizer=make)
    expected = case.train()
    check_same(case.accumulate(mode), expected, TOLERANCE["float32"])
    with mirrored.scope():
        result = case.accumulate(mode)
    check_same(result, expected, TOLERANCE["float32"])


@pytest.mark.matrix
@pytest.mark.parametrize("name", built_in_optimizers())
def test_every_built_in_optimizer(name, mode):
    case = Case(dense, optimizer=built_in_optimizers()[name], fit={"epochs": 1})

    def build(model):
        # ScheduleFreeAdamW starts from other values if Keras builds it while tracing.
        model.optimizer.build(model.trainable_variables)

    result, expected = case.accumulate(mode), case.train(build)
    # Some divide by the root of a sum of squares of nearly zero: rounding is magnified.
    check_same(result, expected, 5e-5)


def test_it_is_the_same_object_with_the_same_methods(mode):
    model, _ = CASES["dense"].accumulate(mode)
    optimizer = model.optimizer
    assert type(optimizer) is new_optimizers().Adam
    assert not {"apply", "scale_loss", "apply_gradients"} & set(vars(optimizer))
    bigbatch.restore(model)
    assert model.optimizer is optimizer


def test_an_infinite_micro_batch_skips_the_whole_update(mode):
    """As the full batch does: the scale is halved and no weight moves."""
    x = DENSE_X[:42].astype("float32")
    x[9] = np.inf
    scaled = lambda: with_loss_scale(keras.optimizers.SGD(0.1), 2.0**15)  # noqa: E731
    case = Case(dense, x, DENSE_Y[:42], optimizer=scaled, fit={"epochs": 1})
    result, expected = case.accumulate(mode), case.train()
    assert loss_scale(result.model.optimizer) == loss_scale(expected.model.optimizer) == 2.0**14
    # The loss of the epoch is not a number in either.
    assert not np.isfinite([*result.history["loss"], *expected.history["loss"]]).any()
    result, expected = (replace(one, history={}) for one in (result, expected))
    check_same(result, expected, TOLERANCE["float32"])


def test_learning_rate_callbacks(mode):
    def callbacks():
        return [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
            keras.callbacks.ReduceLROnPlateau("loss", factor=0.1, patience=1, min_delta=10),
        ]

    case = Case(dense, optimizer=lambda: keras.optimizers.SGD(0.1), fit={"epochs": 4})
    result = case.accumulate(mode, callbacks=callbacks())
    check_same(result, case.train(callbacks=callbacks()), TOLERANCE["float32"])
