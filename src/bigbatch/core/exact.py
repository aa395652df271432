"""The choices of exact batch normalisation: what is stored between stages, and where."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Union

from bigbatch.core.arguments import positive_integer
from bigbatch.errors import ArgumentError, explain

ALL, AUTO = "all", "auto"
EXACT = "exact"
DEVICE, HOST = "device", "host"


@dataclass(frozen=True)
class ExactBatchNorm:
    """Batch normalisation with the statistics of the whole batch, gradients included.

    Pass it to `accumulate(batch_norm=...)`; `batch_norm="exact"` is the same with the defaults.
    Micro-batches run in stages, from one BatchNormalization layer to the next. What a stage
    needs of the one before it is stored for every micro-batch, or computed again.

    Args:
        checkpoint_every: how many stages lie between two whose boundaries are stored until the
            backward pass: "all" stores every boundary, which takes the most memory and the
            least time. With a number, every stage of the backward pass computes again what it
            needs from the last stored one: the larger the number, the less memory and the more
            time. "auto" is between: for L BatchNormalization layers one after the other, the
            boundaries of every √L-th stage are stored, and the others once more, √L at a time.
        storage: where the boundaries are stored: on the "device" that computes, or on the
            "host", which is slower, on devices that have memory of their own.

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

    @property
    def refills(self) -> bool:
        """Whether boundaries between two stored ones are stored again, all at once."""
        return self.checkpoint_every in (ALL, AUTO)

    def stages_between_checkpoints(self, depth: int) -> int:
        """Return the number that `checkpoint_every` stands for, given the levels of sums.

        Example:
            >>> ExactBatchNorm().stages_between_checkpoints(53)
            7
        """
        if self.checkpoint_every == ALL:
            return 1
        if self.checkpoint_every == AUTO:
            return max(1, round(math.sqrt(depth)))
        return int(self.checkpoint_every)


def exact_choice(batch_norm: Any) -> ExactBatchNorm | None:
    """Return the choices for exact batch normalisation; `None` if another way was chosen."""
    if batch_norm == EXACT:
        return ExactBatchNorm()
    return batch_norm if isinstance(batch_norm, ExactBatchNorm) else None
