"""A few hundred random cases, always the same; `make fuzz` goes on with others."""

from __future__ import annotations

import contextlib

import pytest

import fuzz
from bigbatch.backends.tensorflow import data
from bigbatch.backends.tensorflow.batch import sample_count

MODELS, PER_TEST, IN_CI = 240, 10, 10
"""Models; each is one case, or several: see `fuzz.PARTS`. In CI they are 60."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[pytest.mark.matrix] if first >= IN_CI else [])
        for first in range(0, MODELS, PER_TEST)
    ],
)
def test_random_models_equal_the_full_batch(first, mirrored):
    for number in range(first, first + PER_TEST):
        fuzz.check(number, mirrored)


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_random_losses_in_loops_equal_the_full_batch(first):
    for number in range(first, first + 50):
        fuzz.check_loop(number)


def test_a_mistake_is_found(monkeypatch):
    """The mean of means: every micro-batch counts the same."""
    numbers = (0, 1, 3, 6)
    for number in numbers:
        fuzz.check(number)
    monkeypatch.setattr(
        data, "sample_count", lambda nest: fuzz.tf.ones_like(sample_count(nest))
    )
    found = []
    for number in numbers:
        with contextlib.suppress(AssertionError):
            fuzz.check(number)
            continue
        found.append(fuzz.Case(number).options["run"])
    assert set(found) == {"eager", "graph"}
