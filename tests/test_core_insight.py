"""Noise scale, schedules and learning rates: arithmetic, with a known truth."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest

import bigbatch
from bigbatch.backends.learning_rate import ScaledSchedule
from bigbatch.core.noise import Estimate, noise_and_signal
from bigbatch.errors import ArgumentError

SIZES = np.array([3, 8, 5, 1])
SIGNAL = np.array([1.0, -2.0, 0.5, 0.0])
"""The true gradient, |G|² = 5.25."""
NOISE = np.array([4.0, 1.0, 9.0, 2.0])
"""Standard deviations of one sample's gradient, tr Σ = 102."""


def draw(rng, sizes=SIZES):
    """Return the squared norms of micro-batch gradients, and of the gradient of all."""
    parts = SIGNAL + rng.normal(size=(len(sizes), 4)) * NOISE / np.sqrt(sizes)[:, None]
    mean = sizes @ parts / sizes.sum()
    return np.sum(parts**2, 1), np.sum(mean**2)


def average_of(formula, updates=40_000):
    rng = np.random.default_rng(0)
    results = np.array([formula(*draw(rng)) for _ in range(updates)])
    return results.mean(0), results.std(0) / math.sqrt(updates)


def unbiased(norms, norm_of_mean):
    weighted = SIZES @ norms / SIZES.sum()
    return noise_and_signal(weighted, norm_of_mean, SIZES.sum(), len(SIZES))


def check_is_unbiased(formula):
    (noise, signal), (noise_error, signal_error) = average_of(formula)
    assert abs(noise - np.sum(NOISE**2)) < 4 * noise_error
    assert abs(signal - np.sum(SIGNAL**2)) < 4 * signal_error


def test_noise_and_signal_are_unbiased_for_unequal_micro_batches():
    check_is_unbiased(unbiased)


def test_the_formula_for_equal_micro_batches_would_be_biased():
    """Negative control: sizes matter."""

    def for_equal_sizes(norms, norm_of_mean):
        return noise_and_signal(norms.mean(), norm_of_mean, SIZES.sum(), len(SIZES))

    check_is_unbiased(unbiased)
    with pytest.raises(AssertionError):
        check_is_unbiased(for_equal_sizes)


def estimator_after(updates, seed=0, sizes=SIZES):
    rng, estimator = np.random.default_rng(seed), bigbatch.NoiseScaleEstimator()
    for _ in range(updates):
        norms, norm_of_mean = draw(rng, sizes)
        estimator.add(sizes, norms, norm_of_mean)
    return estimator.estimate


def test_the_interval_holds_the_truth():
    sizes, truth = np.array([64] * 4), np.sum(NOISE**2) / np.sum(SIGNAL**2)
    estimates = [estimator_after(300, seed, sizes) for seed in range(40)]
    hits = [one.interval[0] <= truth <= one.interval[1] for one in estimates]
    assert sum(hits) >= 34  # 95 % of 40 is 38; fewer than 34 would happen once in 10,000


def test_too_little_is_not_yet_known():
    assert estimator_after(1).critical_batch_size is None
    noisy = estimator_after(3)
    assert noisy.critical_batch_size is None
    assert noisy.interval is None
    assert "not yet known" in noisy.advice()
    assert Estimate().critical_batch_size is None
    assert "not yet known" in Estimate().advice()


@pytest.mark.parametrize(
    ("size", "words"), [(1, "far below"), (5, "near"), (64, "above the critical")]
)
def test_advice(size, words):
    estimate = estimator_after(2000, sizes=np.array([size] * 4))
    advice = estimate.advice()
    assert words in advice
    assert f"Your batch of {4 * size}" in advice or words == "above the critical"
    low, high = estimate.interval
    agrees = {"below": estimate.batch_size < low, "above": estimate.batch_size > high}
    agrees["near"] = not any(agrees.values())
    assert [word for word in agrees if f" {word} the critical" in advice] == [
        word for word, is_so in agrees.items() if is_so
    ]


def test_nan_leaves_the_average_alone():
    estimator = bigbatch.NoiseScaleEstimator()
    estimator.add([4, 4], [1.0, math.nan], 1.0)
    assert estimator.estimate.updates == 0


@pytest.mark.parametrize("arguments", [([4], [1.0], 1.0), ([4, 4], [1.0], 1.0)])
def test_bad_micro_batches(arguments):
    with pytest.raises(ArgumentError, match="at least two micro-batches"):
        bigbatch.NoiseScaleEstimator().add(*arguments)


def test_piecewise():
    schedule = bigbatch.piecewise({1000: 4, 0: 1, 2000: 2})
    assert [schedule(n) for n in (0, 999, 1000, 1999, 2000, 10**9)] == [1, 1, 4, 4, 2, 2]
    assert schedule == bigbatch.piecewise({0: 1, 1000: 4, 2000: 2})


@pytest.mark.parametrize(
    "steps", [{}, {1: 2}, {0: 0}, {0: 1, -1: 2}, {0: 1.5}, [1, 2], {0: 1, "a": 2}]
)
def test_bad_piecewise(steps):
    with pytest.raises(ArgumentError, match="Fix: "):
        bigbatch.piecewise(steps)


def test_grow():
    schedule = bigbatch.grow(to=20, every=10, start=3, factor=1.5)
    assert [schedule(n) for n in (0, 9, 10, 20, 30, 40, 50, 10**9)] == [
        3,
        3,
        4,
        7,
        10,
        15,
        20,
        20,
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        {"to": 0, "every": 1},
        {"to": 4, "every": 0},
        {"to": 4, "every": 1, "start": 5},
        {"to": 4, "every": 1, "factor": 1},
        {"to": 4, "every": 1, "factor": "2"},
    ],
)
def test_bad_growth(arguments):
    with pytest.raises(ArgumentError, match="Fix: "):
        bigbatch.grow(**arguments)


SCHEDULES = keras.optimizers.schedules


@pytest.mark.parametrize(
    "schedule",
    [
        SCHEDULES.ExponentialDecay(0.1, 100, 0.9),
        SCHEDULES.PiecewiseConstantDecay([10, 100], [0.1, 0.05, 0.01]),
        SCHEDULES.PolynomialDecay(0.1, 1000, 0.01),
        SCHEDULES.InverseTimeDecay(0.1, 100, 0.5),
        SCHEDULES.CosineDecay(0.0, 1000, alpha=0.1, warmup_target=0.1, warmup_steps=100),
        SCHEDULES.CosineDecayRestarts(0.1, 100),
    ],
    ids=lambda schedule: type(schedule).__name__,
)
def test_schedules_of_keras_stay_what_they_are(schedule):
    scaled = bigbatch.scale_learning_rate(schedule, batch_size=512, reference_batch_size=128)
    assert type(scaled) is type(schedule)
    for updates in (0, 50, 99, 100, 500, 5000):
        np.testing.assert_allclose(scaled(updates), 4 * schedule(updates), rtol=1e-6)


class Own(SCHEDULES.LearningRateSchedule):
    def __init__(self, peak=0.1):
        self.peak = peak

    def __call__(self, step):
        return self.peak / (1 + keras.ops.cast(step, "float32"))

    def get_config(self):
        return {"peak": self.peak}


def test_an_own_schedule_is_wrapped_and_can_be_saved():
    arguments = {"batch_size": 64, "reference_batch_size": 256, "rule": "sqrt"}
    scaled = bigbatch.scale_learning_rate(Own(), **arguments)
    assert isinstance(scaled, ScaledSchedule)
    with keras.saving.custom_object_scope({"Own": Own}):
        config = SCHEDULES.serialize(scaled)
        again = SCHEDULES.deserialize(config)
    for updates in (0, 7):
        assert float(scaled(updates)) == float(again(updates))
        np.testing.assert_allclose(scaled(updates), Own()(updates) / 2, rtol=1e-6)


def test_a_function_is_scaled():
    rate = bigbatch.scale_learning_rate(
        lambda epoch, rate: rate / (1 + epoch), batch_size=2, reference_batch_size=1
    )
    assert rate(1, 0.5) == 0.5


@pytest.mark.parametrize(
    "arguments",
    [
        {"rate_or_schedule": "0.1"},
        {"rate_or_schedule": None},
        {"rate_or_schedule": True},
        {"rule": "cubic"},
        {"batch_size": 0},
        {"reference_batch_size": 2.5},
    ],
)
def test_bad_learning_rates(arguments):
    good = {"rate_or_schedule": 0.1, "batch_size": 2, "reference_batch_size": 1}
    with pytest.raises(ArgumentError, match="Fix: "):
        bigbatch.scale_learning_rate(**{**good, **arguments})
