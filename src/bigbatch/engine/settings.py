"""The settings of a model: how it accumulates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

from bigbatch.backends.keras import is_multi_worker
from bigbatch.core.arguments import not_among, positive_integer
from bigbatch.core.exact import ExactBatchNorm, exact_choice
from bigbatch.core.size_search import AUTO
from bigbatch.core.sparse_gradients import CHOICES as SPARSE_CHOICES
from bigbatch.core.sparse_gradients import SparseGradients
from bigbatch.core.window import AccumulationSteps, window_length
from bigbatch.engine.auto_size import AutoSlices
from bigbatch.engine.batch_norm import MODES
from bigbatch.engine.feeds import WHOLE_BATCH, Batches, Slices
from bigbatch.engine.planning import COUPLED
from bigbatch.engine.self_check import MODES as CHECKS
from bigbatch.engine.trainer import Trainer
from bigbatch.engine.workers import Workers
from bigbatch.errors import ArgumentError, explain


@dataclass(frozen=True)
class Setting:
    """The arguments of `accumulate`, checked."""

    microbatch_size: int | str | None = None
    accumulation_steps: AccumulationSteps = None
    batch_norm: str | ExactBatchNorm = "pooled"
    coupled: bool | str = "auto"
    check: str = "warn"
    sparse_gradients: str = "rows"

    def __post_init__(self) -> None:
        if (self.microbatch_size is None) == (self.accumulation_steps is None):
            given = "neither" if self.microbatch_size is None else "both"
            raise ArgumentError(
                explain(
                    received=f"{given} of microbatch_size and accumulation_steps",
                    expected="one of them",
                    fix="pass microbatch_size to cut the batches of fit(), or "
                    "accumulation_steps to group the batches of the data set",
                )
            )
        if self.batch_norm not in MODES and exact_choice(self.batch_norm) is None:
            raise ArgumentError(
                explain(
                    received=f"batch_norm={self.batch_norm!r}",
                    expected=f"one of {', '.join(map(repr, MODES))}, or an ExactBatchNorm",
                    fix="leave it out, or choose one of these",
                )
            )
        if self.coupled not in COUPLED or isinstance(self.coupled, int) > isinstance(
            self.coupled, bool
        ):
            raise ArgumentError(
                explain(
                    received=f"coupled={self.coupled!r}",
                    expected=f"one of {', '.join(map(repr, COUPLED))}",
                    fix='leave it out: "auto" finds by trying whether the loss needs the whole '
                    "batch",
                )
            )
        if self.check not in CHECKS:
            raise ArgumentError(not_among("check", self.check, CHECKS))
        if self.sparse_gradients not in SPARSE_CHOICES:
            raise ArgumentError(
                not_among("sparse_gradients", self.sparse_gradients, SPARSE_CHOICES)
            )
        if self.microbatch_size == AUTO:
            return
        if self.microbatch_size is not None:
            positive_integer(self.microbatch_size, "microbatch_size", or_auto=True)
        else:
            window_length(self.accumulation_steps, updates=0)

    def trainer(self, model: Any, say: Callable[[str], None] = print) -> Trainer:
        """Return what trains a compiled model, and may say something about it."""
        size = self.microbatch_size
        if size == AUTO:
            return self._trainer(model, AutoSlices(say), say, self._workers(model))
        if self.accumulation_steps == 1:
            size = WHOLE_BATCH  # one batch per update is that batch in one micro-batch
        if isinstance(size, int):
            return self._trainer(model, Slices(size), say)
        return self._trainer(model, Batches(self.accumulation_steps), say)

    def trainer_of_slices(self, model: Any) -> Trainer:
        """Return what trains a compiled model on whole batches, whatever the mode is."""
        return self._trainer(model, Slices(WHOLE_BATCH), lambda _: None, check="off")

    def _trainer(
        self,
        model: Any,
        feed: Any,
        say: Callable[[str], None],
        workers: Workers | None = None,
        check: str | None = None,
    ) -> Trainer:
        return Trainer(
            model,
            feed,
            batch_norm=self.batch_norm,
            coupled=self.coupled,
            workers=workers,
            check=check or self.check,
            sparse=SparseGradients(self.sparse_gradients),
            say=say,
        )

    def _workers(self, model: Any) -> Workers | None:
        """Return what lets workers agree, as one of them may run out of memory."""
        if not is_multi_worker(model):
            return None
        is_exact = exact_choice(self.batch_norm) is not None
        if self.coupled is True or is_exact:
            what = 'batch_norm="exact"' if is_exact else "coupled=True"
            raise ArgumentError(
                explain(
                    received=f'microbatch_size="auto" and {what} under '
                    "MultiWorkerMirroredStrategy",
                    expected="a number: workers wait for each other in the middle of a batch",
                    fix='find it with "auto" on one worker: bigbatch.microbatch_size(model)',
                )
            )
        return Workers(model)
