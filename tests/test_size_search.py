"""Which micro-batch size to try and to choose: arithmetic, against a device that is made up."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bigbatch.core.memory import MemoryCurve, SizeSearch, bytes_of, readable
from bigbatch.errors import ArgumentError


def search(batch, largest, fixed, per_sample, is_hard=True):
    """Return the chosen size, and all that were tried, where `largest` samples fit."""
    limit = fixed + per_sample * largest
    one = SizeSearch(batch, limit, is_hard=is_hard)
    tried = []
    while one.next_size():
        tried.append(one.next_size())
        peak = fixed + per_sample * tried[-1]
        one.add(tried[-1], peak if tried[-1] <= largest else None)
    return one.chosen, tried


@given(st.integers(1, 700), st.integers(0, 900), st.integers(0, 10**9), st.integers(1, 10**7))
@example(512, 300, 0, 1)
def test_the_choice_fits_and_is_within_a_quarter_of_the_largest(batch, largest, fixed, each):
    chosen, tried = search(batch, largest, fixed, each)
    best = min(batch, largest)
    assert 0.75 * best <= chosen <= best
    assert len(tried) == len(set(tried)) <= 20  # each is an update
    assert len([size for size in tried if size > largest]) <= 5  # an allocator waits for each


@given(st.integers(1, 700), st.integers(2, 900), st.integers(0, 10**9), st.integers(1, 10**7))
def test_what_would_end_the_process_is_not_tried(batch, largest, fixed, each):
    chosen, tried = search(batch, largest, fixed, each, is_hard=False)
    # One and two samples are tried in any case: without them nothing is known.
    assert all(size <= max(largest, 2) for size in tried)
    assert chosen <= max(largest, 2)


def test_a_curve_is_what_was_measured_and_goes_on_straight():
    curve = MemoryCurve({1: 50, 2: 50, 4: 60, 8: 80, 16: 120, 32: 200})
    assert [curve.peak(size) for size in (1, 3, 4, 8, 32, 64)] == [50, 55, 60, 80, 200, 360]
    limits = {40: 0, 50: 2, 60: 4, 99: 11, 200: 32, 360: 64}
    assert {limit: curve.largest(limit) for limit in limits} == limits


def test_a_peak_that_does_not_grow_is_no_limit():
    assert MemoryCurve({1: 50, 2: 50}).largest(50) >= 2**60


@pytest.mark.parametrize("text", ["", "8 apples", "-1GiB", "0", 0, True, None, "1.2.3GB", "iB"])
def test_no_number_of_bytes(text):
    with pytest.raises(ArgumentError, match="memory_limit="):
        bytes_of(text)


def test_bytes_to_read():
    assert [readable(n) for n in (5, 2048, 3 * 2**30, 2**45)] == [
        "5 B",
        "2.0 KiB",
        "3.0 GiB",
        "32.0 TiB",
    ]
