"""Run a function on the micro-batches of `fit`, and add up what it returns."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator

import torch

from bigbatch.backends.base import Backend
from bigbatch.backends.keras import layers_of
from bigbatch.backends.torch import data as batches
from bigbatch.backends.torch.compat import make_global_seeds, seed_generators_of
from bigbatch.backends.torch.draws import Drawn, Draws, differs, has_global_seed, passes_over
from bigbatch.backends.torch.ops import ones
from bigbatch.backends.torch.rollback import Copies
from bigbatch.backends.torch.step_trial import kept_by
from bigbatch.backends.torch.sums import PythonSums
from bigbatch.backends.torch.trial import Choices, Told, seeds_of, told_by_trial
from bigbatch.backends.torch.whole_draws import WholeDraws
from bigbatch.core.patching import replaced
from bigbatch.core.python_random import PythonDraws, python_states


class SameForAll:
    """What every micro-batch of a batch starts from: random draws, counters.

    Args:
        backend: the backend of the model.
        model: a Keras model.
    """

    def __init__(self, backend: Backend, model: Any) -> None:
        self._backend, self._model = backend, model
        self._draws = Draws()
        self._before: list[tuple[Any, Any]] | None = None
        self._started = 0
        self._knows_step = False
        self._drawn: list[Drawn] = []
        self._unknown: list[str] = []
        self._choices = Choices()
        self._draws_globally = False
        self._python: Any = None
        self._by_python: PythonDraws | None = None
        self._repeated: Any = None
        self.in_blocks = False
        """Whether several rows for each sample are in blocks in draws."""
        self.is_prepared = False
        """Whether it is known what the model does with samples."""
        self.once: dict[int, Any] = {}
        """The tensors that change once per batch: the same for any samples. By `id`."""
        self._written: dict[int, Any] = {}

    def prepare(self, types: Any) -> None:
        """Try what the model does with such samples."""
        if self._knows_step:
            return
        told = told_by_trial(self._backend, self._model, types)
        self._use(told)
        self._written.update((id(one), one) for one in told.written)

    def learn(self, told: Told) -> None:
        """Use what a trial of the whole `train_step` has told."""
        self._use(told)
        self._knows_step = True

    def _use(self, told: Told) -> None:
        self.is_prepared, self._choices = True, told.choices
        self.once.update((id(one), one) for one in told.once)
        self._drawn, self._unknown = told.drawn, told.unknown
        # What Python chooses may draw something else in the next batch.
        self._draws.places = None if told.choices.of_batch else told.places
        self._draws.shared = {(one.kind, one.shape) for one in told.shared}
        draws = (*told.drawn, *told.shared)
        self._draws_globally = any(map(has_global_seed, draws))
        self._make_seeds()

    def _make_seeds(self) -> None:
        """Make the generator of Keras that seeds are drawn from, as the first draw would.

        Before a batch, so that micro-batches and passes go back to its state.
        """
        if self._draws_globally:
            make_global_seeds()

    def with_other_draws(self) -> list[str]:
        """Name what may draw other numbers than the full batch, by layers."""
        if not self._is_certain:
            return []
        on_cpu = ones().device.type == "cpu"
        draws = [one for one in self._drawn if differs(one, on_cpu=on_cpu)]
        layers = (self._model, *layers_of(self._model))
        owners = {id(seed): one.name for one in layers for seed in seed_generators_of(one)}
        names = [owners.get(id(one.seed), one.kind) for one in draws]
        by_python = ["Python's random or numpy.random"] if self._choices.of_samples else []
        return list(dict.fromkeys([*names, *self._unknown, *by_python]))

    @property
    def _is_certain(self) -> bool:
        """Whether nothing more will be told of a `train_step`."""
        return self._knows_step or not self._backend.has_custom_train_step(self._model)

    @property
    def draws_by_total(self) -> bool:
        """Whether random numbers depend on how many samples the batch has."""
        if not self._is_certain or ones().device.type != "cpu":
            return False
        is_any = self._draws.places is None or any(map(passes_over, self._drawn))
        return self.in_blocks or is_any

    def others(self) -> list[Any]:
        """Return the state that every micro-batch changes, and the seeds."""
        state = [*kept_by(self._backend, self._model), *seeds_of(self._model)]
        return [one for one in state if id(one) not in self.once and not one.requires_grad]

    @property
    def draws_by_sample(self) -> bool:
        """Whether samples may have random numbers of their own, by their place in the batch."""
        return self._draws.places is None or any(self._draws.places)

    @property
    def draws_several_rows(self) -> bool:
        """Whether a draw is known to have several rows for each sample."""
        return any(rows > 1 for rows in self._draws.places or ())

    def draw_in_blocks(self, is_so: bool) -> bool:
        """Say whether draws of several rows for each sample are in blocks, if there are any."""
        self.in_blocks = self._draws.in_blocks = is_so and self.draws_several_rows
        return self.draws_several_rows

    def assigned(self) -> list[Any]:
        """Return the tensors that a micro-batch may change beside metrics."""
        if not self._backend.has_custom_train_step(self._model):
            return list(self._written.values())
        return kept_by(self._backend, self._model)

    def few_samples(self, count: int) -> contextlib.AbstractContextManager[None]:
        """Return a block in which `count` samples are tried, and draw the same if cut."""
        return replaced(self, _draws=WholeDraws(self._draws, count))

    def begin(self, start: int = 0) -> None:
        """Begin a batch whose samples are there from `start` on."""
        self._started, self._before = start, None
        self._draws.begin()

    @contextlib.contextmanager
    def running(self, count: int, total: int | None) -> Any:
        """Return a block in which the next micro-batch, of `count` samples, runs.

        `total` is the number of samples of the batch, if that is known.
        """
        is_first = self._before is None
        if self._before is None:
            self._make_seeds()
            once = {**self.once, **{id(one): one for one in seeds_of(self._model)}}
            self._before = [(one, one.detach().clone()) for one in once.values()]
            if any(self._choices):
                self._python = self._repeated or python_states()
        with torch.no_grad():
            for one, value in self._before:
                one.copy_(value)
        with self._draws.rows(self._started, count, total), self._drawing_by_python(is_first):
            yield
        self._started += count

    @contextlib.contextmanager
    def _drawing_by_python(self, is_first: bool) -> Iterator[None]:
        """Return a block in which Python draws what it draws for the batch."""
        if not any(self._choices):
            yield
            return
        begins = is_first or self._choices.of_batch
        self._by_python = PythonDraws(self._python if begins else None)
        with self._by_python.drawing():
            yield
        # The batch draws as often as its first micro-batch, and data may be drawn next.
        if self._repeated is None and (is_first or self._choices.of_samples):
            self._by_python.go_on()

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """Return a block in which a batch runs several times, and Python draws the same."""
        self._make_seeds()
        is_outer = self._repeated is None
        with replaced(self, _repeated=self._repeated or python_states()):
            yield
        if is_outer and self._by_python is not None:
            self._by_python.go_on()


class Accumulation:
    """The sum of `compute` over the micro-batches of a batch.

    Args:
        same: what every micro-batch starts from.
        compute: called with a vector of numbers that are the same for the whole batch, and the
            data of a micro-batch; returns a nest of tensors and `None`.
        before: returns the value that a tensor had before the batch.
    """

    def __init__(
        self,
        same: SameForAll,
        compute: Callable[[Any, Any], Any],
        before: Callable[[Any], Any],
    ) -> None:
        self._same, self._before = same, before
        self._compute = compute
        self._sums = PythonSums()
        self.once = same.once
        self.changed = same.once

    def prepare(self, types: Any, size: int | None) -> None:
        """Find out what can be found before a micro-batch runs."""
        del size
        self._same.prepare(types)

    is_any_size = True
    """Whether micro-batches may have any number of samples: nothing is known of it before."""

    @property
    def draws_by_sample(self) -> bool:
        """Whether samples may have random numbers of their own, by their place in the batch."""
        return self._same.draws_by_sample

    def assigned(self) -> list[Any]:
        """Return the tensors that a micro-batch may change beside metrics."""
        return self._same.assigned()

    @property
    def draws_by_total(self) -> bool:
        """Whether random numbers depend on how many samples the batch has."""
        return self._same.draws_by_total

    def with_other_draws(self) -> list[str]:
        """Name what may draw other numbers than the full batch."""
        return self._same.with_other_draws()

    def effects(self) -> set[str]:
        """Return what reaches out of torch: nothing is known of it."""
        return set()

    def few_samples(self, count: int) -> contextlib.AbstractContextManager[None]:
        """Return a block in which `count` samples are tried, and draw the same if cut."""
        return self._same.few_samples(count)

    def run_eagerly(self, context: Any, data: Any, start: int) -> Any:
        """Return what `compute` does for one micro-batch of `few_samples`."""
        self._same.begin(start)
        with self._same.running(batches.checked_count(data), None):
            return self._compute(context, batches.with_own_weights(data))

    def can_run(self, data: Any) -> bool:
        """Say whether `compute` takes such data, by trying it on samples that are all zero."""
        with contextlib.suppress(Exception):
            self._compute(None, batches.samples_of(batches.types_of_any_count(data), 2, 0))
            return True
        return False

    @property
    def draws_several_rows(self) -> bool:
        """Whether a draw is known to have several rows for each sample."""
        return self._same.draws_several_rows

    def draw_in_blocks(self, is_so: bool) -> bool:
        """Say whether draws of several rows for each sample are in blocks, if there are any."""
        return self._same.draw_in_blocks(is_so)

    def forget(self) -> None:
        """Do nothing: nothing is traced."""

    def clear(self) -> None:
        """Begin a batch."""
        self._sums.clear()
        self._same.begin()

    def release(self) -> None:
        """Give back the memory of a sum that has been read."""
        self._sums.clear()

    def add(self, context: Any, data: Any, size: int | None = None) -> None:
        """Run micro-batches of `size` samples, or one of all of them, and add them up."""
        count = batches.checked_count(data)
        total = count
        if size is None:  # a batch of several such calls
            # It has been counted, if need be, unless that is what happens here.
            total = int(context[1]) or None if self._same.draws_by_total else None
        size = size or count
        for start in range(0, count, size):
            rows = min(size, count - start)
            part = batches.with_own_weights(batches.rows(data, start, rows))
            with self._same.running(rows, total):
                self._sums.add(self._compute(context, part))

    def change_once(self, context: Any, data: Any, size: int | None = None) -> None:
        """Run one micro-batch, and keep only what changes once per batch."""
        part = data if size is None else batches.first_rows(data, size)
        weights = [one for one in self.once.values() if one.requires_grad]
        others = Copies([*self._same.others(), *weights])
        with torch.no_grad():
            for one in self.once.values():
                if not one.requires_grad:
                    one.copy_(self._before(one))
        self._same.begin()
        with self._same.running(batches.checked_count(part), None):
            self._compute(context, batches.with_own_weights(part))
        others.put_back()

    def learn(self, told: Told) -> None:
        """Use what a trial of a micro-batch has told."""
        self._same.learn(told)

    def look_at(self, data: Any) -> None:
        """Do nothing: the trial of a micro-batch has told everything."""

    def value(self) -> Any:
        """Return the sum so far, in the structure that `compute` returns."""
        return self._sums.value()
