"""`model.fit` accumulated on torch equals plain Keras on torch with the full batch."""

from __future__ import annotations

import pytest

from comparison import check_equals_full_batch
from torch_cases import CASES

TOLERANCE = 5e-6
"""float32 has seven digits, weights are about one, and a few updates add up their rounding."""


@pytest.mark.parametrize("name", CASES)
def test_equals_the_full_batch(name):
    check_equals_full_batch(CASES[name], TOLERANCE)
