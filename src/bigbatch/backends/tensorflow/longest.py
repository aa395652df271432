"""The longest samples of a data set: what memory has to be planned for."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from bigbatch.backends.tensorflow.batch import sample_count
from bigbatch.backends.tensorflow.data import as_fit_has_it, bytes_of
from bigbatch.errors import ArgumentError, explain

_ROWS = 16
"""How many samples are taken."""


def longest(x: Any, y: Any, sample_weight: Any) -> Any:
    """Return a batch whose samples are as large as they get in the data."""
    if isinstance(x, (tf.data.Dataset, keras.utils.PyDataset)):
        if y is not None or sample_weight is not None:
            raise ArgumentError(
                explain(
                    received=f"y or sample_weight next to x={type(x).__name__}",
                    expected="a data set that contains its targets and weights",
                    fix="leave y and sample_weight out",
                )
            )
        return _longest_batch(x)
    data = (x,) if y is None and sample_weight is None else (x, y, sample_weight)
    return _longest_rows(data)


def _longest_batch(batches: Any) -> Any:
    if isinstance(batches, tf.data.Dataset):
        count = int(batches.cardinality())
        batches = batches if count != tf.data.INFINITE_CARDINALITY else None
    else:
        count = batches.num_batches
        batches = None if count is None else map(batches.__getitem__, range(count))
    if batches is None:
        raise ArgumentError(
            explain(
                received="a data set without end",
                expected="a finite data set, which can be searched for the longest samples",
                fix="pass a part of it: dataset.take(100)",
            )
        )
    longest, most = None, -1.0
    for batch in batches:
        batch = _longest_rows(tuple(batch) if isinstance(batch, (tuple, list)) else (batch,))
        size = bytes_of(batch) / max(1, int(sample_count(batch)))
        if size > most:
            longest, most = batch, size
    if longest is None:
        raise ArgumentError(
            explain(
                received="a data set without batches",
                expected="at least one batch",
                fix="pass the training data",
            )
        )
    return longest


def _longest_rows(data: Any) -> Any:
    """Return some samples; the longest alone, if those of a batch differ in length."""
    leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    ragged = [leaf for leaf in leaves if isinstance(leaf, tf.RaggedTensor)]
    first, count = 0, _ROWS
    if ragged:
        lengths = tf.add_n([tf.cast(_elements(leaf), tf.float32) for leaf in ragged])
        first, count = int(tf.argmax(lengths)), 1
    # Of an array only what is needed becomes a tensor: the whole may be large.
    return tf.nest.map_structure(
        lambda leaf: None if leaf is None else as_fit_has_it(leaf[first : first + count]), data
    )


def _elements(ragged: Any) -> Any:
    counts = tf.ones_like(ragged, tf.int64)
    while counts.shape.rank > 1:
        counts = tf.reduce_sum(counts, axis=-1)
    return counts
