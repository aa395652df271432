"""Numbers that a graph notes and Python reads, on TensorFlow."""

from __future__ import annotations

from typing import Any, Sequence

import tensorflow as tf

from bigbatch.backends import table
from bigbatch.backends.table import SUMS
from bigbatch.backends.tensorflow.compat import undistributed_variable
from bigbatch.backends.tensorflow.values import WEIGHT_DTYPE


class Table(table.Table):
    """Three sums, and the last rows of numbers; of no strategy, in the memory of the host."""

    def __init__(self, *, rows: int, columns: int) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            sums = undistributed_variable(tf.zeros([SUMS + 1], WEIGHT_DTYPE))
            super().__init__(
                sums, undistributed_variable(tf.zeros([rows, columns], WEIGHT_DTYPE))
            )

    def add(self, numbers: Sequence[Any], row: Sequence[Any] | None) -> None:
        new = [tf.cast(one, WEIGHT_DTYPE) for one in (*numbers, float(row is not None))]
        sums = self._sums.read_value() + tf.stack(new)
        self._sums.assign(sums)
        if row is not None:
            tf.raw_ops.ResourceScatterUpdate(
                resource=self._rows.handle,
                indices=tf.cast((sums[SUMS] - 1) % self._room, tf.int32),
                updates=tf.stack([tf.cast(one, WEIGHT_DTYPE) for one in row]),
            )

    def clear_rows(self) -> None:
        self._sums.assign([*self.sums(), 0.0])
