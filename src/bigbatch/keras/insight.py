"""What is noted of updates while they are made, in the graph, for callbacks to read."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
import tensorflow as tf

from bigbatch.core.noise import (
    DECAY,
    MOMENTS,
    Estimate,
    is_looked_at,
    moments,
    noise_and_signal,
)
from bigbatch.tf.compat import undistributed_variable
from bigbatch.tf.values import WEIGHT_DTYPE

_INSIGHT = "_bigbatch_insight"
_KEPT = np.array([DECAY] * MOMENTS + [1.0])
"""How much is kept of the averages, and of the number of updates they are made of."""


class Insight:
    """Notes of how many micro-batches and samples updates were made, and how noisy they were.

    `looks` and `note` are called in a graph; the rest is for Python to read.
    """

    def __init__(self) -> None:
        self.with_noise = False
        """Whether gradients are looked at, too, by engines that are made from now on."""
        self.logs: dict[str, Callable[[], float]] = {}
        """What is added to the logs of an epoch, by name."""
        with tf.init_scope(), tf.device("CPU:0"):
            self._counts = undistributed_variable(tf.zeros([3], WEIGHT_DTYPE))
            self._average = undistributed_variable(tf.zeros([MOMENTS + 1], WEIGHT_DTYPE))
            self._looks = undistributed_variable(tf.constant(True))

    @property
    def variables(self) -> list[Any]:
        """Where it is noted."""
        return [self._counts, self._average, self._looks]

    def looks(self) -> Any:
        """Say, in a graph, whether the gradients of the update that comes next are looked at.

        `None` if those of no update are.
        """
        return self._looks.read_value() if self.with_noise else None

    def note(
        self, sums: dict[str, Any], samples: Any, halves: list[tuple[Any, Any]], scale: Any
    ) -> None:
        """Note an update; called outside `strategy.run`.

        Args:
            sums: "microbatches", how many there were; "halves", for each optimizer the sum of
                half the squared norms of its gradients, each divided by what it was weighted
                by.
            samples: how many the update was made from.
            halves: for each optimizer the scale of its loss, and half the squared norm of the
                gradients it is given.
            scale: what turns the sums of squares into their mean over samples.
        """
        looks = self.looks()
        count = sums["microbatches"]
        self._counts.assign_add(tf.stack([tf.ones([], WEIGHT_DTYPE), count, samples]))
        if looks is None:
            return
        of_parts = of_mean = tf.zeros([], WEIGHT_DTYPE)
        for (loss_scale, half), parts in zip(halves, sums["halves"]):
            by = 2 / tf.cast(loss_scale, WEIGHT_DTYPE) ** 2
            of_mean += half * by
            of_parts += parts * scale * by
        noise, signal = noise_and_signal(of_parts, of_mean, samples, count)
        new = tf.stack([*moments(noise, signal, samples), 1.0])
        is_seen = looks & tf.math.is_finite(noise * signal)  # not of a single micro-batch
        old = self._average.read_value()
        new = tf.where(is_seen, old * _KEPT + new, old)
        self._average.assign(new)
        self._looks.assign(is_looked_at(new[MOMENTS], self._counts.read_value()[0]))

    @property
    def counts(self) -> tuple[int, int, int]:
        """The updates, micro-batches and samples so far."""
        updates, micro_batches, samples = self._counts.numpy()
        return int(updates), int(micro_batches), int(samples)

    @property
    def estimate(self) -> Estimate:
        """What is known of the gradient noise scale."""
        *average, updates = self._average.numpy().tolist()
        return Estimate(tuple(average), int(updates))

    def forget_noise(self) -> None:
        """Start anew."""
        self._average.assign(np.zeros(MOMENTS + 1))
        self._looks.assign(True)


def insight_of(model: Any) -> Insight | None:
    """Return what notes the updates of a model, if anything does."""
    return vars(model).get(_INSIGHT)


def set_insight(model: Any, insight: Insight) -> None:
    """Let the updates of a model be noted, by engines that are made from now on."""
    vars(model)[_INSIGHT] = insight


def drop_insight(model: Any) -> None:
    """Undo `set_insight`."""
    vars(model).pop(_INSIGHT, None)
