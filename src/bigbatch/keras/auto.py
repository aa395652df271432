"""Micro-batches as large as the device has memory for: chosen, and made smaller if need be."""

from __future__ import annotations

from typing import Any, Callable

import tensorflow as tf

from bigbatch.core.memory import readable
from bigbatch.errors import ContextError
from bigbatch.keras import compat
from bigbatch.keras.data import is_iterator, largest_count, next_batches, without_optionals
from bigbatch.keras.split import SplitEngine
from bigbatch.keras.trial import largest_trial_that_fits, memory_of
from bigbatch.tf.replicas import largest_of_all
from bigbatch.tf.trial import not_even_one, warn_of_smaller_size

_OUT_OF_MEMORY = tf.errors.ResourceExhaustedError


class AutoEngine:
    """Trains `model` with micro-batches of a size that it chooses.

    The size is chosen at the first batch, from the peak memory of trial updates that are
    undone. A batch that runs out of memory all the same is rolled back and run again with
    micro-batches half as large.

    Args:
        model: a compiled Keras model.
        engine: what trains on a batch, given a size.
        say: called with what users may want to know.
    """

    def __init__(self, model: Any, engine: SplitEngine, say: Callable[[str], None]) -> None:
        self._model = model
        self._engine = engine
        self._say = say
        self._keras = compat.keras_of(model)
        self._strategy = compat.strategy_of(model)
        self.microbatch_size: int | None = None
        """The samples per micro-batch and replica, once they are chosen."""

    def train(self, iterator: Any) -> dict[str, Any]:
        """Train on the next batches of `iterator`, one update each; return the logs."""
        types = iterator.element_spec if is_iterator(iterator) else None
        logs: dict[str, Any] = {}
        with self._engine.state.protected():
            for data in next_batches(iterator, self._keras.batches_per_call(self._model)):
                self._engine.prepare(data if types is None else types)
                data = without_optionals(data)
                if self.microbatch_size is None:
                    self.microbatch_size = self._choose(data)
                logs = self._train_on(data)
        return logs

    def flush(self) -> None:
        """Do nothing: between calls no batch is half done."""

    def roll_back(self) -> None:
        """Do nothing, for the same reason."""

    def _train_on(self, data: Any) -> dict[str, Any]:
        """Make one update, with smaller micro-batches if it has to be."""
        while True:
            assert self.microbatch_size is not None
            if self.microbatch_size < largest_count(self._strategy, data):
                self._engine.look_at(data, self.microbatch_size)
            try:
                with self._engine.state.undone_if(_OUT_OF_MEMORY):
                    return self._engine.train_on(data, self.microbatch_size)
            except _OUT_OF_MEMORY as error:
                count = largest_of_all(self._strategy, largest_count(self._strategy, data))
                size = min(self.microbatch_size, count)
                if size == 1:
                    raise ContextError(not_even_one(memory_of(self._model), error)) from error
            # Outside the handler, whose traceback keeps tensors alive.
            self.microbatch_size = size // 2
            warn_of_smaller_size(size, self.microbatch_size)

    def _choose(self, data: Any) -> int:
        found = largest_trial_that_fits(self._model, self._engine, data)
        if found.limit is not None:
            self._say(
                f"bigbatch: micro-batches of {found.size} samples, which take about "
                f"{readable(found.peak)} of {readable(found.limit)}"
            )
        return found.size
