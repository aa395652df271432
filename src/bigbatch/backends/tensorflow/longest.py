"""The longest samples of a data set: what memory has to be planned for."""

from __future__ import annotations

from typing import Any, Iterable

import keras
import tensorflow as tf

from bigbatch.backends.longest import ROWS, longest_of
from bigbatch.backends.tensorflow.batch import sample_count
from bigbatch.backends.tensorflow.data import as_fit_has_it, bytes_of


def longest(x: Any, y: Any, sample_weight: Any) -> Any:
    """Return a batch whose samples are as large as they get in the data."""
    return longest_of((x, y, sample_weight), _batches(x), _longest_rows, _bytes_per_sample)


def _batches(data: Any) -> Iterable[Any] | None:
    if isinstance(data, tf.data.Dataset):
        return data if data.cardinality() != tf.data.INFINITE_CARDINALITY else ()
    if isinstance(data, keras.utils.PyDataset):
        return map(data.__getitem__, range(data.num_batches or 0))
    return None


def _bytes_per_sample(rows: Any) -> float:
    return bytes_of(rows) / max(1, int(sample_count(rows)))


def _longest_rows(data: Any) -> Any:
    """Return some samples; the longest alone, if those of a batch differ in length."""
    leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    ragged = [leaf for leaf in leaves if isinstance(leaf, tf.RaggedTensor)]
    first, count = 0, ROWS
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
