"""Split mode: `fit` gets whole batches, which are cut into micro-batches."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from bigbatch.core.window import UNBOUNDED
from bigbatch.keras import compat
from bigbatch.keras.coupling import FirstLook, warn_of_coupled_loss
from bigbatch.keras.data import (
    is_iterator,
    next_batches,
    on_next,
    with_any_count,
    without_optionals,
)
from bigbatch.keras.runner import Runner, Whole
from bigbatch.keras.state import State
from bigbatch.keras.terms import DenominatorsNeededError, Lengths
from bigbatch.tf import replicas
from bigbatch.tf.batch import Batch
from bigbatch.tf.microbatches import total
from bigbatch.tf.values import WEIGHT_DTYPE


class SplitEngine:
    """Trains `model` with batches that are cut into micro-batches.

    Args:
        model: a compiled Keras model.
        microbatch_size: samples per micro-batch, on each replica; `UNBOUNDED`: all.
        batch_norm: what batch normalisation does; see `BatchNorm`.
    """

    def __init__(self, model: Any, microbatch_size: int, batch_norm: str) -> None:
        self._model = model
        self._microbatch_size = microbatch_size
        self._runner = runner = Runner(model, batch_norm, Lengths.SAME)
        self._trace_of_run, self._trace_of_counts = runner.new_trace(), runner.new_trace()
        self.state = State(model)
        """What training changes beside weights."""
        self._first_look = FirstLook(model, warn_of_coupled_loss)
        self._keras = compat.keras_of(model)
        self._is_single = self._keras.batches_per_call(model) == 1
        self._on_batch: Any = self._train_on
        self._on_iterator: Any = self._train_on_next
        self.make_functions()

    def make_functions(self) -> None:
        """Make graphs of what trains on a batch, unless it is to run eagerly."""
        if not self._model.run_eagerly:
            function = functools.partial(tf.function, reduce_retracing=True, autograph=False)
            # Or TensorFlow would warn that methods of many models are traced many times.
            self._on_batch = function(functools.partial(self._train_on))
            self._on_iterator = function(functools.partial(self._train_on_next))

    def train(self, iterator: Any) -> dict[str, Any]:
        """Train on the next batches of `iterator`, one update each; return the logs."""
        types = iterator.element_spec if is_iterator(iterator) else None
        count = self._keras.batches_per_call(self._model)
        with self.state.protected():
            if types is not None:
                self.prepare(types)
                if self._first_look.is_done or self._microbatch_size == UNBOUNDED:
                    return self._on_iterator(
                        iterator, 1 if self._is_single else tf.constant(count)
                    )
                if not self._model.run_eagerly:  # once, for batches of any size
                    self._on_batch.get_concrete_function(types)
            logs = {}
            for data in next_batches(iterator, count):
                if types is None:
                    self.prepare(data)
                if self._microbatch_size != UNBOUNDED:  # or batches are whole
                    self.look_at(data, self._microbatch_size)
                logs = self._on_batch(data)
            return logs

    def look_at(self, data: Any, size: int) -> None:
        """Look, once, at what micro-batches of a batch may do wrong."""
        self._first_look.at(data, size)

    @property
    def samples(self) -> Any:
        """Some samples of the first batch, on one device; `None` if there are none."""
        several = self._runner.strategy.num_replicas_in_sync > 1
        return None if several else self._first_look.sample

    @property
    def buffer_bytes(self) -> int:
        """The bytes in which gradients are added up, once an update has been made."""
        return self._runner.buffer_bytes

    def train_on(self, data: Any, size: int) -> dict[str, Any]:
        """Make one update from a batch, in micro-batches of `size` samples; return the logs."""
        data = without_optionals(data)
        if self._model.run_eagerly:
            return self._on_batch(data, size)
        self.trace(data)
        return self._on_batch(data, tf.constant(size))

    def trace(self, data: Any) -> None:
        """Trace `train_on` for batches and micro-batches of any number of samples, once.

        Optimizers that Keras does not know of make their variables here, with no update yet.
        """
        if not self._model.run_eagerly:
            types = tf.nest.map_structure(with_any_count, without_optionals(data))
            self._on_batch.get_concrete_function(types, tf.TensorSpec([], tf.int32))

    def prepare(self, data: Any) -> None:
        """Get ready for such data, or data of such types."""
        if self.state.is_complete:
            return
        if self.state.prepare(data):
            self.make_functions()
        self._runner.prepare()

    def flush(self) -> None:
        """Do nothing: between calls no batch is half done."""

    def roll_back(self) -> None:
        """Do nothing, for the same reason."""

    def _train_on_next(self, iterator: Any, count: Any) -> dict[str, Any]:
        return on_next(iterator, self._on_batch, self._on_batch, count)[1]

    def _train_on(self, data: Any, size: Any = None) -> dict[str, Any]:
        """Make one update from a whole batch, outside `strategy.run`; return the logs."""
        strategy, runner = self._runner.strategy, self._runner
        with self.state.taken():
            flat = replicas.sum_from_outside(
                strategy,
                self._model.trainable_variables,
                self._local,
                (without_optionals(data), size),
            )
        with self.state.dropped(flat):
            return runner.update(flat)

    def _local(self, data: Any, size: Any) -> list[Any]:
        """Run this replica's share of a batch as micro-batches."""
        batch = self._batch(data)
        size = self._size_for(batch) if size is None else size
        try:
            # Eagerly, what is tried has happened: count first.
            sums = self._counted(batch, size) if self._is_eager else self._run(batch, size)
        except DenominatorsNeededError:
            sums = self._counted(batch, size)
        unit = self._runner.unit(sums["samples"])
        return self._runner.close(sums, unit, is_known=isinstance(batch.count, int))

    def _batch(self, data: Any) -> Batch:
        return Batch((data,), may_be_empty=self._runner.strategy.num_replicas_in_sync > 1)

    def _run(self, batch: Batch, size: Any, whole: Whole | None = None) -> dict[str, Any]:
        """Run micro-batches; raise, while tracing, if denominators of the whole are needed."""
        count = tf.cast(batch.count, WEIGHT_DTYPE)
        if whole is None:
            several = self._runner.strategy.num_replicas_in_sync > 1
            samples, looks = None if several else count, self._runner.looks()
            whole = Whole(self._runner.unit(count), samples, looks=looks)
        compute = functools.partial(self._runner.run, whole=whole)
        sums = self._total(
            compute, batch, size, begin=self._runner.open, trace=self._trace_of_run
        )
        return {**sums, "samples": count}

    @property
    def _is_eager(self) -> bool:
        """Whether batches run eagerly, with a loss of Keras."""
        own = self._keras.has_own_train_step(self._model)
        has_loss = self._keras.compile_loss_of(self._model) is not None
        return self._model.run_eagerly and has_loss and not own

    def _counted(self, batch: Batch, size: Any) -> dict[str, Any]:
        counts = self._counts(batch, size)
        return self._run(batch, size, self._runner.whole(counts))

    def _counts(self, batch: Batch, size: Any) -> Any:
        return self._total(self._runner.counts, batch, size, trace=self._trace_of_counts)

    def _total(self, compute: Any, batch: Batch, size: Any, **options: Any) -> Any:
        jit_compile = self._keras.jit_compile(self._model)
        kept = self._runner.kept
        return total(compute, batch, size, jit_compile=jit_compile, kept=kept, **options)

    def _size_for(self, batch: Batch) -> Any:
        if self._microbatch_size != UNBOUNDED:
            return self._microbatch_size
        return batch.count if isinstance(batch.count, int) else tf.maximum(batch.count, 1)
