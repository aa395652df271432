"""Which samples of a batch to try a loss with, and how to cut them into two parts."""

from __future__ import annotations

import itertools
import math
from typing import Dict, Hashable, List, Sequence


def rows_that_differ(keys: Sequence[Hashable], wanted: int) -> List[int]:
    """Return the positions of `wanted` rows from all over a batch, as different as can be.

    A loss may divide by the number of samples of a class. That shows only if there are several
    of them, in both parts when the rows are cut in two in the order in which they are returned.
    So rows are of few kinds, two or more of each, if the batch has them.

    Args:
        keys: for each row what tells it apart: its labels and its weight.
        wanted: how many rows to choose; all of them if there are fewer.

    Example:
        >>> rows_that_differ(["a", "a", "a", "a", "b", "b", "c"], 4)
        [0, 5, 1, 4]
    """
    count = len(keys)
    wanted = min(wanted, count)
    spread = [index * count // wanted for index in range(wanted)]
    of_kind: Dict[Hashable, List[int]] = {}
    for row in dict.fromkeys([*spread, *range(count)]):
        of_kind.setdefault(keys[row], []).append(row)
    kinds = sorted(of_kind.values(), key=lambda rows: len(rows) == 1)
    few = max(2, wanted // 2)
    chosen = [*_in_turns(kinds[:few]), *_in_turns(kinds[few:])][:wanted]
    places = []
    for rows in kinds:
        kept = [row for row in rows if row in chosen]
        places += [((index + 0.5) / len(kept), row) for index, row in enumerate(kept)]
    return [row for _, row in sorted(places)]


def _in_turns(kinds: List[List[int]]) -> List[int]:
    """Return the first row of each kind, then the second of each, and so on."""
    turns = itertools.zip_longest(*kinds)
    return [row for turn in turns for row in turn if row is not None]


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
