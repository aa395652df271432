"""The choice of cases of large tests for CI: others each day, repeatable by a number."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from datetime import date

VARIABLE = "BIGBATCH_SAMPLE"


def rotation(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number that chooses: from the environment, or else the number of the day."""
    chosen = environment.get(VARIABLE)
    return date.today().toordinal() if chosen is None else int(chosen)


def is_chosen(name: str, one_in: int, rotation: int) -> bool:
    """Whether a case is among those that run: each is once in `one_in` rotations."""
    return (zlib.crc32(name.encode()) + rotation) % one_in == 0
