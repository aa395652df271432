"""The comparison of two trainings sees every kind of difference, and none that is not."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace

import numpy as np
import pytest

import comparison
from comparison import Fitted, check_equals_full_batch, check_same, largest_difference, paired
from fit_cases import CASES, Case, dense

import problems
from stack import IS_KERAS_3, keras

TOLERANCE = problems.TOLERANCE["float32"]


def with_state():
    norm = keras.layers.BatchNormalization()
    return keras.Sequential([keras.Input((5,)), norm, keras.layers.Dense(3)])


@functools.lru_cache(None)
def training():
    """A training with weights, optimizer state, moving statistics and two logs."""
    case = Case(with_state, compile={"metrics": ["mae"]})
    return case.train(epochs=1).training


def changed(field, name_part, value_of):
    """Return the training with one entry changed."""
    entries = dict(getattr(training(), field))
    (name, *_) = [one for one in reversed(list(entries)) if name_part in one]
    entries[name] = value_of(np.array(entries[name]))
    return replace(training(), **{field: entries})


def with_nan(values):
    values = values.astype("float64")
    values.flat[-1] = np.nan
    return values


def without_last(field):
    entries = dict(getattr(training(), field))
    entries.popitem()
    return replace(training(), **{field: entries})


BROKEN = {
    "a NaN in a later weight": lambda: changed("weights", "bias", with_nan),
    "a NaN in the optimizer": lambda: changed("optimizer", "", with_nan),
    "a NaN in the state": lambda: changed("state", "moving_variance", with_nan),
    "a NaN in a log": lambda: changed("logs", "mae", with_nan),
    "another weight": lambda: changed("weights", "kernel", lambda v: v + 2 * TOLERANCE),
    # A thousandth of a slot of 1e-6 is far below the tolerance of weights.
    "another slot": lambda: changed("optimizer", "", lambda v: v * (1 + 1e-3)),
    "another moving mean": lambda: changed("state", "moving_mean", lambda v: v + 1e-3),
    "another log": lambda: changed("logs", "mae", lambda v: v * (1 + 1e-3)),
    "a missing weight": lambda: without_last("weights"),
    "a missing slot": lambda: without_last("optimizer"),
    "a missing statistic": lambda: without_last("state"),
    "a missing log": lambda: without_last("logs"),
    "an epoch too few": lambda: changed("logs", "mae", lambda v: v[:-1]),
    "a shape that broadcasts": lambda: changed("weights", "bias", lambda v: v[None]),
    "one more update": lambda: replace(training(), iterations=training().iterations + 1),
    "one more warning": lambda: replace(training(), warnings=("bigbatch: something",)),
}


def only_changed_field(found):
    (field,) = [name for name in vars(found) if vars(found)[name] is not vars(training())[name]]
    return field


def test_a_training_is_the_same_as_itself():
    found = training()
    assert found.weights
    assert found.optimizer
    assert found.state
    assert found.logs
    check_same(found, found, 0)


@pytest.mark.parametrize("name", BROKEN)
def test_a_difference_is_found_and_named(name):
    found = BROKEN[name]()
    field = only_changed_field(found)
    with pytest.raises(AssertionError) as error:
        check_same(found, training(), TOLERANCE)
    title, *lines = str(error.value).splitlines()
    assert title == "not the same:"
    assert len(lines) == 1
    assert lines[0].startswith(f"{field}: ")


@pytest.mark.parametrize("name", [one for one in BROKEN if "warning" not in one])
def test_the_expected_side_is_looked_at_as_well(name):
    with pytest.raises(AssertionError, match="not the same"):
        check_same(training(), BROKEN[name](), TOLERANCE)


def test_two_trainings_without_weights_are_not_the_same():
    empty = replace(training(), weights={})
    with pytest.raises(AssertionError, match="weights: there is nothing to compare"):
        check_same(empty, empty, TOLERANCE)


def test_a_nan_on_both_sides_is_no_match():
    broken = BROKEN["a NaN in a later weight"]()
    with pytest.raises(AssertionError, match="weights: "):
        check_same(broken, broken, TOLERANCE)


def test_warnings_that_are_expected():
    warned = replace(training(), warnings=("bigbatch: something",))
    check_same(warned, training(), 0, warns=["some.hing"])
    check_same(warned, warned, 0)
    check_same(training(), warned, 0)  # fewer warnings are no mistake
    with pytest.raises(AssertionError, match=r"warnings: none matches 'some.hing'"):
        check_same(training(), training(), 0, warns=["some.hing"])


def test_warnings_are_recorded_and_given_all_the_same():
    case = Case(dense, fit={"epochs": 1})
    with pytest.warns(UserWarning, match="said before training"):
        fitted = case.train(lambda model: warnings.warn("said before training", stacklevel=1))
    assert fitted.warnings == ("said before training",)
    check_same(fitted, fitted, 0)
    with pytest.raises(AssertionError, match="warnings: said before training"):
        check_same(fitted, replace(fitted, warnings=()), 0)


@pytest.mark.parametrize("position", range(4))
def test_a_nan_in_any_weight_of_a_model(position):
    """`max()` of Python keeps the first of two numbers if the second is NaN."""
    model, same = (Case(dense).build() for _ in range(2))
    assert problems.largest_difference(model, same) == 0
    weights = model.get_weights()
    weights[position].flat[-1] = np.nan
    model.set_weights(weights)
    assert np.isnan(problems.largest_difference(model, same))
    assert not problems.largest_difference(model, same) <= TOLERANCE


def test_the_largest_difference():
    one = [np.zeros(3), np.ones((2, 2))]
    assert largest_difference(one, one) == 0
    assert largest_difference(one, [np.zeros(3), np.full((2, 2), -2)]) == 3
    assert largest_difference([np.uint32(1)], [np.uint32(3)]) == 2  # unsigned, which wraps
    with pytest.raises(AssertionError, match=r"shape \(3,\) is compared with \(1,\)"):
        largest_difference(one, [np.zeros(1), np.ones((2, 2))])
    with pytest.raises(AssertionError, match="2 entries are compared with 1"):
        largest_difference(one, one[:1])


def test_pairs_have_the_same_length_and_are_there():
    assert paired("ab", [1, 2]) == [("a", 1), ("b", 2)]
    with pytest.raises(AssertionError, match="1 entries are compared with 0"):
        paired([1], [])
    with pytest.raises(AssertionError, match="nothing to compare"):
        paired([], iter(()))


def test_every_optimizer_of_a_model_is_compared():
    for name, count in (("two optimizers", 3), ("optimizer of a layer", 3), ("dense", 1)):
        model = CASES[name].build()
        assert len(comparison.optimizers_of(model)) == count


def test_many_ways_to_accumulate_are_compared_with_the_full_batch():
    case = replace(CASES["dense"], fit={"epochs": 1})
    check_equals_full_batch(case, TOLERANCE)
    expected = case.train()
    off = replace(expected, history={"loss": [0.0], "mae": [0.0], "mse": [0.0]})
    for ways in ({"sizes": (8,), "windows": ()}, {"sizes": (), "windows": (3,)}):
        with pytest.raises(AssertionError, match=r"\{'(microbatch_size|accumulation_steps)'"):
            check_equals_full_batch(case, TOLERANCE, expected=off, **ways)
    with pytest.raises(AssertionError, match="nothing to compare"):
        check_equals_full_batch(case, TOLERANCE, sizes=(), windows=(), expected=expected)


@pytest.mark.skipif(not IS_KERAS_3, reason="it is Keras 3 that warns")
def test_a_fitted_model_is_unpacked_in_two():
    model, history = Fitted("model", {"loss": [1.0]}, ("a warning",))
    assert (model, history) == ("model", {"loss": [1.0]})
