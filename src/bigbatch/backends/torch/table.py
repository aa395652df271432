"""Numbers that updates note and callbacks read."""

from __future__ import annotations

from typing import Any, Sequence

import torch

from bigbatch.backends.torch.ops import WEIGHT_DTYPE

_SUMS = 3


class Table:
    """Three sums, and the last rows of numbers, in the memory of the host.

    Args:
        rows: how many rows are kept.
        columns: how many numbers a row has.
    """

    def __init__(self, *, rows: int, columns: int) -> None:
        self._room = rows
        # The sums, and how many rows have been added.
        self._sums = torch.zeros(_SUMS + 1, dtype=WEIGHT_DTYPE)
        self._rows = torch.zeros(rows, columns, dtype=WEIGHT_DTYPE)

    @property
    def variables(self) -> list[Any]:
        """The tensors that hold the numbers."""
        return [self._sums, self._rows]

    def add(self, numbers: Sequence[Any], row: Sequence[Any] | None) -> None:
        """Add to the sums and, if there is one, a row."""
        for index, number in enumerate((*numbers, row is not None)):
            self._sums[index] += float(number)
        if row is not None:
            last = (int(self._sums[_SUMS]) - 1) % self._room
            for index, number in enumerate(row):
                self._rows[last, index] = float(number)

    def sums(self) -> list[float]:
        """Return the sums."""
        return self._sums[:_SUMS].tolist()

    def rows(self, since: int) -> tuple[int, list[list[float]]]:
        """Return how many rows have been added, and those after the first `since` of them.

        As many as there are: fewer than were added if that is long ago, all if the table has
        been put back to an earlier state.
        """
        count = int(self._sums[_SUMS])
        since = max(since if since <= count else 0, count - self._room)
        return count, self._rows[torch.arange(since, count) % self._room].tolist()

    def clear_rows(self) -> None:
        """Forget the rows."""
        self._sums[_SUMS] = 0
