"""Numbers that updates note and callbacks read, on torch."""

from __future__ import annotations

from typing import Any, Sequence

import torch

from bigbatch.backends import table
from bigbatch.backends.table import SUMS
from bigbatch.backends.torch.ops import WEIGHT_DTYPE


class Table(table.Table):
    """Three sums, and the last rows of numbers, in the memory of the host."""

    def __init__(self, *, rows: int, columns: int) -> None:
        sums = torch.zeros(SUMS + 1, dtype=WEIGHT_DTYPE)
        super().__init__(sums, torch.zeros(rows, columns, dtype=WEIGHT_DTYPE))

    def add(self, numbers: Sequence[Any], row: Sequence[Any] | None) -> None:
        for index, number in enumerate((*numbers, row is not None)):
            self._sums[index] += float(number)
        if row is not None:
            last = (int(self._sums[SUMS]) - 1) % self._room
            for index, number in enumerate(row):
                self._rows[last, index] = float(number)

    def clear_rows(self) -> None:
        self._sums[SUMS] = 0
