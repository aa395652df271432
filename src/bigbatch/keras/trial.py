"""Trial updates of a model: made with parts of a batch, and undone."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator

import numpy as np
import tensorflow as tf

from bigbatch.keras import compat
from bigbatch.keras.collector import optimizers_of
from bigbatch.keras.data import largest_count
from bigbatch.keras.insight import insight_of
from bigbatch.tf.compat import outside_strategy_scope
from bigbatch.tf.memory import Memory
from bigbatch.tf.replicas import largest_of_all
from bigbatch.tf.trial import Found, largest_that_fits

_UPDATES = 3
"""How often a size is tried: operations take more in some orders than in others."""


def memory_of(model: Any) -> Memory:
    """Return the memory of the devices a model is on."""
    return Memory(variable.device for variable in all_variables_of(model))


def largest_trial_that_fits(
    model: Any,
    engine: Any,
    data: Any,
    *,
    at_most: int | None = None,
    until_it_fails: bool = True,
) -> Found:
    """Make updates with parts of a batch, and undo them, to find what fits the device.

    Args:
        model: a built Keras model.
        engine: a `SplitEngine` of the model, prepared for such data.
        data: a batch, perhaps of several replicas.
        at_most: the largest size to try; the whole batch if not given.
        until_it_fails: whether to try what may not fit.
    """
    strategy = compat.strategy_of(model)
    batch = largest_count(strategy, data) if at_most is None else at_most

    def run(size: int) -> None:
        part = strategy.run(_rows, args=(data, 2 * size))
        for _ in range(_UPDATES):
            engine.train_on(part, size)

    engine.trace(data)
    memory = memory_of(model)
    with unchanged(model) as put_back:
        return largest_that_fits(
            memory,
            batch,
            run,
            put_back,
            until_it_fails=until_it_fails,
            agreed=functools.partial(largest_of_all, strategy),
        )


@contextlib.contextmanager
def unchanged(model: Any) -> Iterator[Callable[[], None]]:
    """Return a block after which all of a model is as before; it gives a way to go back.

    The copies are not on the device.
    """
    copies = [(part, np.array(part.numpy())) for part in all_variables_of(model)]

    def put_back() -> None:
        with outside_strategy_scope():
            for part, copy in copies:
                part.assign(copy)

    try:
        yield put_back
    finally:
        put_back()


def all_variables_of(model: Any) -> list[Any]:
    """Return the variables of a model, its optimizers and metrics, on each replica here."""
    keras = compat.keras_of(model)
    variables = [*model.variables, *keras.metrics_variables(model)]
    for optimizer in optimizers_of(model):
        variables += keras.optimizer_variables(optimizer)
    values = [keras.native(variable) for variable in variables]
    insight = insight_of(model)
    values += insight.variables if insight else []
    local = compat.strategy_of(model).experimental_local_results
    parts = {id(p): p for v in [*values, *keras.state_of(model)] for p in local(v)}
    return list(parts.values())


def _rows(data: Any, count: int) -> Any:
    return tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[:count], data)
