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
from bigbatch.tf.values import WEIGHT_DTYPE, half_squared_norm

_INSIGHT = "_bigbatch_insight"


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

    @property
    def variables(self) -> list[Any]:
        """Where it is noted."""
        return [self._counts, self._average]

    def looks(self) -> Any:
        """Say, in a graph, whether the gradients of the update that comes next are looked at.

        `None` if those of no update are.
        """
        if not self.with_noise:
            return None
        return is_looked_at(self._average.read_value()[MOMENTS], self._counts.read_value()[0])

    def note(
        self, sums: Any, samples: Any, means: list[tuple[Any, list[Any]]], scale: Any
    ) -> None:
        """Note an update; called outside `strategy.run`.

        Args:
            sums: "microbatches", how many there were; "halves", for each optimizer the sum of
                half the squared norms of its gradients, each divided by what it was weighted
                by.
            samples: how many the update was made from.
            means: the gradients that optimizers are given, each with the scale of its loss.
            scale: what turns the sums of squares into their mean over samples.
        """
        looks = self.looks()  # before the update is counted, as in its micro-batches
        count = sums["microbatches"]
        self._counts.assign_add(tf.stack([tf.ones([], WEIGHT_DTYPE), count, samples]))
        if looks is None:
            return
        halves = [half_squared_norm(gradients, looks) for _, gradients in means]
        old = self._average.read_value()

        def with_update() -> Any:
            of_parts = of_mean = tf.zeros([], WEIGHT_DTYPE)
            for (loss_scale, _), half, parts in zip(means, halves, sums["halves"]):
                by = 2 / tf.cast(loss_scale, WEIGHT_DTYPE) ** 2
                of_mean += half * by
                of_parts += parts * scale * by
            noise, signal = noise_and_signal(of_parts, of_mean, samples, count)
            of_update = moments(noise, signal, samples)
            new = tf.stack([tf.cast(one, WEIGHT_DTYPE) for one in of_update])
            is_known = (count > 1) & tf.reduce_all(tf.math.is_finite(new))
            new = tf.concat([DECAY * old[:MOMENTS] + new, [old[MOMENTS] + 1]], 0)
            return tf.where(is_known, new, old)

        self._average.assign(tf.cond(looks, with_update, lambda: old))

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


def insight_of(model: Any) -> Insight | None:
    """Return what notes the updates of a model, if anything does."""
    return vars(model).get(_INSIGHT)


def set_insight(model: Any, insight: Insight) -> None:
    """Let the updates of a model be noted, by engines that are made from now on."""
    vars(model)[_INSIGHT] = insight


def drop_insight(model: Any) -> None:
    """Undo `set_insight`."""
    vars(model).pop(_INSIGHT, None)
