"""Everything here runs with `KERAS_BACKEND=torch`, in a process of its own: `make test`."""

from __future__ import annotations

import pytest
import torch

from fit_cases import MODES


@pytest.fixture(params=MODES)
def mode(request):
    """Split or window mode, as `fit_cases` sets them up."""
    return request.param


torch.set_num_threads(1)  # the models are small, and other tests run beside these
