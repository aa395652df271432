"""Numbers that are recorded while updates are made, for callbacks to read."""

from __future__ import annotations

from typing import Any, Callable

from bigbatch.backends.keras import backend_of
from bigbatch.core.noise import Estimate

_STATISTICS = "_bigbatch_statistics"
_ROOM = 1024
"""How many updates are kept for Python to read: what is older hardly counts."""


class UpdateStatistics:
    """Records the micro-batches, the samples and the noise of updates.

    `note` is called in a graph; the rest is for Python to read.

    Args:
        model: the model whose updates are noted.
    """

    def __init__(self, model: Any) -> None:
        self.with_noise = False
        """Whether gradients are looked at, too, by trainers that are made from now on."""
        self.logs: dict[str, Callable[[], float]] = {}
        """What is added to the logs of an epoch, by name."""
        self.hidden: set[str] = set()
        """Names of logs that the progress bar does not show."""
        self._estimate = Estimate()
        self._read = 0
        # One number for each: updates, micro-batches, samples; noisy ones row by row.
        self._table = backend_of(model).table(rows=_ROOM, columns=4)

    @property
    def variables(self) -> list[Any]:
        """Where it is noted."""
        return self._table.variables

    def note(self, microbatches: Any, samples: Any, norms: list[tuple[Any, Any]]) -> None:
        """Note an update; called outside `strategy.run`.

        Args:
            microbatches: how many there were.
            samples: how many the update was made from.
            norms: for each optimizer the mean of the squared norms of the gradients of
                micro-batches, weighted by samples, and that of the gradient it is given.
        """
        row = None
        if self.with_noise and norms:  # there are none if the loss is of the whole batch
            parts, means = (sum(column) for column in zip(*norms))
            row = [parts, means, samples, microbatches]
        self._table.add([1.0, microbatches, samples], row)

    @property
    def counts(self) -> tuple[int, int, int]:
        """The updates, micro-batches and samples so far."""
        updates, microbatches, samples = self._table.sums()
        return int(updates), int(microbatches), int(samples)

    @property
    def estimate(self) -> Estimate:
        """What is known of the gradient noise scale."""
        count, rows = self._table.rows(self._read)
        # Put back to an earlier state, or updates are missing.
        if not 0 <= count - self._read <= _ROOM:
            self._estimate = Estimate()
        for row in rows:
            self._estimate = self._estimate.with_update(*row)
        self._read = count
        return self._estimate

    def forget_noise(self) -> None:
        """Start anew."""
        self._table.clear_rows()
        self._estimate, self._read = Estimate(), 0


def statistics_of(model: Any) -> UpdateStatistics | None:
    """Return what notes the updates of a model, if anything does."""
    return vars(model).get(_STATISTICS)


def set_statistics(model: Any, statistics: UpdateStatistics) -> None:
    """Let the updates of a model be noted, by trainers that are made from now on."""
    vars(model)[_STATISTICS] = statistics


def drop_statistics(model: Any) -> None:
    """Undo `set_statistics`."""
    vars(model).pop(_STATISTICS, None)
