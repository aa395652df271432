"""What is noted of updates while they are made, in the graph, for callbacks to read."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
import tensorflow as tf

from bigbatch.core.noise import Estimate, is_looked_at
from bigbatch.tf.compat import undistributed_variable
from bigbatch.tf.values import WEIGHT_DTYPE

_INSIGHT = "_bigbatch_insight"
_ROOM = 1024
"""How many updates that were looked at are kept for Python: what is older hardly counts."""


class Insight:
    """Notes of how many micro-batches and samples updates were made, and how noisy they were.

    `looks` and `note` are called in a graph; the rest is for Python to read.
    """

    def __init__(self) -> None:
        self.with_noise = False
        """Whether gradients are looked at, too, by engines that are made from now on."""
        self.logs: dict[str, Callable[[], float]] = {}
        """What is added to the logs of an epoch, by name."""
        self._estimate = Estimate()
        self._read = 0
        with tf.init_scope(), tf.device("CPU:0"):
            # Updates, micro-batches, samples; updates that were looked at.
            self._counts = undistributed_variable(tf.zeros([4], WEIGHT_DTYPE))
            self._looks = undistributed_variable(tf.constant(True))
            self._seen = undistributed_variable(tf.zeros([_ROOM, 4], WEIGHT_DTYPE))

    @property
    def variables(self) -> list[Any]:
        """Where it is noted."""
        return [self._counts, self._looks, self._seen]

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
        looks, count = self.looks(), sums["microbatches"]
        is_seen = tf.cast(False if looks is None else looks, WEIGHT_DTYPE)
        new = tf.stack([tf.ones([], WEIGHT_DTYPE), count, samples, is_seen])
        if looks is None:
            self._counts.assign_add(new)
            return
        counts = self._counts.read_value() + new
        self._counts.assign(counts)
        updates, _, _, seen = tf.unstack(counts)
        self._looks.assign(is_looked_at(seen, updates))
        of_parts = of_mean = tf.zeros([], WEIGHT_DTYPE)
        for (loss_scale, half), parts in zip(halves, sums["halves"]):
            by = 2 / tf.cast(loss_scale, WEIGHT_DTYPE) ** 2
            of_mean += half * by
            of_parts += parts * scale * by
        # If nobody has looked, the next update overwrites this.
        tf.raw_ops.ResourceScatterUpdate(
            resource=self._seen.handle,
            indices=tf.cast((seen - is_seen) % _ROOM, tf.int32),
            updates=tf.stack([of_parts, of_mean, samples, count]),
        )

    @property
    def counts(self) -> tuple[int, int, int]:
        """The updates, micro-batches and samples so far."""
        updates, micro_batches, samples, _ = self._counts.numpy()
        return int(updates), int(micro_batches), int(samples)

    @property
    def estimate(self) -> Estimate:
        """What is known of the gradient noise scale."""
        seen = int(self._counts.numpy()[3])
        if not 0 <= seen - self._read <= _ROOM:
            self._estimate, self._read = Estimate(), max(0, seen - _ROOM)
        for row in self._seen.numpy()[np.arange(self._read, seen) % _ROOM].tolist():
            self._estimate = self._estimate.with_update(*row)
        self._read = seen
        return self._estimate

    def forget_noise(self) -> None:
        """Start anew."""
        self._counts.assign(np.append(self._counts.numpy()[:3], 0.0))
        self._looks.assign(True)
        self._estimate, self._read = Estimate(), 0


def insight_of(model: Any) -> Insight | None:
    """Return what notes the updates of a model, if anything does."""
    return vars(model).get(_INSIGHT)


def set_insight(model: Any, insight: Insight) -> None:
    """Let the updates of a model be noted, by engines that are made from now on."""
    vars(model)[_INSIGHT] = insight


def drop_insight(model: Any) -> None:
    """Undo `set_insight`."""
    vars(model).pop(_INSIGHT, None)
