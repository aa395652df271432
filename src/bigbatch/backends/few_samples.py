"""Which few samples of a batch to compare, whole and cut: the same choice on every backend."""

from __future__ import annotations

from typing import Iterable, List

import numpy as np

_CANDIDATES = 32
"""Of how many samples, spread over the batch, a few are chosen."""


def candidates(total: int) -> List[int]:
    """Return the numbers of samples, spread over a batch, of which a few are chosen."""
    return np.unique(np.linspace(0, total - 1, min(total, _CANDIDATES)).astype(int)).tolist()


def columns_of(values: np.ndarray) -> List[np.ndarray]:
    """Return two numbers for each row of an array: the mean, and the share of zeros."""
    rows = np.asarray(values, np.float32).reshape(len(values), -1)
    return [np.mean(rows, 1), np.mean(rows == 0, 1)]


def far_apart(columns: Iterable[np.ndarray], rows: int, count: int) -> List[int]:
    """Return the numbers of `count` rows, each as different as can be from those before it.

    Args:
        columns: for each property of the samples its value in every row.
        rows: how many rows there are.
        count: how many are wanted.
    """
    features = np.nan_to_num(np.stack([np.zeros(rows), *columns], 1).astype(float))
    with np.errstate(over="ignore", invalid="ignore"):  # samples may be infinite
        features = (features - features.mean(0)) / (features.std(0) + 1e-12)
    chosen = [0]
    distances = np.full(rows, np.inf)
    while len(chosen) < count:
        with np.errstate(over="ignore", invalid="ignore"):
            new = np.sum((features - features[chosen[-1]]) ** 2, axis=1)
        distances = np.minimum(distances, new)
        distances[chosen] = -1
        chosen.append(int(np.argmax(distances)))
    return chosen
