"""Trial updates: how large a micro-batch may be, found by trying, and undone."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any, Callable, Iterator

import numpy as np
import tensorflow as tf

from bigbatch.core.memory import SizeSearch
from bigbatch.keras import compat
from bigbatch.keras.collector import optimizers_of
from bigbatch.keras.data import largest_count
from bigbatch.tf.compat import outside_strategy_scope
from bigbatch.tf.memory import Memory


@dataclass(frozen=True)
class Found:
    """The largest micro-batch size that fits, and what it takes."""

    size: int
    """Samples per micro-batch and replica; zero if not even one fits."""
    peak: int
    """The most bytes in use on a device."""
    limit: int | None
    """The bytes there are; `None` if that is not known, and nothing was tried."""


def largest_that_fits(
    model: Any,
    train_on: Callable[[Any, int], Any],
    data: Any,
    *,
    at_most: int | None = None,
    until_it_fails: bool = True,
) -> Found:
    """Make updates with parts of a batch, and undo them, to find what fits the device.

    Args:
        model: a built Keras model.
        train_on: makes an update from data, in micro-batches of a size.
        data: a batch, perhaps of several replicas.
        at_most: the largest size to try; the whole batch if not given.
        until_it_fails: whether to try what may not fit. An allocator waits for seconds before
            it gives up.
    """
    strategy = compat.strategy_of(model)
    batch = largest_count(strategy, data) if at_most is None else at_most
    memory = Memory(part.device for part in _parts(model))
    if memory.limit is None:
        return Found(batch, 0, None)
    search = SizeSearch(batch, memory.limit, is_hard=memory.is_hard and until_it_fails)
    with _unchanged(model) as put_back:
        while search.next_size():
            size = search.next_size()
            # Two micro-batches, so that what is added up is there too.
            some = strategy.run(_rows, args=(data, 2 * size))
            update = functools.partial(train_on, some, size)
            search.add(size, _peak(update, memory, put_back, is_first=size == 1))
    peak = search.line.peak(search.chosen) if search.chosen else 0
    return Found(search.chosen, peak, memory.limit)


def _peak(
    update: Callable[[], Any], memory: Memory, put_back: Callable[[], None], is_first: bool
) -> int | None:
    """Return the peak memory of an update, or `None` if it runs out of memory."""
    try:
        if is_first:
            update()  # what is made only once does not count
            put_back()
        return memory.peak_of(update)
    except tf.errors.ResourceExhaustedError:
        return None
    finally:
        put_back()


@contextlib.contextmanager
def _unchanged(model: Any) -> Iterator[Callable[[], None]]:
    """Return a block after which all of a model is as before; it gives a way to go back.

    The copies are not on the device.
    """
    copies = [(part, np.array(part.numpy())) for part in _parts(model)]

    def put_back() -> None:
        with outside_strategy_scope():
            for part, copy in copies:
                part.assign(copy)

    try:
        yield put_back
    finally:
        put_back()


def _parts(model: Any) -> list[Any]:
    """Return the variables of a model, its optimizers and metrics, on each replica here."""
    variables = [*model.variables, *model.metrics_variables]
    for optimizer in optimizers_of(model):
        variables += optimizer.variables
    values = [getattr(variable, "value", variable) for variable in variables]
    local = compat.strategy_of(model).experimental_local_results
    parts = {id(p): p for v in [*values, *compat.state_of(model)] for p in local(v)}
    return list(parts.values())


def _rows(data: Any, count: int) -> Any:
    return tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[:count], data)
