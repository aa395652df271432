"""Wrong versions of the code, each a mistake others shipped: a contract test must fail."""

from __future__ import annotations

import functools
from dataclasses import replace

import keras
import pytest
import tensorflow as tf

from bigbatch.backends.tensorflow import data, two_passes
from bigbatch.backends.tensorflow.rollback import Rollback
from bigbatch.engine.batch_norm import BatchNorm
from bigbatch.engine.feeds import Batches
from bigbatch.engine.microbatch import MicroBatch
from bigbatch.engine.update import Update
from bigbatch.loops import value_and_gradients as loop
from bigbatch.loops.buffers import GradientBuffer
from bigbatch.loops.window import GradientWindow
from comparison import check_same
from fit_cases import CASES

from contract import test_buffers, test_coupled, test_equality, test_last_window
from contract.fit import test_rollback, test_what_differs
from problems import TOLERANCE, dense_problem


@functools.lru_cache(None)
def passes_unbroken(check):
    """Run a check on the code as it is, once: a check that fails there shows nothing."""
    check()
    return True


def check_catches(mistake, check, monkeypatch):
    assert passes_unbroken(check)
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        check()


def test_a_check_that_never_passes_is_no_control(monkeypatch):
    def always_fails():
        raise AssertionError("broken all the time")

    with pytest.raises(AssertionError, match="broken all the time"):
        check_catches(lambda _: None, always_fails, monkeypatch)


def test_a_mistake_that_is_not_seen_is_reported(monkeypatch):
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_catches(lambda _: None, lambda: None, monkeypatch)


def mean_of_means(monkeypatch):
    add = GradientWindow.add
    one = tf.constant(1.0, tf.float64)
    monkeypatch.setattr(
        GradientWindow, "add", lambda self, gs, weight, repeated: add(self, gs, one, repeated)
    )


def missing_reset(monkeypatch):
    monkeypatch.setattr(GradientBuffer, "reset", lambda *_: None)


def reset_times_zero(monkeypatch):
    def reset(self, kind=None):
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
    check_catches(mistake, check, monkeypatch)


def random_state_not_replayed(monkeypatch):
    monkeypatch.setattr(two_passes, "changed_in", lambda graph: [])


def temperature_gets_its_gradient_twice(monkeypatch):
    added = two_passes.added
    twice = lambda one, other: added(added(one, other), other)  # noqa: E731
    monkeypatch.setattr(two_passes, "added", twice)


@pytest.mark.parametrize(
    ("mistake", "check"),
    [
        (
            random_state_not_replayed,
            lambda: test_coupled.test_random_layers_draw_once_and_state_changes_once("graph"),
        ),
        (
            temperature_gets_its_gradient_twice,
            test_coupled.test_a_temperature_in_the_loss_gets_its_gradient_once,
        ),
    ],
)
def test_the_contract_of_coupled_losses_catches(mistake, check, monkeypatch):
    check_catches(mistake, check, monkeypatch)


def mean_of_means_without_state(monkeypatch):
    monkeypatch.setattr(loop, "sample_count", lambda _: tf.constant(6.0))


def test_the_contract_catches_a_mean_of_means_without_state(monkeypatch):
    def check():
        test_equality.test_value_and_gradients(dense_problem, "mean", 7, "graph")

    check_catches(mean_of_means_without_state, check, monkeypatch)


def uncorrected_terms(monkeypatch):
    monkeypatch.setattr(MicroBatch, "correction", lambda *_: None)


def unweighted_micro_batches(monkeypatch):
    monkeypatch.setattr(data, "sample_count", lambda _: 7)


def spread_of_the_means_left_out(monkeypatch):
    call = BatchNorm._call

    def without_spread(self, moments, graph, layer, *args, **kwargs):
        outputs = call(self, moments, graph, layer, *args, **kwargs)
        count, first, second = moments[-1]
        moments[-1] = (count, first, second - first * first / count)
        return outputs

    monkeypatch.setattr(BatchNorm, "_call", without_spread)


def last_window_dropped(monkeypatch):
    finish = Batches._finish

    def of_whole_windows(self, trainer):
        if self._filled == self._length:
            return finish(self, trainer)
        trainer.phases.rollback.restore()
        self._end_window()
        return self._logs

    monkeypatch.setattr(Batches, "_can_wait", lambda self, trainer: False)
    monkeypatch.setattr(Batches, "_finish", of_whole_windows)


def last_window_divided_by_its_nominal_length(monkeypatch):
    local = Update.local

    def nominal(self, totals, samples, **options):
        totals = totals._replace(samples=samples, loss_weight=samples)
        return local(self, totals, samples, **options)

    monkeypatch.setattr(Update, "local", nominal)


def nothing_rolled_back(monkeypatch):
    monkeypatch.setattr(Rollback, "restore", lambda self: None)


@functools.lru_cache(None)
def fit_case(name, mode="split"):
    """Return the same check each time, so that it runs unbroken once."""
    # Of an optimizer that does not hide the scale of gradients, as Adam and clipping do.
    case = replace(CASES[name], optimizer=lambda: keras.optimizers.SGD(0.1))

    def check():
        # What `fit` finds by checking itself is tested elsewhere.
        result, expected = case.accumulate(mode, {"check": "off"}), case.train()
        check_same(result, expected, TOLERANCE["float32"])

    return check


def pooled_statistics():
    test_what_differs.test_pooled_statistics_are_those_of_the_full_batch("momentum", "split")


def rolled_back():
    test_rollback.test_a_failure_in_the_second_batch_leaves_the_state_after_the_first(
        "split", "pooled", 1
    )


@pytest.mark.parametrize(
    ("mistake", "check"),
    [
        (uncorrected_terms, fit_case("masked")),
        (uncorrected_terms, fit_case("masked", "window")),
        (uncorrected_terms, fit_case("sum")),
        (uncorrected_terms, fit_case("two outputs")),
        (unweighted_micro_batches, fit_case("dense")),
        (unweighted_micro_batches, fit_case("dense", "window")),
        (last_window_dropped, fit_case("dense", "window")),
        (last_window_divided_by_its_nominal_length, fit_case("dense", "window")),
        (spread_of_the_means_left_out, pooled_statistics),
        (nothing_rolled_back, rolled_back),
    ],
)
def test_the_contract_of_fit_catches(mistake, check, monkeypatch):
    check_catches(mistake, check, monkeypatch)
