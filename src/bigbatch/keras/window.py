"""Window mode: `fit` gets micro-batches, of which several make one update."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Iterator

import tensorflow as tf

from bigbatch.core.window import AccumulationSteps, window_length
from bigbatch.keras import compat
from bigbatch.keras.collector import optimizers_of
from bigbatch.keras.coupling import FirstLook, warn_of_coupled_loss
from bigbatch.keras.data import (
    END_OF_DATA,
    as_tensor,
    is_iterator,
    on_next,
    with_any_count,
    without_optionals,
)
from bigbatch.keras.runner import Runner, Whole
from bigbatch.keras.state import State
from bigbatch.keras.terms import DenominatorsNeededError, Lengths
from bigbatch.tf import replicas
from bigbatch.tf.batch import sample_count
from bigbatch.tf.buffers import local_variable
from bigbatch.tf.running_total import RunningTotal
from bigbatch.tf.values import WEIGHT_DTYPE, divided

_GRAPHS = (
    "_add_next",
    "_add_data",
    "_logs_so_far",
    "_finish",
    "_count",
    "_open_held",
    "_update",
)


class WindowEngine:
    """Trains `model` with windows of batches of the data set.

    The batches of a window are left to the iterator until `fit` has asked for the last of them,
    and then run and make the update in one graph. The first batch of an epoch runs as it
    comes, so that there are logs, and so does every batch if it is not known when an epoch
    ends. If a term of the loss divides by something else than samples, what it divides by is
    known only when the window is full: then the inputs of the window are held, and run when
    they are all there.

    Args:
        model: a compiled Keras model.
        accumulation_steps: batches of the data set per update, or a schedule.
        batch_norm: what batch normalisation does; see `BatchNorm`.
    """

    def __init__(
        self, model: Any, accumulation_steps: AccumulationSteps, batch_norm: str
    ) -> None:
        self._model = model
        self._accumulation_steps = accumulation_steps
        self._batch_norm = batch_norm
        self._keras = compat.keras_of(model)
        self._state = State(model)
        self._first_look = FirstLook(model, warn_of_coupled_loss)
        self._runner: Any = None
        self._length = 0
        self._length_tensor: Any = None
        self._filled = 0
        self._holds = False
        self._held: list[Any] = []
        self._waiting = 0
        self._iterator: Any = None
        self.batches_per_epoch: int | None = None
        """After how many batches an epoch ends, if that is certain."""
        self._batches = 0
        self._logs: Any = None

    def train(self, iterator: Any) -> dict[str, Any]:
        """Train on the next batches of `iterator`, at once or later; return the logs."""
        iterator = iterator if is_iterator(iterator) else iter(iterator)
        count = self._keras.batches_per_call(self._model)
        if is_iterator(iterator):
            self._batches += count
        with self._protected():
            if self._can_wait(iterator):
                self._iterator = iterator
                self._waiting += count
                self._train_waiting(is_last=self._batches >= (self.batches_per_epoch or 0))
            else:
                self._train_now(iterator, count)
        return self._logs

    def flush(self) -> dict[str, Any] | None:
        """Make one update of what is left of an epoch; return the logs, if there are any."""
        logs = None
        with self._protected():
            if self._waiting:
                with contextlib.suppress(*END_OF_DATA):
                    self._train_waiting(is_last=True)
                logs = self._logs
            if self._filled:
                logs = self._close()
        self._begin_epoch()
        return logs

    def roll_back(self) -> None:
        """Forget the window; metrics, moving statistics and random state are as before it."""
        if self._filled:
            self._state.restore()
        self._forget()

    def _forget(self) -> None:
        self._end_window()
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._batches, self._waiting, self._logs, self._iterator = 0, 0, None, None

    def _end_window(self) -> None:
        self._length, self._filled, self._held = 0, 0, []

    @contextlib.contextmanager
    def _protected(self) -> Iterator[None]:
        try:
            with self._state.protected():
                yield
        except BaseException as error:
            if not isinstance(error, END_OF_DATA):
                self._forget()
            raise

    def _can_wait(self, iterator: Any) -> bool:
        """Say whether batches can be left to the iterator, as nobody needs their logs yet."""
        is_ready = self._runner is not None and self._first_look.is_done
        is_streamed = not self._holds and not self._model.run_eagerly and is_iterator(iterator)
        has_logs = self._logs is not None
        return is_ready and is_streamed and has_logs and self.batches_per_epoch is not None

    def _train_waiting(self, *, is_last: bool) -> None:
        """Make the updates for which enough batches wait in the iterator, or a short one."""
        is_any = False
        while self._waiting:
            self._begin_window()
            missing = self._length - self._filled
            if self._waiting < missing and not is_last:
                return
            wanted, is_first = min(self._waiting, missing), not self._filled
            expected, self._waiting = self._waiting, self._waiting - wanted
            try:
                done, self._logs = self._finish(
                    self._iterator, tf.constant(wanted), self._length_tensor, is_first
                )
            except END_OF_DATA:
                self._waiting = 0
                if is_any:
                    return
                raise
            is_any = True
            self._end_window()
            if int(done) < wanted:  # the data has come to its end
                self._waiting = 0
                # Whole calls that have found nothing: Keras wants to know.
                if expected - int(done) >= self._keras.batches_per_call(self._model):
                    raise StopIteration

    def _train_now(self, iterator: Any, left: int) -> None:
        """Train on the next `left` batches, or fewer if there are no more."""
        is_any = False
        while left:
            self._begin_window()
            wanted = min(left, self._length - self._filled)
            try:
                done, self._logs = self._add(iterator, wanted)
            except END_OF_DATA:
                if is_any:
                    return
                raise
            is_any = True
            self._filled += done
            left -= done
            if self._filled == self._length:
                self._logs = self._close()

    def _begin_window(self) -> None:
        if not self._length:
            self._length = self._next_length()
            self._length_tensor = tf.constant(self._length, WEIGHT_DTYPE)

    def _close(self) -> dict[str, Any]:
        """Make one update of what the window holds; return the logs."""
        if self._holds:
            self._open_held()
            for index, data in enumerate(self._held):
                self._add_data(data, self._length_tensor, index == 0)
        logs = self._update()
        self._end_window()
        return logs

    def _next_length(self) -> int:
        updates = 0
        if callable(self._accumulation_steps):
            updates = max(int(one.iterations.numpy()) for one in optimizers_of(self._model))
        return window_length(self._accumulation_steps, updates)

    def _add(self, iterator: Any, wanted: Any) -> tuple[int, dict[str, Any]]:
        """Add up to `wanted` batches to the window; return how many, and the logs."""
        is_first = not self._filled
        if is_iterator(iterator):
            self._prepare(iterator.element_spec, Lengths.DECLARED)
            if not self._holds and self._first_look.is_done:
                if self._keras.batches_per_call(self._model) > 1:
                    wanted = tf.constant(wanted)
                done, logs = self._add_next(iterator, wanted, self._length_tensor, is_first)
                return int(done), logs
        data = without_optionals(next(iterator))
        if not is_iterator(iterator):
            data = tf.nest.map_structure(as_tensor, data)
            self._prepare(tf.nest.map_structure(with_any_count, data), Lengths.ANY)
        self._first_look.at(data)
        if not self._holds:
            self._add_data(data, self._length_tensor, is_first)
            return 1, self._logs_so_far()
        self._count(data, is_first)
        self._held.append(data)
        return 1, self._keras.results(self._model)

    def _prepare(self, types: Any, lengths: Lengths) -> None:
        """Trace a micro-batch and make the buffers, given the types of data."""
        if self._runner is not None:
            return
        model, types = self._model, without_optionals(types)
        self._state.prepare(types)
        runner = Runner(model, self._batch_norm, lengths)
        runner.prepare()
        running = functools.partial(
            RunningTotal,
            runner.strategy,
            run_eagerly=model.run_eagerly,
            jit_compile=self._keras.jit_compile(model),
            kept=runner.kept,
        )
        with runner.strategy.scope():
            self._unit = local_variable(tf.zeros([], WEIGHT_DTYPE))
            self._whole = local_variable(tf.zeros([0], WEIGHT_DTYPE), tf.TensorShape([None]))
            looks = runner.looks()
            self._looks = None if looks is None else local_variable(looks, summed=False)
        self._runner = runner
        self._total = running(self._run, trace=runner.new_trace())
        self._counts = running(runner.counts, trace=runner.new_trace())
        try:
            self._total.prepare(types)
            # Without a graph nothing is known before it happens.
            has_loss = self._keras.compile_loss_of(model) is not None
            self._holds = model.run_eagerly and has_loss
        except DenominatorsNeededError:
            self._holds = True
            self._counts.prepare(types)
            self._total.prepare(types)
        if not self._state.is_complete:
            self._state.prepare(types)  # what could only be built by tracing
        self._state.include(self._total.once)
        if not model.run_eagerly:
            function = functools.partial(tf.function, reduce_retracing=True, autograph=False)
            for name in _GRAPHS:
                # Or TensorFlow would warn that methods of many models are traced many times.
                method = functools.partial(getattr(self, name))
                setattr(self, name, function(method))

    def _run(self, data: Any) -> dict[str, Any]:
        """Run one micro-batch on one replica."""
        samples = denominators = None
        if self._holds:
            samples, *denominators = tf.unstack(self._whole.read_value(), self._counts.size)
        looks = None if self._looks is None else self._looks.read_value()
        whole = Whole(self._unit.read_value(), samples, denominators, looks)
        return self._runner.run(data, whole)

    def _add_next(
        self, iterator: Any, wanted: Any, length: Any, is_first: bool
    ) -> tuple[Any, dict[str, Any]]:
        """Add the next batches to the window; return how many there were, and the logs."""
        return self._take(iterator, wanted, length, is_first), self._logs_so_far()

    def _finish(
        self, iterator: Any, wanted: Any, length: Any, is_first: bool
    ) -> tuple[Any, dict[str, Any]]:
        """Add the next batches to the window and make the update; return as `_add_next`."""
        done = self._take(iterator, wanted, length, is_first)
        return done, self._update()

    def _take(self, iterator: Any, wanted: Any, length: Any, is_first: bool) -> Any:
        return on_next(
            iterator,
            lambda data: self._add_data(data, length, is_first),
            lambda data: self._add_data(data, length, False),
            wanted,
        )[0]

    def _add_data(self, data: Any, length: Any, is_first: bool) -> Any:
        """Run one batch of the data set and add it to the window."""
        strategy, data = self._runner.strategy, without_optionals(data)
        begins = is_first and not self._holds
        with self._state.taken() if begins else contextlib.nullcontext():
            if begins:
                strategy.run(self._open, args=(data, length))
            if is_first:
                strategy.run(self._runner.open)
            else:
                samples = strategy.run(sample_count, args=(data,))
                samples = strategy.experimental_local_results(samples)
                self._state.put_back(self._total.once, samples)
            self._total.add(data, is_first=is_first)
        return tf.constant(True)  # a branch of a graph returns something

    def _logs_so_far(self) -> dict[str, Any]:
        """Return the logs of the replicas in this process: nothing is communicated yet."""

        def logs() -> tuple[Any, Any]:
            sums = self._total.value("logs", "samples")
            return self._runner.logs.so_far(sums["logs"], sums["samples"]), sums["samples"]

        strategy = self._runner.strategy
        results = strategy.experimental_local_results(strategy.run(logs))
        summed = tf.nest.map_structure(lambda *parts: tf.add_n(parts), *results)
        return {name: divided(value, summed[1]) for name, value in summed[0].items()}

    def _open(self, data: Any, length: Any) -> None:
        """Choose the unit of the gradients: as many samples as the window is likely to have."""
        samples = tf.cast(sample_count(data), WEIGHT_DTYPE)
        self._begin_batch(self._runner.unit(tf.maximum(samples, 1) * length))

    def _begin_batch(self, unit: Any) -> None:
        """Note what all micro-batches of a window need to know, on each replica."""
        self._unit.assign(unit)
        if self._looks is not None:
            self._looks.assign(self._runner.looks())

    def _count(self, data: Any, is_first: bool) -> None:
        self._counts.add(data, is_first=is_first)

    def _open_held(self) -> None:
        """Work out what the terms of the held window divide by."""

        def local() -> None:
            counts = self._counts.value()
            whole = self._runner.whole(counts)
            self._begin_batch(tf.maximum(whole.unit, 1))
            self._whole.assign(tf.stack([whole.samples, *whole.denominators]))

        with self._state.taken():
            self._runner.strategy.run(local)

    def _update(self) -> dict[str, Any]:
        """Make the update."""

        def local() -> list[Any]:
            sums = self._total.value()
            return self._runner.close(
                sums, self._unit.read_value(), is_known=self._model.run_eagerly
            )

        variables = self._model.trainable_variables
        flat = replicas.sum_from_outside(self._runner.strategy, variables, local)
        with self._state.dropped(flat):
            return self._runner.update(flat)
