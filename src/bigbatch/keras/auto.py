"""Micro-batches as large as the device has memory for: chosen, and made smaller if need be."""

from __future__ import annotations

import warnings
from typing import Any, Callable

import tensorflow as tf

from bigbatch.core.memory import readable
from bigbatch.errors import ArgumentError, ContextError, explain
from bigbatch.keras import compat
from bigbatch.keras.data import is_iterator, largest_count, next_batches, without_optionals
from bigbatch.keras.split import SplitEngine
from bigbatch.keras.trial import largest_that_fits

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
        self._strategy = compat.strategy_of(model)
        if isinstance(self._strategy, tf.distribute.MultiWorkerMirroredStrategy):
            # A worker that tries or repeats something the others do not would wait for ever.
            raise ArgumentError(
                explain(
                    received='microbatch_size="auto" under MultiWorkerMirroredStrategy',
                    expected="a number, on which workers need not agree while they train",
                    fix='find it with "auto" on one worker: bigbatch.microbatch_size(model)',
                )
            )
        self.microbatch_size: int | None = None
        """The samples per micro-batch and replica, once they are chosen."""

    def train(self, iterator: Any) -> dict[str, Any]:
        """Train on the next batches of `iterator`, one update each; return the logs."""
        types = iterator.element_spec if is_iterator(iterator) else None
        logs: dict[str, Any] = {}
        for data in next_batches(iterator, self._model.steps_per_execution):
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
                size = min(self.microbatch_size, largest_count(self._strategy, data))
                if size == 1:
                    raise ContextError(_not_even_one("a batch that is too large")) from error
            # Outside the handler, whose traceback keeps tensors alive.
            self.microbatch_size = size // 2
            warnings.warn(
                f"bigbatch: out of memory with micro-batches of {size} samples. The batch was "
                f"rolled back and is run again with {self.microbatch_size}; batches and "
                "updates stay what they are.",
                stacklevel=2,
            )

    def _choose(self, data: Any) -> int:
        found = largest_that_fits(self._model, self._engine.train_on, data)
        if not found.size:
            limit = readable(found.limit or 0)
            raise ContextError(_not_even_one(f"{limit} are not enough for an update"))
        if found.limit is not None:
            self._say(
                f"bigbatch: micro-batches of {found.size} samples, which take about "
                f"{readable(found.peak)} of {readable(found.limit)}"
            )
        return found.size


def _not_even_one(reason: str) -> str:
    return explain(
        received=f"a device without memory for one sample at a time ({reason})",
        expected="memory for the weights, the optimizer, one set of gradients, and one sample",
        fix="use a smaller model, mixed precision, an optimizer with fewer slots, shorter "
        "sequences, or a device with more memory",
    )
