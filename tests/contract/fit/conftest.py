"""Every contract of `fit` holds in both modes."""

from __future__ import annotations

import pytest

from fit_cases import MODES


@pytest.fixture(params=MODES)
def mode(request):
    """Split or window mode, as `fit_cases` sets them up."""
    return request.param
