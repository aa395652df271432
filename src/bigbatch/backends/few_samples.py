"""A few samples of a batch that differ, and what layers do with them, on any framework."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterable, Iterator

import numpy as np

from bigbatch.backends.keras import backend_of, layers_of
from bigbatch.backends.sample import keys_of_rows
from bigbatch.core.patching import replaced
from bigbatch.core.trial_rows import rows_that_differ

_CANDIDATES = 32
"""Of how many samples, spread over the batch, a few are chosen."""

_CLASSES = 1024
"""How many numbers a row has at most to be looked at as a label."""


def different_rows(
    count: int,
    labels: Iterable[np.ndarray],
    total: int,
    arrays_of: Callable[[list[int]], Iterable[np.ndarray]],
) -> list[int]:
    """Return the numbers of samples that differ in labels, masks and weights.

    Args:
        count: how many are wanted.
        labels: the tensors that may be labels of the samples of the batch, as arrays.
        total: how many samples the batch has.
        arrays_of: returns the tensors of a batch for some rows, as arrays of numbers.
    """
    keys = [b""] * total
    for label in labels:
        with_it = [*map(bytes.__add__, keys, keys_of_rows([label], total))]
        keys = with_it if len(set(with_it)) < total else keys  # no classes: all differ
    if len(set(keys)) > 1:
        return rows_that_differ(keys, count)
    rows = np.unique(np.linspace(0, total - 1, min(total, _CANDIDATES)).astype(int)).tolist()
    features = _features(arrays_of(rows), len(rows))
    chosen = [0]
    distances = np.full(len(rows), np.inf)
    while len(chosen) < count:  # each as far as can be from those before it
        with np.errstate(over="ignore", invalid="ignore"):
            new = np.sum((features - features[chosen[-1]]) ** 2, axis=1)
        distances = np.minimum(distances, new)
        distances[chosen] = -1
        chosen.append(int(np.argmax(distances)))
    return [rows[one] for one in chosen]


def is_label(leaf: Any) -> bool:
    """Say whether a tensor may be labels: one number for each sample, or one of each class."""
    shape = getattr(leaf, "shape", ())
    is_one_hot = len(shape) == 2 and shape[1] <= _CLASSES
    return is_one_hot or (len(shape) > 0 and all(length == 1 for length in shape[1:]))


def _features(arrays: Iterable[np.ndarray], count: int) -> np.ndarray:
    """Return a few numbers for each sample: mean and share of zeros of each array."""
    columns = [np.zeros(count)]
    for array in arrays:
        values = array.astype("float32").reshape(count, -1)
        columns += [np.mean(values, 1), np.mean(values == 0, 1)]
    features = np.nan_to_num(np.stack(columns, 1).astype(float))
    with np.errstate(over="ignore", invalid="ignore"):  # samples may be infinite
        return (features - features.mean(0)) / (features.std(0) + 1e-12)


@contextlib.contextmanager
def listed_calls(
    model: Any, arrays: Callable[[Any], Any], is_seen: Callable[[], bool] = lambda: True
) -> Iterator[list[Any]]:
    """Return a block in which calls of layers are listed: inputs, outputs and losses.

    Args:
        model: a Keras model.
        arrays: returns tensors as arrays.
        is_seen: says whether there are values to look at.
    """
    calls: list[Any] = []
    ops = backend_of(model).ops

    def call(layer: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(*args, **kwargs)
        if is_seen():
            inputs = [one for one in ops.flatten((args, kwargs)) if ops.is_tensor(one)]
            losses = [loss for loss in layer.losses if ops.is_tensor(loss)]
            calls.append((layer, *map(arrays, (inputs, ops.flatten(outputs), losses))))
        return outputs

    with contextlib.ExitStack() as stack:
        for layer in (*layers_of(model), model):
            watched = functools.partial(call, layer, layer.call)
            stack.enter_context(replaced(layer, call=watched))
        yield calls
