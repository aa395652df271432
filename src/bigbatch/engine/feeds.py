"""Feeds: they supply the micro-batches of a batch."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator

from bigbatch.backends.keras import optimizers_of
from bigbatch.core.window import AccumulationSteps, window_length
from bigbatch.engine.loss_terms import SharedDimensions
from bigbatch.engine.microbatch import CountsNeededError
from bigbatch.engine.trainer import Trainer

WHOLE_BATCH = 0
"""The micro-batch size that stands for the whole batch, however large."""

_LARGEST_SIZE = 2**31 - 1
"""A micro-batch size that no batch is larger than."""


class WholeBatches:
    """A feed for which every call of `train` makes whole updates."""

    batches_per_epoch: int | None = None
    """After how many batches an epoch ends, if that is certain."""

    @property
    def is_open(self) -> bool:
        """Whether a batch is half done: never between calls."""
        return False

    def flush(self, trainer: Trainer) -> None:
        """Do nothing: no batch is half done."""

    def forget(self) -> None:
        """Do nothing, for the same reason."""


class Slices(WholeBatches):
    """Split mode: each batch makes one update, and its micro-batches are slices of it.

    Args:
        size: samples per micro-batch, on each replica; or `WHOLE_BATCH`.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def train(self, trainer: Trainer, iterator: Any) -> dict[str, Any]:
        """Make one update from each of the next batches; return the logs."""
        data, phases = trainer.backend.data, trainer.phases
        count = trainer.backend.batches_per_call(trainer.model)
        types = iterator.element_spec if data.is_iterator(iterator) else None
        size = _LARGEST_SIZE if self.size == WHOLE_BATCH else self.size
        planning = trainer.planning
        if self.size == WHOLE_BATCH:
            planning.conclude()  # the batch is whole
        if types is not None and planning.is_done:
            phases.prepare(types, SharedDimensions.SAME, self.size or None)
            is_checked = trainer.self_check.is_done or self.size == WHOLE_BATCH
            # Stages take long to build, and are there already: in the graphs of the check.
            if is_checked and not phases.needs_whole_batch:
                # A number that is known when the graph is built makes a simpler one.
                number = 1 if count == 1 else trainer.integer(count)
                return phases.train_next(iterator, number, trainer.integer(size))
        logs: dict[str, Any] = {}
        for batch in data.next_batches(iterator, count):
            planning.at(batch, self.size)
            planning.conclude()
            phases.prepare(
                batch if types is None else types, SharedDimensions.SAME, self.size or None
            )
            if self.size != WHOLE_BATCH:  # or the batch is whole
                batch = data.as_tensors(data.without_optionals(batch))
                phases.learn(batch, self.size)
                trainer.self_check.at(batch, self.size)
            logs = trainer.train_on(batch, size, types)
        return logs


class Batches:
    """Window mode: several batches of the data set, each a micro-batch, make one update.

    The batches of a window are left to the iterator until `fit` has asked for the last of them,
    and then run in one graph. The first batch of an epoch runs as it comes, so that there are
    logs, and so does every batch if it is not known when an epoch ends. If a term of the loss
    has to know numbers of the whole window, its batches are held, and run when all are there.

    Args:
        accumulation_steps: batches of the data set per update, or a schedule.
    """

    def __init__(self, accumulation_steps: AccumulationSteps) -> None:
        self._accumulation_steps = accumulation_steps
        self.batches_per_epoch: int | None = None
        """After how many batches an epoch ends, if that is certain."""
        self._length = 0
        self._filled = 0
        self._held: list[Any] = []
        self._types: Any = None
        self._lengths = SharedDimensions.ANY
        self._begin_epoch()

    def train(self, trainer: Trainer, iterator: Any) -> dict[str, Any]:
        """Train on the next batches of `iterator`, at once or later; return the logs."""
        is_iterator = trainer.backend.data.is_iterator(iterator)
        iterator = iterator if is_iterator else iter(iterator)
        count = trainer.backend.batches_per_call(trainer.model)
        self._asked += count
        if is_iterator and self._can_wait(trainer):
            self._iterator = iterator
            self._waiting += count
            self._run_waiting(trainer, is_last=self._asked >= (self.batches_per_epoch or 0))
        else:
            self._run_now(trainer, iterator, count)
            is_last = bool(self.batches_per_epoch) and self._asked >= self.batches_per_epoch
            if is_last and self._filled:  # callbacks are to see logs of all of it
                self._logs = self._finish(trainer)
        return self._logs

    @property
    def is_open(self) -> bool:
        """Whether a window has begun."""
        return self._filled > 0

    def flush(self, trainer: Trainer) -> dict[str, Any] | None:
        """Make one update of what is left of an epoch; return the logs, if there are any."""
        logs = None
        if self._waiting:
            with contextlib.suppress(*trainer.backend.data.END_OF_DATA):
                self._run_waiting(trainer, is_last=True)
            logs = self._logs
        if self._filled:
            logs = self._finish(trainer)
        self._begin_epoch()
        return logs

    def forget(self) -> None:
        """Forget the window and the epoch."""
        self._end_window()
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._asked, self._waiting = 0, 0
        self._logs: Any = None
        self._iterator: Any = None

    def _end_window(self) -> None:
        self._length, self._filled, self._held = 0, 0, []

    def _can_wait(self, trainer: Trainer) -> bool:
        """Say whether batches can be left to the iterator, as nobody needs their logs yet."""
        is_checked = trainer.planning.is_done and trainer.self_check.is_done
        is_ready = trainer.phases.rollback is not None and is_checked
        is_in_graph = not trainer.backend.runs_in_python(trainer.model)
        is_streamed = not self._holds(trainer) and is_in_graph
        return is_ready and is_streamed and bool(self._logs) and bool(self.batches_per_epoch)

    def _holds(self, trainer: Trainer) -> bool:
        """Say whether the batches of a window are held until all are there."""
        if self._held or not trainer.planning.is_done:
            return True
        phases = trainer.phases
        return phases.needs_counts or phases.runs_again or phases.needs_whole_batch

    def _run_waiting(self, trainer: Trainer, *, is_last: bool) -> None:
        """Make the updates for which enough batches wait in the iterator, or a short one."""
        per_call = trainer.backend.batches_per_call(trainer.model)
        is_any = False
        while self._waiting:
            self._begin_window(trainer)
            missing = self._length - self._filled
            if self._waiting < missing and not is_last:
                return
            wanted = min(self._waiting, missing)
            expected, self._waiting = self._waiting, self._waiting - wanted
            try:
                done = self._run_window(trainer, self._iterator, wanted)
            except trainer.backend.data.END_OF_DATA:
                self._waiting = 0
                if is_any:
                    return
                raise
            is_any = True
            if done < wanted:  # the data has come to its end
                self._waiting = 0
                # Whole calls that have found nothing: Keras wants to know.
                if expected - done >= per_call:
                    raise StopIteration

    def _run_window(self, trainer: Trainer, iterator: Any, wanted: int) -> int:
        """Make an update, the window being complete with the next batches; return how many."""
        if self._filled:
            done = self._add_next(trainer, iterator, wanted)
            self._logs = self._finish(trainer)
            return done
        with self._nothing_begun_at_the_end(trainer):
            arguments = iterator, trainer.integer(wanted), self._weight(trainer)
            done, self._logs = trainer.phases.train_window(*arguments)
        self._end_window()
        return int(done)

    @contextlib.contextmanager
    def _nothing_begun_at_the_end(self, trainer: Trainer) -> Iterator[None]:
        """Return a block that leaves nothing behind if the data ends in it."""
        try:
            yield
        except trainer.backend.data.END_OF_DATA:
            if not self._filled:
                trainer.phases.rollback.forget()
                trainer.phases.release()
            raise

    def _run_now(self, trainer: Trainer, iterator: Any, left: int) -> None:
        """Train on the next `left` batches, or fewer if there are no more."""
        is_any = False
        while left:
            self._begin_window(trainer)
            wanted = min(left, self._length - self._filled)
            try:
                done = self._add(trainer, iterator, wanted)
            except trainer.backend.data.END_OF_DATA:
                if is_any:
                    return
                raise
            is_any = True
            self._filled += done
            left -= done
            if self._filled == self._length:
                self._logs = self._finish(trainer)

    def _begin_window(self, trainer: Trainer) -> None:
        if not self._length:
            updates = 0
            if callable(self._accumulation_steps):
                optimizers = optimizers_of(trainer.model)
                updates = max(int(one.iterations.numpy()) for one in optimizers)
            self._length = window_length(self._accumulation_steps, updates)

    def _add(self, trainer: Trainer, iterator: Any, wanted: int) -> int:
        """Add up to `wanted` batches to the window; return how many."""
        functions, phases = trainer.backend.data, trainer.phases
        is_iterator = functions.is_iterator(iterator)
        if is_iterator:
            self._types, self._lengths = iterator.element_spec, SharedDimensions.DECLARED
            if trainer.planning.is_done:
                self._prepare(trainer)
                # What has been added up would be lost by a check now.
                is_checked = trainer.self_check.is_done or self._filled
                # Eagerly a batch is needed once more if it shows that all have to be counted.
                is_certain = phases.is_planned and trainer.backend.is_traced(trainer.model)
                if is_certain and is_checked and not self._holds(trainer):
                    done = self._add_next(trainer, iterator, wanted)
                    self._logs = phases.logs_so_far()
                    return done
        data = functions.as_tensors(functions.without_optionals(next(iterator)))
        if not is_iterator:
            self._types, self._lengths = (
                functions.types_of_any_count(data),
                SharedDimensions.ANY,
            )
        trainer.planning.at(data, batches=self._length)
        if trainer.planning.is_done:
            self._prepare(trainer)
            phases.learn(data, None)
            if self._held or not self._filled:
                self._check(trainer, data)
        if self._holds(trainer):
            self._held.append(data)
            self._logs = {**(self._logs or {}), **trainer.backend.results(trainer.model)}
        else:
            if not self._filled:
                phases.begin()
            try:
                phases.add(data, None, self._weight(trainer))
            except CountsNeededError:
                phases.begin_to_count(data, is_open=self._filled > 0)
                self._held.append(data)
                self._logs = trainer.backend.results(trainer.model)
                return 1
            self._logs = phases.logs_so_far()
        return 1

    def _prepare(self, trainer: Trainer) -> None:
        """Trace a micro-batch, and what runs it, for all batches of the data set."""
        is_open = self._filled > 0 and not self._held
        is_new = trainer.phases.prepare(self._types, self._lengths, None, is_open=is_open)
        if is_new and not trainer.phases.needs_whole_batch:
            trainer.trace_micro_batch(self._types)

    def _check(self, trainer: Trainer, data: Any) -> None:
        """Compare a few samples of the batches that are here, whole and cut."""
        if self._held and not trainer.self_check.is_done:
            with contextlib.suppress(Exception):  # batches of different lengths
                join = trainer.backend.data.joined
                data = trainer.backend.on_replicas(trainer.model, join, *self._held, data)
        if trainer.self_check.at(data, None):
            trainer.trace_micro_batch(self._types)

    def _add_next(self, trainer: Trainer, iterator: Any, wanted: int) -> int:
        if not self._filled:
            trainer.phases.begin()
        count, weight = trainer.integer(wanted), self._weight(trainer)
        with self._nothing_begun_at_the_end(trainer):
            return int(trainer.phases.add_next(iterator, count, weight))

    def _weight(self, trainer: Trainer) -> Any:
        return trainer.backend.ops.weight(self._length)

    def _finish(self, trainer: Trainer) -> dict[str, Any]:
        """Make one update of what the window holds; return the logs."""
        phases, functions = trainer.phases, trainer.backend.data
        held = self._held
        if not trainer.planning.is_done:  # too few samples: the window ends here
            trainer.planning.conclude()
            self._prepare(trainer)
            phases.learn(held[0], None)
            self._check(trainer, held[0])
        if phases.needs_whole_batch:
            self._held, parts = [], len(held)  # or inputs would be in memory twice
            joined = trainer.backend.on_replicas(trainer.model, functions.joined, *held)
            del held
            largest = functions.largest_count(trainer.model, joined)
            logs = trainer.train_on(joined, -(-largest // parts))
        else:
            if held:
                try:
                    self._add_held(trainer)
                except CountsNeededError:
                    phases.begin_to_count(held[0])
                    self._add_held(trainer)
            logs = phases.finish(is_whole=False)
            for number in range(1, len(phases.passes)):
                phases.begin_again(number)
                for data in held:
                    phases.add(data, None, self._weight(trainer), number)
                logs = phases.finish(is_whole=False, number=number)
            if phases.settles:
                phases.settle(held[0], None)
        self._end_window()
        return logs

    def _add_held(self, trainer: Trainer) -> None:
        """Run the batches that are held, in the first pass."""
        phases = trainer.phases
        phases.begin()
        if phases.needs_counts:
            for data in self._held:
                phases.count(data, None)
            phases.use_counts()
        for data in self._held:
            phases.add(data, None, self._weight(trainer))
