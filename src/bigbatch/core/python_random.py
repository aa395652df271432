"""The random numbers of Python and NumPy that programs draw from without a generator."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np


def python_states() -> tuple[Any, Any]:
    """Return the states of the global generators of `random` and `numpy.random`."""
    return random.getstate(), np.random.get_state(legacy=False)


def set_python_states(states: tuple[Any, Any]) -> None:
    """Undo what has been drawn since `python_states`."""
    random.setstate(states[0])
    np.random.set_state(states[1])


def are_same_states(some: tuple[Any, Any], others: tuple[Any, Any]) -> bool:
    """Say whether the next numbers would be the same."""
    return pickle.dumps(some) == pickle.dumps(others)
