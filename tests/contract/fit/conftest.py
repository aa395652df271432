"""Every contract of `fit` holds in both modes."""

from __future__ import annotations

import os

import pytest

from fit_cases import MODES

from stack import BACKEND, set_float


@pytest.fixture(params=MODES)
def mode(request):
    """Split or window mode, as `fit_cases` sets them up."""
    return request.param


@pytest.fixture
def float64():
    """Everything in float64, where only rounding at the sixteenth digit is left."""
    if BACKEND == "jax" and not os.environ.get("JAX_ENABLE_X64"):
        pytest.skip("JAX has float64 with JAX_ENABLE_X64=1 only")
    set_float("float64")
    yield
    set_float("float32")
