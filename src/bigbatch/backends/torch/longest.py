"""The longest samples of a data set: what memory has to be planned for."""

from __future__ import annotations

from typing import Any, Iterable

import keras
import torch

from bigbatch.backends.torch.data import as_fit_has_it, bytes_of, sample_count
from bigbatch.backends.torch.ops import map_structure
from bigbatch.errors import ArgumentError, explain

_ROWS = 16
"""How many samples are taken."""


def longest(x: Any, y: Any, sample_weight: Any) -> Any:
    """Return a batch whose samples are as large as they get in the data."""
    if not isinstance(x, (torch.utils.data.DataLoader, keras.utils.PyDataset)):
        data = (x,) if y is None and sample_weight is None else (x, y, sample_weight)
        return _first_rows(data)
    if y is not None or sample_weight is not None:
        raise ArgumentError(
            explain(
                received=f"y or sample_weight next to x={type(x).__name__}",
                expected="a data set that has its targets and weights",
                fix="leave y and sample_weight out",
            )
        )
    found, most = None, -1.0
    for batch in _batches(x):
        rows = _first_rows(tuple(batch) if isinstance(batch, (tuple, list)) else (batch,))
        size = bytes_of(rows) / max(1, sample_count(rows))
        if size > most:
            found, most = rows, size
    if found is None:
        raise ArgumentError(
            explain(
                received="a data set without batches, or without end",
                expected="one that can be looked through for the longest samples",
                fix="pass some of the data the model is to be trained with",
            )
        )
    return found


def _batches(data: Any) -> Iterable[Any]:
    if isinstance(data, torch.utils.data.DataLoader):
        return data
    return map(data.__getitem__, range(data.num_batches or 0))


def _first_rows(data: Any) -> Any:
    # Of an array only what is needed becomes a tensor: the whole may be large.
    return map_structure(
        lambda leaf: None if leaf is None else as_fit_has_it(leaf[:_ROWS]), data
    )
