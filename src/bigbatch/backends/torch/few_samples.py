"""A few samples of a batch, to compare what they do whole and cut."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, Sequence

import numpy as np
import torch

from bigbatch.backends.few_samples import different_rows, is_label, listed_calls
from bigbatch.backends.torch.data import as_tensors, checked_count
from bigbatch.backends.torch.ops import flatten, map_structure, numpy, take
from bigbatch.backends.torch.rollback import gradients_aside, unchanged

ALSO_COMPUTES_IN = {"float32"}
"""Types in which layers compute, whatever their own is: `keras.ops.matmul` of float64."""


def obstacle(model: Any) -> str | None:
    """Return why samples of a model cannot be tried: there is no reason."""
    del model
    return None


@contextlib.contextmanager
def undone(
    model: Any, runs: list[Any], count: int, touched: list[Any]
) -> Iterator[Callable[[], None]]:
    """Return a block after which nothing has happened; it gives a way to go back sooner.

    Args:
        model: a Keras model.
        runs: what runs its micro-batches, pass by pass.
        count: how many samples are tried.
        touched: the tensors that samples may change.
    """
    parameters = [variable.value for variable in model.trainable_variables]
    with gradients_aside(parameters), contextlib.ExitStack() as stack:
        for one in runs:
            stack.enter_context(one.few_samples(count))
        yield stack.enter_context(unchanged(touched))


def picked(model: Any, data: Any, count: int) -> Any:
    """Return `count` samples of a batch that differ; `None` if it has fewer."""
    del model
    data = as_tensors(data)
    total = checked_count(data)

    def arrays_of(rows: list[int]) -> Iterator[np.ndarray]:
        for leaf in flatten(_rows_of(data, rows)):
            if leaf is not None and leaf.dtype not in (torch.bool, torch.complex64):
                yield numpy(leaf)

    if total < count:
        return None
    labels = [numpy(leaf) for leaf in flatten(data) if is_label(leaf)]
    return _rows_of(data, different_rows(count, labels, total, arrays_of))


def rows_on_replicas(model: Any, data: Any, rows: Sequence[int]) -> Any:
    """Return samples of a batch by their numbers, on the only replica there is."""
    del model
    return _rows_of(data, rows)


def _rows_of(data: Any, rows: Sequence[int]) -> Any:
    # Copied: a slice would keep the whole batch in memory.
    return map_structure(lambda leaf: None if leaf is None else take(leaf, rows), data)


def arrays(values: Any) -> Any:
    """Return copies of tensors as arrays in the memory of the host."""
    return map_structure(
        lambda value: numpy(value).copy() if torch.is_tensor(value) else value, values
    )


def watching_layers(model: Any) -> contextlib.AbstractContextManager[list[Any]]:
    """Return a block in which calls of layers are listed: inputs, outputs and losses."""
    return listed_calls(model, arrays)
