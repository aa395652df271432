"""What a custom `train_step` does with a micro-batch, found by running it twice."""

from __future__ import annotations

from typing import Any, Callable

import torch

from bigbatch.backends.base import Backend
from bigbatch.backends.keras import metrics_of, optimizers_of
from bigbatch.backends.torch import data as batches
from bigbatch.backends.torch.compat import make_global_seeds
from bigbatch.backends.torch.dependence import Operations, independent_of, noting
from bigbatch.backends.torch.draws import Drawn, watching_draws
from bigbatch.backends.torch.trial import Choices, Told, by_samples, candidates_of, places_of
from bigbatch.core.python_random import python_states


def told_by_step(
    backend: Backend,
    model: Any,
    run: Callable[[Any], Any],
    data: Any,
    put_back: Callable[[], None],
) -> Told:
    """Run a micro-batch, and one of another size; return what that told.

    State is the same after any micro-batch if both give it the same value, and nothing that
    torch does makes it depend on the samples.

    Args:
        backend: the backend of the model.
        model: a Keras model.
        run: runs a micro-batch.
        data: the micro-batch.
        put_back: undoes what has been run.
    """
    count = batches.sample_count(data)
    # One sample less: the first, as others are less often special. Or the only one twice.
    other = batches.rows(data, 1, count - 1) if count > 1 else batches.joined(data, data)
    draws: list[list[Drawn]] = [[], []]
    variables = kept_by(backend, model)
    candidates = candidates_of(backend, model, variables)
    operations = Operations(variables, lambda _: [])
    make_global_seeds()  # or Python would draw a seed for them in the first run
    start = python_states()
    with watching_draws(draws[0].append), noting(operations):
        run(batches.with_own_weights(other))
    values = {id(one): one.detach().clone() for one in operations.written(candidates)}
    ends = [python_states()]
    put_back()

    def same(operations: Operations) -> list[Any]:
        both = [one for one in operations.written(candidates) if id(one) in values]
        equal = [one for one in both if torch.equal(one, values[id(one)])]
        return independent_of(data, operations, equal)

    operations = Operations(variables, same)
    unknown: list[str] = []
    make_global_seeds()  # as before
    with watching_draws(draws[1].append, unknown.append), noting(operations):
        run(batches.with_own_weights(data))
    ends.append(python_states())
    places = places_of(draws, [batches.sample_count(other), count])
    written = operations.written(candidates)
    drawn, shared = by_samples(draws[1], places)
    choices = Choices.between(start, ends)
    return Told(places, operations.same, written, drawn, shared, unknown, choices)


def kept_by(backend: Backend, model: Any) -> list[Any]:
    """Return the tensors that may keep values from one micro-batch to the next."""
    metrics = [variable for metric in metrics_of(model) for variable in metric.variables]
    of_optimizers = [v for one in optimizers_of(model) for v in one.variables]
    numbers = [variable for variable in of_optimizers if not variable.shape]
    tensors = [backend.native(one) for one in (*model.variables, *metrics, *numbers)]
    return list({id(one): one for one in (*tensors, *backend.state_of(model))}.values())
