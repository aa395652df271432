"""Numbers that a graph notes and Python reads."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np
import tensorflow as tf

from bigbatch.backends.tensorflow.compat import undistributed_variable
from bigbatch.backends.tensorflow.values import WEIGHT_DTYPE

_SUMS = 3


class Table:
    """Three sums, and the last rows of numbers; of no strategy, in the memory of the host.

    Args:
        rows: how many rows are kept.
        columns: how many numbers a row has.
    """

    def __init__(self, *, rows: int, columns: int) -> None:
        self._room = rows
        with tf.init_scope(), tf.device("CPU:0"):
            # The sums, and how many rows have been added.
            self._sums = undistributed_variable(tf.zeros([_SUMS + 1], WEIGHT_DTYPE))
            self._rows = undistributed_variable(tf.zeros([rows, columns], WEIGHT_DTYPE))

    @property
    def variables(self) -> list[Any]:
        """The variables that hold the numbers."""
        return [self._sums, self._rows]

    def add(self, numbers: Sequence[Any], row: Sequence[Any] | None) -> None:
        """Add to the sums and, if there is one, a row; in a graph."""
        new = [tf.cast(one, WEIGHT_DTYPE) for one in (*numbers, float(row is not None))]
        sums = self._sums.read_value() + tf.stack(new)
        self._sums.assign(sums)
        if row is not None:
            tf.raw_ops.ResourceScatterUpdate(
                resource=self._rows.handle,
                indices=tf.cast((sums[_SUMS] - 1) % self._room, tf.int32),
                updates=tf.stack([tf.cast(one, WEIGHT_DTYPE) for one in row]),
            )

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
        self._sums.assign([*self.sums(), 0.0])
