"""The longest samples of a data set of torch or Keras."""

from __future__ import annotations

from typing import Any, Iterable

import keras
import torch

from bigbatch.backends.longest import ROWS, longest_of
from bigbatch.backends.torch.data import as_fit_has_it, bytes_of, sample_count
from bigbatch.backends.torch.ops import map_structure


def longest(x: Any, y: Any, sample_weight: Any) -> Any:
    """Return a batch whose samples are as large as they get in the data."""
    return longest_of((x, y, sample_weight), _batches(x), _first_rows, _bytes_per_sample)


def _batches(data: Any) -> Iterable[Any] | None:
    if isinstance(data, torch.utils.data.DataLoader):
        return data
    if not isinstance(data, keras.utils.PyDataset):
        return None
    return map(data.__getitem__, range(data.num_batches or 0))


def _bytes_per_sample(rows: Any) -> float:
    return bytes_of(rows) / max(1, sample_count(rows))


def _first_rows(data: Any) -> Any:
    # Of an array only what is needed becomes a tensor: the whole may be large.
    return map_structure(
        lambda leaf: None if leaf is None else as_fit_has_it(leaf[:ROWS]), data
    )
