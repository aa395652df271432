"""Numbers that an update notes and Python reads."""

from __future__ import annotations

from typing import Any, Sequence

import jax.numpy as jnp
import numpy as np

from bigbatch.backends.jax.ops import weight, weight_dtype
from bigbatch.backends.jax.state import Cell

_SUMS = 3


class Table:
    """Three sums, and the last rows of numbers.

    Args:
        rows: how many rows are kept.
        columns: how many numbers a row has.
    """

    def __init__(self, *, rows: int, columns: int) -> None:
        self._room = rows
        # The sums, and how many rows have been added.
        self._sums = Cell(jnp.zeros([_SUMS + 1], weight_dtype()))
        self._rows = Cell(jnp.zeros([rows, columns], weight_dtype()))

    @property
    def variables(self) -> list[Cell]:
        """What holds the numbers."""
        return [self._sums, self._rows]

    def add(self, numbers: Sequence[Any], row: Sequence[Any] | None) -> None:
        """Add to the sums and, if there is one, a row; in an update."""
        new = jnp.stack([weight(one) for one in (*numbers, float(row is not None))])
        sums = self._sums.value + new
        self._sums.assign(sums)
        if row is not None:
            place = ((sums[_SUMS] - 1) % self._room).astype("int32")
            values = jnp.stack([weight(one) for one in row])
            self._rows.assign(self._rows.value.at[place].set(values))

    def sums(self) -> list[float]:
        """Return the sums."""
        return self._sums.numpy()[:_SUMS].tolist()

    def rows(self, since: int) -> tuple[int, list[list[float]]]:
        """Return how many rows have been added, and those after the first `since` of them.

        As many as there are: fewer than were added if that is long ago, all if the table has
        been put back to an earlier state.
        """
        count = int(self._sums.numpy()[_SUMS])
        since = max(since if since <= count else 0, count - self._room)
        return count, self._rows.numpy()[np.arange(since, count) % self._room].tolist()

    def clear_rows(self) -> None:
        """Forget the rows."""
        self._sums.assign(jnp.asarray([*self.sums(), 0.0], weight_dtype()))
