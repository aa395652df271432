"""CI runs a part of the cases of a large test: another part on another day."""

from __future__ import annotations

import os
from datetime import date

import pytest

from fit_cases import CASES, MODES
from sampling import VARIABLE, is_chosen, rotation

NAMES = [f"test_in_float64[{mode}-{name}]" for mode in MODES for name in CASES]


def chosen(number, one_in=4):
    return {name for name in NAMES if is_chosen(name, one_in, number)}


@pytest.mark.parametrize("one_in", [1, 2, 3, 4])
def test_rotations_choose_different_cases_and_together_all(one_in):
    today = date.today().toordinal()
    parts = [chosen(number, one_in) for number in range(today, today + one_in)]
    assert all(parts)
    assert set.union(*parts) == set(NAMES)
    assert sum(map(len, parts)) == len(NAMES)  # none twice
    assert chosen(today + one_in, one_in) == parts[0]


def test_always_the_same_part_would_be_seen(monkeypatch):
    test_rotations_choose_different_cases_and_together_all(4)
    choose = is_chosen
    monkeypatch.setitem(globals(), "is_chosen", lambda name, n, _: choose(name, n, 0))
    with pytest.raises(AssertionError):
        test_rotations_choose_different_cases_and_together_all(4)


def test_the_number_is_that_of_the_environment_or_of_the_day():
    assert rotation({VARIABLE: "7"}) == 7
    assert rotation({}) == date.today().toordinal()
    with pytest.raises(ValueError, match="seven"):
        rotation({VARIABLE: "seven"})


def test_all_processes_of_a_run_agree(request):
    """The first one writes the number into the environment, which the others get."""
    assert int(os.environ[VARIABLE]) == rotation()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", range(16))
def test_the_marker_leaves_the_others_to_the_matrix(case, request):
    is_left = request.node.get_closest_marker("matrix") is not None
    assert is_left != is_chosen(request.node.name, 4, rotation())
