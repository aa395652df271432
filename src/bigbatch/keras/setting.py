"""What the user has asked for: how a model accumulates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bigbatch.core.arguments import positive_integer
from bigbatch.core.window import UNBOUNDED, AccumulationSteps, window_length
from bigbatch.errors import ArgumentError, explain
from bigbatch.keras.batch_norm import MODES
from bigbatch.keras.coupled import CoupledEngine, CoupledWindowEngine
from bigbatch.keras.split import SplitEngine
from bigbatch.keras.window import WindowEngine


@dataclass(frozen=True)
class Setting:
    """The arguments of `accumulate`, checked."""

    microbatch_size: int | None
    accumulation_steps: AccumulationSteps
    batch_norm: str
    coupled: bool = False

    def __post_init__(self) -> None:
        if (self.microbatch_size is None) == (self.accumulation_steps is None):
            given = "neither" if self.microbatch_size is None else "both"
            raise ArgumentError(
                explain(
                    received=f"{given} of microbatch_size and accumulation_steps",
                    expected="one of them",
                    fix="pass microbatch_size to cut the batches fit() is given, or "
                    "accumulation_steps to group the batches of the data set",
                )
            )
        if self.batch_norm not in MODES:
            raise ArgumentError(
                explain(
                    received=f"batch_norm={self.batch_norm!r}",
                    expected=f"one of {', '.join(map(repr, MODES))}",
                    fix="leave it out, or choose one of these",
                )
            )
        if not isinstance(self.coupled, bool):
            raise ArgumentError(
                explain(
                    received=f"coupled={self.coupled!r}",
                    expected="True or False",
                    fix="pass coupled=True if samples of a batch meet in the loss",
                )
            )
        if self.microbatch_size is not None:
            positive_integer(self.microbatch_size, "microbatch_size")
        else:
            window_length(self.accumulation_steps, updates=0)

    def make_engine(self, model: Any) -> Any:
        """Return what trains a compiled model."""
        size = self.microbatch_size
        if self.accumulation_steps == 1:
            size = UNBOUNDED  # one batch per update is that batch in one micro-batch
        if size is not None:
            split = CoupledEngine if self.coupled else SplitEngine
            return split(model, size, self.batch_norm)
        window = CoupledWindowEngine if self.coupled else WindowEngine
        return window(model, self.accumulation_steps, self.batch_norm)
