"""The longest samples of a data set: what memory has to be planned for."""

from __future__ import annotations

from typing import Any, Callable, Iterable

from bigbatch.errors import ArgumentError, explain

ROWS = 16
"""How many samples are taken."""


def longest_of(
    data: tuple[Any, Any, Any],
    batches: Iterable[Any] | None,
    first_rows: Callable[[Any], Any],
    bytes_per_sample: Callable[[Any], float],
) -> Any:
    """Return a batch whose samples are as large as they get in the data.

    Args:
        data: inputs, targets and sample weights, as users pass them.
        batches: the batches of the inputs, if these are a data set.
        first_rows: returns some samples of a batch, as `fit` has them.
        bytes_per_sample: returns how large samples are.
    """
    x, y, sample_weight = data
    if batches is None:
        return first_rows((x,) if y is None and sample_weight is None else data)
    if y is not None or sample_weight is not None:
        raise ArgumentError(
            explain(
                received=f"y or sample_weight next to x={type(x).__name__}",
                expected="a data set that contains its targets and weights",
                fix="leave y and sample_weight out",
            )
        )
    found, most = None, -1.0
    for batch in batches:
        rows = first_rows(tuple(batch) if isinstance(batch, (tuple, list)) else (batch,))
        size = bytes_per_sample(rows)
        if size > most:
            found, most = rows, size
    if found is None:
        raise ArgumentError(
            explain(
                received="a data set without batches, or without end",
                expected="a finite data set, which can be searched for the longest samples",
                fix="pass a part of the training data",
            )
        )
    return found
