"""Train a model on the batches of `fit`, and leave it unharmed if a batch fails."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, Callable, Iterator

from bigbatch.backends.keras import backend_of
from bigbatch.core.sparse_gradients import SparseGradients
from bigbatch.engine.phases import Phases
from bigbatch.engine.planning import Planning
from bigbatch.engine.self_check import SelfCheck
from bigbatch.engine.workers import Workers


class Trainer:
    """Trains a compiled Keras model, update by update.

    Args:
        model: a compiled Keras model.
        feed: where the micro-batches of a batch come from: `Slices` or `Batches`.
        batch_norm: as for `accumulate`.
        coupled: as for `accumulate`.
        workers: what lets workers agree after each phase, if one may run out of memory.
        check: as for `accumulate`.
        sparse: how sparse gradients are kept.
        say: called with what users may want to know.
    """

    def __init__(
        self,
        model: Any,
        feed: Any,
        *,
        batch_norm: Any,
        coupled: bool | str,
        workers: Workers | None = None,
        check: str = "off",
        sparse: SparseGradients | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.model = model
        self.backend = backend_of(model)
        self.feed = feed
        self.sparse = sparse or SparseGradients()
        """How sparse gradients are kept until the update."""
        self.phases = Phases(
            model, batch_norm=batch_norm, coupled=coupled is True, sparse=self.sparse, say=say
        )
        self._workers = workers
        self.planning = Planning(
            model,
            self.phases,
            coupled=coupled,
            batch_norm=batch_norm,
            can_wait=workers is None,
            say=say,
        )
        """Decides how the loss is computed, with samples of the first batch."""
        told = lambda: self.planning.told  # noqa: E731
        self.self_check = SelfCheck(model, self.phases, check, say, told)
        """Compares samples of the first batch, whole and cut."""

    def train(self, iterator: Any) -> dict[str, Any]:
        """Train on the next batches of `iterator`, as `fit` asks; return the logs."""
        with self.backend.eager_if_asked(self.model), self._protected():
            return self.feed.train(self, iterator)

    def flush(self) -> dict[str, Any] | None:
        """Make an update of what the feed has begun; return the logs, if there was anything."""
        with self._by_itself(), self.backend.eager_if_asked(self.model), self._protected():
            return self.feed.flush(self)

    def roll_back(self) -> None:
        """Forget an unfinished batch; metrics, statistics and random state are as before it."""
        if self.feed.is_open and self.phases.rollback is not None:
            with self._by_itself():
                self.phases.rollback.restore()
        self.feed.forget()

    def _by_itself(self) -> contextlib.AbstractContextManager[None]:
        """Return a block outside of the train function, if a batch is half done."""
        is_open = self.feed.is_open
        return self.backend.on_own_devices(self.model) if is_open else contextlib.nullcontext()

    @contextlib.contextmanager
    def _protected(self) -> Iterator[None]:
        """Return a block after which, if it fails, nothing of the batch has happened."""
        try:
            yield
        except self.backend.data.END_OF_DATA:
            raise
        except BaseException as error:
            if self.phases.rollback is not None:
                self.phases.rollback.restore()
            self.feed.forget()
            explained = self.backend.explained(error)
            if explained is not None:
                raise explained from error
            raise

    def train_on(self, data: Any, size: int, types: Any = None) -> dict[str, Any]:
        """Do what `try_on` does, with less stored between stages if memory runs out."""
        backend, phases = self.backend, self.phases
        if not phases.is_exact or backend.is_multi_worker(self.model):  # who would wait
            return self.try_on(data, size, types)
        while True:
            try:
                with phases.rollback.undone_if(backend.OUT_OF_MEMORY):
                    return self.try_on(data, size, types)
            except backend.OUT_OF_MEMORY:
                if not phases.store_less():
                    raise
            warnings.warn(
                "bigbatch: out of memory. The batch was rolled back and is run again with less "
                "stored between the stages of exact batch normalisation, which takes more time "
                "and gives the same result.",
                stacklevel=2,
            )

    def try_on(self, data: Any, size: int, types: Any = None) -> dict[str, Any]:
        """Make one update from a batch, in micro-batches of `size` samples; return the logs.

        One trace serves batches of these types; of any number of samples if none are given.
        """
        data = self.backend.data.as_tensors(self.backend.data.without_optionals(data))
        rows = self.integer(size)
        self.trace(data, types)
        if self._workers is not None:
            return self._workers.train(self.phases, data, rows)
        if self.phases.full_batch_loss is not None:
            return self.phases.train_by_two_passes(data, rows)
        if self.self_check.uses_phases:
            is_known = types is not None and self.backend.data.has_known_count(types)
            return self.phases.train_by_phases(data, rows, is_known=is_known)
        return self.phases.train_batch(data, rows)

    def trace(self, data: Any, types: Any = None) -> None:
        """Trace an update for batches and micro-batches of any number of samples, once.

        Optimizers that Keras does not know of make their variables here, with no update yet.
        """
        functions = self.backend.data
        if types is None:
            types = functions.types_of_any_count(data)
        types = functions.without_optionals(types)
        if self.phases.full_batch_loss is not None:
            self.phases.trace_two_passes(types)
        elif self.self_check.uses_phases:
            is_known = functions.has_known_count(types)
            self._trace_phases(functions.types_of_any_count(types), functions.INTEGER)
            for number in range(len(self.phases.passes)):
                finish = self.phases.finish.get_concrete_function
                finish(is_whole=True, number=number, is_known=is_known)
        elif self._workers is not None:
            self._trace_phases(types, functions.INTEGER)
        elif not self.backend.runs_in_python(self.model):
            self.phases.train_batch.get_concrete_function(types, functions.INTEGER)

    def trace_micro_batch(self, types: Any) -> None:
        """Trace what runs and counts one batch of the data set as a micro-batch."""
        functions = self.backend.data
        types = functions.without_optionals(types)
        if self.self_check.uses_phases:  # whose few samples are to run in the same graph
            types = functions.types_of_any_count(types)
        self._trace_phases(types, None)

    def _trace_phases(self, types: Any, size: Any) -> None:
        if not self.backend.runs_in_python(self.model):
            for number in range(len(self.phases.passes)):
                weight = self.backend.data.WEIGHT
                self.phases.add.get_concrete_function(types, size, weight, number)
            if self.phases.needs_counts:
                self.phases.count.get_concrete_function(types, size)

    def integer(self, value: int) -> Any:
        """Return a number as an argument that needs no other trace if it changes."""
        is_number = self.backend.runs_in_python(self.model)
        return value if is_number else self.backend.data.integer(value)

    @property
    def buffer_bytes(self) -> int:
        """The bytes in which gradients are added up, once a micro-batch has been traced."""
        return self.phases.buffer_bytes

    @property
    def sample(self) -> Any:
        """Some samples of the first batch, on one device; `None` if there are none."""
        return None if self.backend.shares_batches(self.model) else self.planning.sample
