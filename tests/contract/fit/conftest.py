"""Every contract of `fit` holds in both modes."""

from __future__ import annotations

import keras
import pytest

from fit_cases import MODES


@pytest.fixture(params=MODES)
def mode(request):
    """Split or window mode, as `fit_cases` sets them up."""
    return request.param


@pytest.fixture
def float64():
    """Everything in float64, where only rounding at the sixteenth digit is left."""

    def use(dtype):
        keras.config.set_floatx(dtype)
        keras.config.set_dtype_policy(dtype)

    use("float64")
    yield
    use("float32")
