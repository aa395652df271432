"""The choices of exact batch normalisation: what is stored between stages, and where."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Union

from bigbatch.core.arguments import positive_integer
from bigbatch.errors import ArgumentError, explain

ALL, AUTO = "all", "auto"
EXACT = "exact"
DEVICE, HOST = "device", "host"
_LEAST = 3
"""The last of the choices of `Storage`: only the samples are stored."""


@dataclass(frozen=True)
class ExactBatchNorm:
    """Batch normalisation with the statistics of the whole batch, gradients included.

    Pass it to `accumulate(batch_norm=...)`; `batch_norm="exact"` is the same with the defaults.
    Micro-batches run in stages, from one BatchNormalization layer to the next. The values that
    a stage needs from earlier stages, its boundaries, are stored for every micro-batch, or
    computed again.

    Args:
        checkpoint_every: how many stages lie between two whose boundaries are stored until the
            backward pass. "all" stores every boundary, which takes the most memory and the
            least time. With a number, every stage of the backward pass computes its boundaries
            again from the last stored ones: a larger number takes less memory and more time.
            "auto" is in between: for L consecutive BatchNormalization layers, it stores the
            boundaries of every √L-th stage, and in the backward pass the others, √L at a time.
            If memory runs out, less and less is stored; with `microbatch_size="auto"` it
            begins with all boundaries.
        storage: where the boundaries are stored: on the "device" that computes, or on the
            "host", which is slower, for devices with separate memory.

    Example:
        >>> ExactBatchNorm(checkpoint_every=8, storage="host")
        ExactBatchNorm(checkpoint_every=8, storage='host')
    """

    checkpoint_every: Union[int, str] = AUTO
    storage: str = DEVICE

    def __post_init__(self) -> None:
        if self.checkpoint_every not in (ALL, AUTO):
            positive_integer(self.checkpoint_every, "checkpoint_every")
        if self.storage not in (DEVICE, HOST):
            raise ArgumentError(
                explain(
                    received=f"storage={self.storage!r}",
                    expected='"device" or "host"',
                    fix='leave it out, or pass storage="host" to use the memory of the host',
                )
            )


class Stored(NamedTuple):
    """What is stored between the stages of a micro-batch."""

    every: int
    """How many stages lie between two whose boundaries are stored until the backward pass."""
    refills: bool
    """Whether boundaries between two stored ones are stored again, all at once."""

    def __str__(self) -> str:
        if self.every == 1:
            return "all boundaries stored"
        again = ", the others once more" if self.refills else ""
        return f"boundaries of every {self.every}th stage stored{again}"


class Storage:
    """What a model stores between its stages: one choice, or less and less of it.

    Args:
        exact: what was asked for.

    Example:
        >>> storage = Storage(ExactBatchNorm())
        >>> print(storage.choice(53))
        boundaries of every 7th stage stored, the others once more
        >>> storage.take_less(), print(storage.choice(53))
        boundaries of every 14th stage stored
        (True, None)
    """

    def __init__(self, exact: ExactBatchNorm) -> None:
        self.is_on_host = exact.storage == HOST
        """Whether boundaries are in the memory of the host."""
        self._is_auto = exact.checkpoint_every == AUTO
        self._every = exact.checkpoint_every
        self._position = 1

    def choice(self, depth: int) -> Stored:
        """Return what is stored now, given the levels of sums."""
        if self._every == ALL:
            return Stored(1, refills=True)
        if not self._is_auto:
            return Stored(int(self._every), refills=False)
        root = max(1, round(math.sqrt(depth)))
        return (
            Stored(1, refills=True),
            Stored(root, refills=True),
            Stored(2 * root, refills=False),
            Stored(max(1, depth), refills=False),
        )[self._position]

    def take_all(self) -> bool:
        """Store all boundaries, which takes the least time, if that is open; say whether."""
        self._position = 0
        return self._is_auto

    def take_less(self) -> bool:
        """Store less from now on; say whether there was less to store."""
        can_be_less = self._is_auto and self._position < _LEAST
        self._position += can_be_less
        return can_be_less


def exact_choice(batch_norm: Any) -> ExactBatchNorm | None:
    """Return the choices for exact batch normalisation; `None` if another way was chosen."""
    if batch_norm == EXACT:
        return ExactBatchNorm()
    return batch_norm if isinstance(batch_norm, ExactBatchNorm) else None
