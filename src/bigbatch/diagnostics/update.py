"""Observe one update: its effect on a model, and its time and memory."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np

from bigbatch.backends.keras import backend_of
from bigbatch.diagnostics.verification import Cost, Difference
from bigbatch.engine.trial import memory_of, unchanged

_NEGLIGIBLE = 1e-2
"""Gradients this small, relative to the largest, may be nothing but rounding."""

_UPDATES = 3
"""How many updates are timed."""


@dataclass(frozen=True)
class Update:
    """The effect of one update."""

    names: list[str]
    gradients: list[np.ndarray | None]
    """What optimizers were given for each weight; `None` for those that got nothing."""
    before: list[np.ndarray]
    steps: list[np.ndarray]
    """How far each weight moved."""
    logs: dict[str, float]
    cost: Cost


def observed(model: Any, make: Callable[[], Callable[[Any], Any]], data: Any) -> Update:
    """Make one update and look at it, then some more to see what they take; undo them."""
    with unchanged(model) as put_back:
        weights = [*model.trainable_weights, *model.non_trainable_weights]
        before = [weight.numpy() for weight in weights]
        model.reset_metrics()
        backend = backend_of(model)
        with backend.noting_gradients(model) as noted:
            logs = {k: float(np.mean(backend.ops.numpy(v))) for k, v in make()(data).items()}
        steps = [weight.numpy() - old for weight, old in zip(weights, before)]
        places = [noted.pop(id(weight), None) for weight in weights]
        gradients = [None if place is None else place.numpy() for place in places]
        del noted, places  # which take memory
        put_back()
        cost = _cost(model, make(), data)
    return Update([one.path for one in weights], gradients, before, steps, logs, cost)


def _cost(model: Any, train: Callable[[Any], Any], data: Any) -> Cost:
    train(data)  # traces
    memory, peak = memory_of(model), None
    if memory.is_hard:
        memory.reset_peak()
    seconds = []
    for _ in range(_UPDATES):
        start = time.perf_counter()
        ops = backend_of(model).ops
        ops.map_structure(ops.numpy, train(data))  # or a GPU may not be done
        seconds.append(time.perf_counter() - start)
    if memory.is_hard:
        peak = memory.peak()
    return Cost(statistics.median(seconds), peak)


def differences_of(full: Update, accumulated: Update) -> tuple[Difference, ...]:
    """Return how much two updates of one model differ, weight by weight."""
    found = []
    largest = max((_size(g) for g in full.gradients if g is not None), default=0.0)
    for index, name in enumerate(full.names):
        gradient, other = full.gradients[index], accumulated.gradients[index]
        step, before = full.steps[index], full.before[index]
        of_step = step - accumulated.steps[index]
        # A step is known no better than the weight it was taken from.
        of_step = np.where(np.abs(of_step) <= 4 * _eps(before) * np.abs(before), 0, of_step)
        if gradient is None or other is None:
            of_gradient = 0.0 if gradient is other else float("inf")
        else:
            # Some gradients are zero but for rounding, such as that of a bias before a softmax.
            scale = max(_size(gradient), _NEGLIGIBLE * largest)
            of_gradient = relative(gradient - other, scale)
            of_step = np.where(np.abs(gradient) > _NEGLIGIBLE * scale, of_step, 0)
        found.append(Difference(name, of_gradient, relative(of_step, step)))
    return tuple(found)


def _eps(values: np.ndarray) -> float:
    is_float = np.issubdtype(values.dtype, np.floating)
    return float(np.finfo(values.dtype).eps) if is_float else 2.0**-8


def relative(difference: Any, to: Any) -> float:
    """Return the largest difference relative to the largest value; NaN is infinite."""
    largest, scale = _size(difference), _size(to)
    if largest == 0:
        return 0.0
    return largest / scale if np.isfinite(largest) and scale > 0 else float("inf")


def _size(values: Any) -> float:
    return float(np.max(np.abs(values), initial=0))
