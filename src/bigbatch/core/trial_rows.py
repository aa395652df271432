"""Which samples of a batch to try a loss with, and how to cut them into two parts."""

from __future__ import annotations

import math
from typing import Hashable, List, Sequence


def rows_that_differ(keys: Sequence[Hashable], wanted: int) -> List[int]:
    """Return the positions of `wanted` rows from all over a batch, as different as can be.

    Args:
        keys: for each row what tells it apart: its labels and its weight.
        wanted: how many rows to choose; all of them if there are fewer.

    Example:
        >>> rows_that_differ(["a", "a", "a", "a", "b", "a"], 3)
        [0, 2, 4]
    """
    count = len(keys)
    wanted = min(wanted, count)
    spread = [index * count // wanted for index in range(wanted)]
    order = [*spread, *range(count)]
    first_of: dict = {}
    for row in order:
        first_of.setdefault(keys[row], row)
    chosen = list(first_of.values())[:wanted]
    for row in order:
        if len(chosen) == wanted:
            break
        if row not in chosen:
            chosen.append(row)
    return sorted(chosen)


def first_part(count: int) -> int:
    """Return how many of `count` samples the first of two parts has: about two thirds.

    The number has no divisor in common with `count`, so that no share of the samples, such as
    those with a certain label, is the same in both parts, unless it is none or all.

    Example:
        >>> [first_part(count) for count in (3, 5, 8, 16)]
        [2, 3, 5, 11]
    """
    parts = sorted(range(1, count), key=lambda part: abs(3 * part - 2 * count))
    return next(part for part in parts if math.gcd(part, count) == 1)
