"""What the user has asked for: how a model accumulates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

from bigbatch.core.arguments import positive_integer
from bigbatch.core.window import UNBOUNDED, AccumulationSteps, window_length
from bigbatch.errors import ArgumentError, explain
from bigbatch.keras import compat
from bigbatch.keras.auto import AutoEngine
from bigbatch.keras.batch_norm import MODES
from bigbatch.keras.coupled import CoupledEngine, CoupledWindowEngine
from bigbatch.keras.split import SplitEngine
from bigbatch.keras.window import WindowEngine
from bigbatch.keras.workers import WorkersEngine
from bigbatch.tf.auto import AUTO


@dataclass(frozen=True)
class Setting:
    """The arguments of `accumulate`, checked."""

    microbatch_size: int | str | None = None
    accumulation_steps: AccumulationSteps = None
    batch_norm: str = "pooled"
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
        if self.microbatch_size == AUTO:
            return
        if self.microbatch_size is not None:
            positive_integer(self.microbatch_size, "microbatch_size")
        else:
            window_length(self.accumulation_steps, updates=0)

    def make_engine(self, model: Any, say: Callable[[str], None] = print) -> Any:
        """Return what trains a compiled model, and may say something about it."""
        size = self.microbatch_size
        if size == AUTO:
            return AutoEngine(model, self._engine_that_may_fail(model), say)
        if self.accumulation_steps == 1:
            size = UNBOUNDED  # one batch per update is that batch in one micro-batch
        if isinstance(size, int):
            return self.make_split_engine(model, size)
        window = CoupledWindowEngine if self.coupled else WindowEngine
        return window(model, self.accumulation_steps, self.batch_norm)

    def make_split_engine(self, model: Any, size: int = UNBOUNDED) -> SplitEngine:
        """Return what trains a compiled model on whole batches, whatever the mode is."""
        split = CoupledEngine if self.coupled else SplitEngine
        return split(model, size, self.batch_norm)

    def _engine_that_may_fail(self, model: Any) -> SplitEngine:
        """Return what trains on whole batches, and may run out of memory without harm."""
        if not compat.is_multi_worker(model):
            return self.make_split_engine(model)
        if self.coupled:
            raise ArgumentError(
                explain(
                    received='microbatch_size="auto" and coupled=True under '
                    "MultiWorkerMirroredStrategy",
                    expected="a number: workers wait for each other in the middle of a batch",
                    fix='find it with "auto" on one worker: bigbatch.microbatch_size(model)',
                )
            )
        return WorkersEngine(model, UNBOUNDED, self.batch_norm)
