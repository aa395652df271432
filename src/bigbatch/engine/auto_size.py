"""Choose micro-batches as large as memory allows, and make them smaller if need be."""

from __future__ import annotations

from typing import Any, Callable

from bigbatch.core.memory import readable
from bigbatch.core.size_search import ChosenSize, with_smaller_ones
from bigbatch.engine.feeds import WholeBatches
from bigbatch.engine.loss_terms import SharedDimensions
from bigbatch.engine.trainer import Trainer
from bigbatch.engine.trial import largest_trial_that_fits, memory_of
from bigbatch.errors import ContextError

_FEWEST = 8
"""Of how many samples a micro-batch should be before more is stored between stages."""


class AutoSlices(WholeBatches):
    """Split mode with a size that is chosen here.

    The size is chosen at the first batch, from the peak memory of trial updates that are
    undone. A batch that runs out of memory all the same is rolled back and run again with
    micro-batches half as large.

    Args:
        say: called with what users may want to know.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.size: int | None = None
        """The samples per micro-batch and replica, once they are chosen."""

    def train(self, trainer: Trainer, iterator: Any) -> dict[str, Any]:
        """Make one update from each of the next batches; return the logs."""
        functions = trainer.backend.data
        types = iterator.element_spec if functions.is_iterator(iterator) else None
        count = trainer.backend.batches_per_call(trainer.model)
        logs: dict[str, Any] = {}
        for data in functions.next_batches(iterator, count):
            data = functions.as_tensors(functions.without_optionals(data))
            trainer.planning.at(data)
            trainer.planning.conclude()
            trainer.phases.prepare(
                data if types is None else types, SharedDimensions.SAME, None
            )
            if self.size is None:
                functions.check_can_be_cut(trainer.model, data)
                self.size = self._choose(trainer, data)
            logs = self._train_on(trainer, data)
        return logs

    def _train_on(self, trainer: Trainer, data: Any) -> dict[str, Any]:
        """Make one update, with smaller micro-batches if it has to be."""
        backend, model = trainer.backend, trainer.model
        largest = backend.data.largest_count(model, data)

        def run(size: int) -> dict[str, Any]:
            if size < largest:
                trainer.phases.learn(data, size)
                trainer.self_check.at(data, size)
            with trainer.phases.rollback.undone_if(backend.OUT_OF_MEMORY):
                return trainer.train_on(data, size)

        assert self.size is not None
        logs, self.size = with_smaller_ones(
            run,
            self.size,
            out_of_memory=backend.OUT_OF_MEMORY,
            memory=lambda: memory_of(model),
            largest=lambda: backend.largest_of_all(model, largest),
        )
        return logs

    def _choose(self, trainer: Trainer, data: Any) -> int:
        chosen = self._largest(trainer, data)
        if chosen.limit is not None:
            backend = trainer.backend
            is_whole = chosen.size >= backend.data.largest_count(trainer.model, data)
            what = "the whole batch" if is_whole else f"micro-batches of {chosen.size} samples"
            fits = "fits, nothing is accumulated" if is_whole else "fit"
            self._say(
                f"bigbatch: {what} {fits}: about {readable(chosen.peak)} of "
                f"{readable(chosen.limit)}"
            )
        return chosen.size

    def _largest(self, trainer: Trainer, data: Any) -> ChosenSize:
        """Return the largest size that fits, with as much stored between stages as can be.

        That is, if micro-batches are not too small for the device to be busy.
        """
        phases = trainer.phases
        phases.store_all()
        while True:
            try:
                chosen = largest_trial_that_fits(trainer, data)
            except ContextError:  # not even one sample
                if not phases.store_less():
                    raise
                continue
            if chosen.limit is None or chosen.size >= _FEWEST or not phases.store_less():
                return chosen
