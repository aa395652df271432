"""Trial updates of a model: made with parts of a batch, and undone."""

from __future__ import annotations

import functools
from typing import Any, Callable

from bigbatch.backends.keras import backend_of, optimizers_of
from bigbatch.core.size_search import ChosenSize, largest_that_fits
from bigbatch.engine.statistics import statistics_of
from bigbatch.engine.trainer import Trainer

_UPDATES = 3
"""How often a size is tried: operations take more in some orders than in others."""


def memory_of(model: Any) -> Any:
    """Return the memory of the devices a model is on."""
    return backend_of(model).memory(all_variables_of(model))


def largest_trial_that_fits(
    trainer: Trainer, data: Any, *, at_most: int | None = None, until_it_fails: bool = True
) -> ChosenSize:
    """Make updates with parts of a batch, and undo them, to find what fits the device.

    Args:
        trainer: trains the model on whole batches; prepared for such data.
        data: a batch, perhaps of several replicas.
        at_most: the largest size to try; the whole batch if not given.
        until_it_fails: whether to try what may not fit.
    """
    model, backend = trainer.model, trainer.backend
    batch = at_most
    if batch is None:
        batch = backend.data.largest_count(model, data)

    def run(size: int) -> None:
        # What stages store is there for all micro-batches of a batch.
        count = batch if trainer.phases.is_exact else 2 * size
        rows = functools.partial(backend.data.first_rows, count=count)
        part = backend.on_replicas(model, rows, data)
        if trainer.phases.knows_bytes(part, size):
            return
        for _ in range(_UPDATES):
            trainer.try_on(part, size)

    trainer.trace(data)
    memory = memory_of(model)
    with unchanged(model) as put_back:
        return largest_that_fits(
            memory,
            batch,
            run,
            put_back,
            until_it_fails=until_it_fails,
            agreed=functools.partial(backend.largest_of_all, model),
        )


def unchanged(model: Any) -> Any:
    """Return a block after which all of a model is as before; it gives a way to go back."""
    return backend_of(model).unchanged(all_variables_of(model))


def all_variables_of(model: Any) -> list[Any]:
    """Return the variables of a model, its optimizers and metrics, on each replica here."""
    backend = backend_of(model)
    variables = [*model.variables, *backend.metrics_variables(model)]
    for optimizer in optimizers_of(model):
        variables += backend.optimizer_variables(optimizer)
    values = [backend.native(variable) for variable in variables]
    statistics = statistics_of(model)
    values += statistics.variables if statistics else []
    local: Callable[[Any], list[Any]] = functools.partial(backend.local_results, model)
    parts = {id(p): p for v in [*values, *backend.state_of(model)] for p in local(v)}
    return list(parts.values())
