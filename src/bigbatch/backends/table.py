"""Numbers that updates note and callbacks read, on any framework."""

from __future__ import annotations

import abc
from typing import Any, Sequence

import numpy as np

SUMS = 3
"""How many sums a table has."""


class Table(abc.ABC):
    """Three sums, and the last rows of numbers, in variables that Python can read.

    Args:
        sums: a variable for `SUMS` sums and, behind them, how many rows have been added.
        rows: a variable for the rows that are kept.
    """

    def __init__(self, sums: Any, rows: Any) -> None:
        self._sums, self._rows = sums, rows
        self._room = rows.shape[0]

    @property
    def variables(self) -> list[Any]:
        """The variables that hold the numbers."""
        return [self._sums, self._rows]

    @abc.abstractmethod
    def add(self, numbers: Sequence[Any], row: Sequence[Any] | None) -> None:
        """Add to the sums and, if there is one, a row; in an update."""

    @abc.abstractmethod
    def clear_rows(self) -> None:
        """Forget the rows."""

    def sums(self) -> list[float]:
        """Return the sums."""
        return self._sums.numpy()[:SUMS].tolist()

    def rows(self, since: int) -> tuple[int, list[list[float]]]:
        """Return how many rows have been added, and those after the first `since` of them.

        As many as there are: fewer than were added if that is long ago, all if the table has
        been put back to an earlier state.
        """
        count = int(self._sums.numpy()[SUMS])
        since = max(since if since <= count else 0, count - self._room)
        return count, self._rows.numpy()[np.arange(since, count) % self._room].tolist()
