"""Numbers that an update notes and Python reads, on JAX."""

from __future__ import annotations

from typing import Any, Sequence

import jax.numpy as jnp

from bigbatch.backends import table
from bigbatch.backends.jax.ops import weight, weight_dtype
from bigbatch.backends.jax.state import Cell
from bigbatch.backends.table import SUMS


class Table(table.Table):
    """Three sums, and the last rows of numbers."""

    def __init__(self, *, rows: int, columns: int) -> None:
        sums = Cell(jnp.zeros([SUMS + 1], weight_dtype()))
        super().__init__(sums, Cell(jnp.zeros([rows, columns], weight_dtype())))

    def add(self, numbers: Sequence[Any], row: Sequence[Any] | None) -> None:
        new = jnp.stack([weight(one) for one in (*numbers, float(row is not None))])
        sums = self._sums.value + new
        self._sums.assign(sums)
        if row is not None:
            place = ((sums[SUMS] - 1) % self._room).astype("int32")
            values = jnp.stack([weight(one) for one in row])
            self._rows.assign(self._rows.value.at[place].set(values))

    def clear_rows(self) -> None:
        self._sums.assign(jnp.asarray([*self.sums(), 0.0], weight_dtype()))
