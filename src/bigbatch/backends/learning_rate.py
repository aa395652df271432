"""The learning rate of another batch size."""

from __future__ import annotations

import contextlib
import math
from typing import Any, Literal

import keras
import numpy as np

from bigbatch.core.arguments import positive_integer
from bigbatch.errors import ArgumentError, explain

_RULES = {"linear": lambda ratio: ratio, "sqrt": math.sqrt}
_RATES = ("initial_learning_rate", "end_learning_rate", "warmup_target", "values")
"""What the schedules of Keras call the rates in their configuration."""

_UPDATES = (0, 1, 7, 100, 1_000, 12_345, 1_000_000)
"""Where a scaled schedule is compared with the original."""


def scale_learning_rate(
    rate_or_schedule: Any,
    *,
    batch_size: int,
    reference_batch_size: int,
    rule: Literal["linear", "sqrt"] = "linear",
) -> Any:
    """Return the learning rate for a batch size, given a good rate for another batch size.

    Args:
        rate_or_schedule: a number, a `keras.optimizers.schedules.LearningRateSchedule`, or any
            function that returns a rate, such as one for a `LearningRateScheduler`.
        batch_size: the batch size to train with.
        reference_batch_size: the batch size that the rate is good for.
        rule: "linear" (SGD: twice the batch, twice the rate) or "sqrt" (Adam and the like).
            Both hold below the critical batch size; see `NoiseScale`.

    Returns:
        A value of the same kind. A schedule of Keras keeps its class, so that a saved model
        loads where bigbatch is not installed. Only the rates change: the schedule still counts
        updates, and an epoch now has more or fewer of them.

    Example:
        >>> scale_learning_rate(0.1, batch_size=1024, reference_batch_size=256)
        0.4
        >>> scale_learning_rate(1e-3, batch_size=1024, reference_batch_size=256, rule="sqrt")
        0.002
    """
    if rule not in _RULES:
        raise ArgumentError(
            explain(
                received=f"rule={rule!r}",
                expected=f"one of {', '.join(map(repr, _RULES))}",
                fix="'linear' for SGD, 'sqrt' for Adam",
            )
        )
    ratio = positive_integer(batch_size, "batch_size") / positive_integer(
        reference_batch_size, "reference_batch_size"
    )
    factor = _RULES[rule](ratio)
    if isinstance(rate_or_schedule, keras.optimizers.schedules.LearningRateSchedule):
        return _scaled_schedule(rate_or_schedule, factor)
    if callable(rate_or_schedule):
        return lambda *args, **kwargs: rate_or_schedule(*args, **kwargs) * factor
    is_number = isinstance(rate_or_schedule, (int, float, np.number))
    if not is_number or isinstance(rate_or_schedule, bool):
        raise ArgumentError(
            explain(
                received=f"{rate_or_schedule!r} ({type(rate_or_schedule).__name__})",
                expected="a learning rate: a number, a schedule or a function",
                fix="pass the value that you would pass to the optimizer as learning_rate",
            )
        )
    return float(rate_or_schedule) * factor


def _scaled_schedule(schedule: Any, factor: float) -> Any:
    """Return a schedule of the same class with other rates, if there is one that is right."""
    with contextlib.suppress(Exception):  # a custom class may have no configuration
        config = dict(schedule.get_config())
        for name in _RATES:
            if config.get(name) is not None:
                config[name] = (np.array(config[name]) * factor).tolist()
        scaled = type(schedule).from_config(config)
        rates = [[float(one(n)) for n in _UPDATES] for one in (schedule, scaled)]
        if np.allclose(np.array(rates[0]) * factor, rates[1], rtol=1e-5, atol=0):
            return scaled
    return ScaledSchedule(schedule, factor)


@keras.saving.register_keras_serializable("bigbatch")
class ScaledSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule times a factor, where the schedule's own rates cannot be changed.

    Args:
        schedule: a schedule.
        factor: what its rates are multiplied by.
    """

    def __init__(self, schedule: Any, factor: float) -> None:
        self._schedule = schedule
        self._factor = factor

    def __call__(self, step: Any) -> Any:
        """Return the rate after so many updates."""
        return self._schedule(step) * self._factor

    def get_config(self) -> dict[str, Any]:
        """Return what Keras saves."""
        saved = keras.saving.serialize_keras_object(self._schedule)
        return {"schedule": saved, "factor": self._factor}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ScaledSchedule:
        """Return the schedule that Keras has saved."""
        schedule = keras.saving.deserialize_keras_object(config["schedule"])
        return cls(schedule, config["factor"])
