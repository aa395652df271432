"""Find out by trying what calling a model does: torch has no graph to inspect."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch

from bigbatch.backends.base import Backend
from bigbatch.backends.keras import layers_of
from bigbatch.backends.torch import data as batches
from bigbatch.backends.torch.compat import (
    global_seed_state,
    make_global_seeds,
    seed_generators_of,
)
from bigbatch.backends.torch.dependence import Operations, noting
from bigbatch.backends.torch.draws import Drawn, watching_draws
from bigbatch.backends.torch.rollback import unchanged
from bigbatch.core.python_random import are_same_states, python_states

_TRIALS = ((2, 0), (3, 1))
"""How many samples are tried, and what they are filled with."""


class Choices(NamedTuple):
    """Whether Python draws, from `random` or `numpy.random`, without a generator."""

    of_batch: bool = False
    """It does, and as often for any number of samples: draws are those of the batch."""
    of_samples: bool = False
    """It does, and more often for more samples."""

    @classmethod
    def between(cls, start: Any, ends: list[Any]) -> Choices:
        """Return what Python has drawn in two trials that began in the same state."""
        if all(are_same_states(start, end) for end in ends):
            return cls()
        is_same = are_same_states(*ends)
        return cls(of_batch=is_same, of_samples=not is_same)


class Told(NamedTuple):
    """What a trial has told."""

    places: list[int] | None
    """For each draw in turn, how many rows it has for each sample; `None` if not known."""
    once: list[Any]
    """The tensors whose new value does not depend on samples: they change once per batch."""
    written: list[Any]
    """The variables of the model, but for metrics, that a call changes."""
    drawn: list[Drawn]
    """The draws that have numbers for each sample."""
    shared: list[Drawn]
    """The draws that all samples share."""
    unknown: list[str]
    """The functions of torch that drew from its own generator, beside dropout."""
    choices: Choices
    """What Python itself has drawn."""


def told_by_trial(backend: Backend, model: Any, types: Any) -> Told:
    """Call a model with samples of such types, in which nothing is the same; undo it."""
    draws: list[list[Drawn]] = []
    values: list[dict[int, Any]] = []
    written: dict[int, Any] = {}
    variables = [backend.native(variable) for variable in model.variables]
    state = [*backend.state_of(model), *variables]  # spectral normalisation assigns a weight
    candidates = candidates_of(backend, model, list({id(one): one for one in state}.values()))
    known = {id(one) for one in variables}
    unknown: list[str] = []
    start: Any = None
    ends: list[Any] = []
    # If it fails, it is left to training.
    with unchanged(state) as put_back, contextlib.suppress(Exception):
        for count, fill in _TRIALS:
            seen: list[Drawn] = []
            x, _, _ = backend.unpacked(batches.samples_of(types, count, fill))
            operations = Operations(variables, lambda _: [])
            make_global_seeds()  # or Python would draw a seed for them in the first trial
            start = python_states()
            with backend.without_effects(model), watching_draws(seen.append, unknown.append):
                with noting(operations):
                    backend.call(model, x, training=True)
                ends.append(python_states())
                new = operations.written(variables)  # weights may be too large to copy
                changed = {id(one) for one in new}
                written.update((id(one), one) for one in new)
                values.append(
                    {
                        id(one): one.detach().clone()
                        for one in candidates
                        if id(one) in changed or id(one) not in known
                    }
                )
            put_back()
            draws.append(seen)
    if len(values) < len(_TRIALS) or len(draws[0]) != len(draws[1]):
        choices = Choices.between(start, ends) if len(ends) == len(_TRIALS) else Choices()
        return Told(None, [], list(written.values()), [], [], unknown, choices)
    first, second = values
    both = [one for one in candidates if id(one) in first and id(one) in second]
    same = [
        one
        for one in both
        if torch.equal(first[id(one)], second[id(one)]) and not torch.equal(one, first[id(one)])
    ]
    places = places_of(draws, [count for count, _ in _TRIALS])
    drawn, shared = by_samples(draws[0], places)
    choices = Choices.between(start, ends)
    return Told(places, same, list(written.values()), drawn, shared, unknown, choices)


def places_of(draws: list[list[Drawn]], counts: list[int]) -> list[int] | None:
    """Return how many rows each draw has for each sample, in turn; `None` if draws differ.

    Args:
        draws: the draws of each of two trials.
        counts: how many samples each had.
    """
    if len(draws[0]) != len(draws[1]):
        return None
    firsts = [[sum(one.shape[:1]) for one in pair] for pair in zip(*draws)]
    rows = [first // counts[0] for first, _ in firsts]
    return [
        of_sample if pair == [of_sample * count for count in counts] else 0
        for pair, of_sample in zip(firsts, rows)
    ]


def by_samples(draws: list[Drawn], places: list[int] | None) -> tuple[list[Drawn], list[Drawn]]:
    """Return the draws that have numbers for each sample, and the others."""
    known = list(zip(draws, places or ()))
    return [one for one, rows in known if rows], [one for one, rows in known if not rows]


def candidates_of(backend: Backend, model: Any, tensors: list[Any]) -> list[Any]:
    """Return the tensors of a model that are neither metrics nor moving statistics."""
    others = [backend.native(one) for one in backend.metrics_variables(model)]
    for layer in layers_of(model):
        if backend.is_batch_norm(layer):
            others += [backend.native(one) for one in layer.non_trainable_variables]
    known = {id(one) for one in others}
    return [one for one in tensors if id(one) not in known]


def seeds_of(model: Any) -> list[Any]:
    """Return the state of the generators of seeds, which never depends on samples."""
    layers = (model, *layers_of(model))
    generators = [one for layer in layers for one in seed_generators_of(layer)]
    return [*(one.state.value for one in generators), *global_seed_state()]
