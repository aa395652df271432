"""The passes over the micro-batches of a batch whose `train_step` makes several updates.

The updates of a `train_step`, its calls of `optimizer.apply`, are numbered 0, 1, 2, ... Every
value is computed with the weights that are in force when the full-batch step computes it, and
every update gets the gradient of the whole batch. Updates whose gradients do not depend on each
other share a pass. Otherwise the gradients of a later update are known only after the earlier
one: another pass runs every micro-batch again, from the first weights of the batch, and assigns
the results of the updates that have been made where the `train_step` makes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence

NONE = -1
"""The number of no update."""


@dataclass(frozen=True)
class Order:
    """What a `train_step` computes with weights that it has updated before.

    Each number is that of the last update on whose result something depends, or `NONE`.
    """

    changed: Sequence[Sequence[Any]]
    """For each update the variables that it changes, as far as the `train_step` reads them."""
    gradients: Sequence[int]
    """What the gradients of each update depend on."""
    values: int
    """What logs, metrics and other values of samples depend on."""
    state: int
    """What assignments depend on that are the same for all samples, as of an EMA teacher."""
    has_own_changes: bool = False
    """Whether the `train_step` itself gives weights other values, the same for all samples."""


@dataclass(frozen=True)
class Pass:
    """One run of all micro-batches of a batch.

    Updates before `first` have been made: their results are assigned. The gradients of those
    from `first` to `stop`, or of all others, are captured. Later updates do nothing.
    """

    first: int = 0
    stop: int | None = None
    gives_logs: bool = True
    """Whether logs and metrics are those of the batch, not what follows the last capture."""

    def captures(self, number: int) -> bool:
        """Say whether the gradients of an update are captured in this pass."""
        return self.first <= number and (self.stop is None or number < self.stop)

    def is_done_after(self, number: int) -> bool:
        """Say whether nothing that follows an update is of use."""
        is_last = self.captures(number) and number + 1 == self.stop
        return is_last and not self.gives_logs


ALL_UPDATES = Pass()
"""The one pass of a `train_step` whose updates do not depend on each other."""


@dataclass(frozen=True)
class Plan:
    """The passes that a batch takes."""

    passes: tuple[Pass, ...] = (ALL_UPDATES,)
    settles: bool = False
    """Whether assignments that are the same for all samples are made after the last update."""

    @property
    def runs_again(self) -> bool:
        """Whether micro-batches run more than once."""
        return len(self.passes) > 1 or self.settles


def plan_of(order: Order) -> Plan:
    """Return as few passes as give every value what it depends on.

    A pass captures consecutive updates. One whose gradients depend on another of the same pass
    begins the next pass. If logs or metrics depend on an update of the last pass, one more
    gives them.
    """
    firsts = [0]
    for number, needed in enumerate(order.gradients):
        if needed >= firsts[-1]:
            firsts.append(number)
    count, last = len(order.gradients), firsts[-1]
    is_late = order.values >= last
    if len(firsts) == 1 and not is_late:
        return Plan(settles=order.state >= last)
    passes = [Pass(*ends, gives_logs=False) for ends in zip(firsts, [*firsts[1:], count])]
    if is_late:
        return Plan((*passes, Pass(count, count)), settles=order.has_own_changes)
    return Plan((*passes[:-1], Pass(last, count)), settles=order.state >= last)
