"""Wrong versions of the code, each a mistake others shipped: a contract test must fail."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from bigbatch.keras import runner
from bigbatch.keras.batch_norm import BatchNorm
from bigbatch.keras.runner import Runner
from bigbatch.tf import gradients as gradients_module
from bigbatch.tf.buffers import GradientBuffer
from bigbatch.tf.window import GradientWindow
from fit_cases import CASES

from contract import test_buffers, test_equality, test_fit, test_last_window
from problems import TOLERANCE, dense_problem


def mean_of_means(monkeypatch):
    add = GradientWindow.add
    one = tf.constant(1.0, tf.float64)
    monkeypatch.setattr(GradientWindow, "add", lambda self, gs, weight: add(self, gs, one))


def missing_reset(monkeypatch):
    monkeypatch.setattr(GradientBuffer, "reset", lambda self: None)


def reset_times_zero(monkeypatch):
    def reset(self):
        self._sum.assign(self._sum.read_value() * 0)
        if self.shape.rank:
            self._used.assign(0)

    monkeypatch.setattr(GradientBuffer, "reset", reset)


def weight_zero_multiplies(monkeypatch):
    monkeypatch.setattr(tf.math, "multiply_no_nan", tf.multiply)


def unequal_partition():
    test_equality.test_accumulator(dense_problem, "float64", "sgd", "unequal", "graph")


def next_window():
    test_last_window.test_nothing_of_one_window_is_left_in_the_next("flush")


@pytest.mark.parametrize(
    ("mistake", "check"),
    [
        (mean_of_means, unequal_partition),
        (missing_reset, next_window),
        (reset_times_zero, test_buffers.test_nan_does_not_survive_a_reset),
        (weight_zero_multiplies, test_buffers.test_weight_zero_changes_nothing_even_of_a_nan),
    ],
    ids=lambda function: function.__name__,
)
def test_the_contract_catches(mistake, check, monkeypatch):
    check()
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        check()


def test_the_contract_catches_a_mean_of_means_without_state(monkeypatch):
    def check():
        test_equality.test_value_and_gradients(dense_problem, "mean", 7, "graph")

    check()
    monkeypatch.setattr(gradients_module, "sample_count", lambda _: np.float64(6.0))
    with pytest.raises(AssertionError):
        check()


def uncorrected_terms(monkeypatch):
    monkeypatch.setattr(Runner, "_correction", lambda *_: None)


def unweighted_micro_batches(monkeypatch):
    monkeypatch.setattr(runner, "sample_count", lambda _: 7)


def spread_of_the_means_left_out(monkeypatch):
    def moments(self, samples):
        weight = tf.cast(samples, tf.float64)
        return [
            (weight * tf.cast(mean - old, tf.float64), weight * tf.cast(variance, tf.float64))
            for (mean, variance), (old, _) in zip(self._statistics(), self._before)
        ]

    monkeypatch.setattr(BatchNorm, "moments", moments)


def fit_case(name):
    def check():
        result, expected = CASES[name].train(test_fit.accumulated()), CASES[name].train()
        test_fit.check_same(result, expected, TOLERANCE["float32"])

    return check


@pytest.mark.parametrize(
    ("mistake", "check"),
    [
        (uncorrected_terms, fit_case("masked")),
        (uncorrected_terms, fit_case("sum")),
        (uncorrected_terms, fit_case("two outputs")),
        (unweighted_micro_batches, fit_case("dense")),
        (
            spread_of_the_means_left_out,
            test_fit.test_pooled_statistics_are_those_of_the_full_batch,
        ),
    ],
    ids=["masked", "sum", "two outputs", "mean of means", "spread left out"],
)
def test_the_contract_of_fit_catches(mistake, check, monkeypatch):
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        check()
