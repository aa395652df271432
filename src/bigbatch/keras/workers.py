"""Workers that agree before they communicate, so that one without memory keeps none waiting.

In a `MultiWorkerMirroredStrategy` a worker that does not take part in a reduction makes all
others wait for ever. So a batch is run in parts: those that may run out of memory do not
communicate, and after each of them the workers tell each other whether it went well.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import tensorflow as tf

from bigbatch.errors import ContextError, explain
from bigbatch.keras.data import with_any_count, without_optionals
from bigbatch.keras.runner import Whole
from bigbatch.keras.split import SplitEngine
from bigbatch.keras.state import HALF_UPDATED
from bigbatch.keras.terms import DenominatorsNeededError
from bigbatch.tf import replicas

_OUT_OF_MEMORY = tf.errors.ResourceExhaustedError
_WELL, _NO_MEMORY, _FAILED = range(3)

_ALONE = explain(
    received="a worker that ran out of memory while gradients were added up over workers",
    expected="memory for that, which is the same for every micro-batch size",
    fix="use a smaller model, or more memory; start all workers again",
)
_OTHER = explain(
    received="an error on another worker",
    expected="all workers of the MultiWorkerMirroredStrategy to train together",
    fix="look at what the other worker printed last, then start all workers again",
)


class WorkersEngine(SplitEngine):
    """Trains `model` as `SplitEngine` does; if one worker runs out of memory all raise."""

    def __init__(self, model: Any, microbatch_size: int, batch_norm: str) -> None:
        self._is_counted = False
        super().__init__(model, microbatch_size, batch_norm)

    def make_functions(self) -> None:
        """Make graphs of the parts of a batch, unless they are to run eagerly."""
        super().make_functions()
        if not self._model.run_eagerly:
            function = functools.partial(tf.function, reduce_retracing=True, autograph=False)
            for name in ("_count_all", "_whole_of", "_run_all", "_finish"):
                setattr(self, name, function(getattr(type(self), name).__get__(self)))

    def train_on(self, data: Any, size: int) -> dict[str, Any]:
        """Make one update from a batch, in micro-batches of `size` samples; return the logs."""
        data, rows = without_optionals(data), tf.constant(size)
        whole = None
        if self._needs_counts(data):
            self._trace(self._count_all, data)
            whole = self._whole_of(self._attempt(self._count_all, data, rows))
            self._trace(self._run_all, data, whole)
        sums = self._attempt(self._run_all, data, rows, whole)
        try:
            return self._finish(sums)
        except _OUT_OF_MEMORY as error:
            # The others are past this, or wait for it: there is no way back.
            raise ContextError(HALF_UPDATED if self.state.is_final else _ALONE) from error

    def trace(self, data: Any) -> None:
        """Do nothing: what is traced depends on whether denominators are needed."""

    def look_at(self, data: Any, size: int) -> None:
        """Do not: losses and metrics communicate, and not every worker may have samples."""

    def _trace(self, function: Any, data: Any, *others: Any) -> None:
        """Trace a function once, for batches and micro-batches of any number of samples."""
        types = tf.nest.map_structure(with_any_count, data)
        if self._model.run_eagerly:
            function = tf.function(function, autograph=False)
        function.get_concrete_function(types, tf.TensorSpec([], tf.int32), *others)

    def _attempt(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that does not communicate; raise if it fails on any worker."""
        result, message = None, "another worker ran out of memory"
        everyone = functools.partial(replicas.largest_of_all, self._runner.strategy)
        try:
            result, outcome = function(*arguments), _WELL
        except _OUT_OF_MEMORY as error:
            message, outcome = error.message, _NO_MEMORY
        except Exception:
            everyone(_FAILED)
            raise
        # Outside the handler, whose traceback keeps tensors alive.
        outcome = everyone(outcome)
        if outcome == _FAILED:
            raise ContextError(_OTHER)
        if outcome == _NO_MEMORY:
            raise _OUT_OF_MEMORY(None, None, message)
        return result

    def _needs_counts(self, data: Any) -> bool:
        """Say whether micro-batches cannot run before denominators of all workers are known."""
        if not self._is_counted:
            try:
                self._trace(self._run_all, data, None)
            except DenominatorsNeededError:
                self._is_counted = True
        return self._is_counted

    def _count_all(self, data: Any, size: Any) -> Any:
        def local(data: Any) -> Any:
            return self._counts(self._batch(data), size)

        return self._runner.strategy.run(local, args=(data,))

    def _whole_of(self, counts: Any) -> Any:
        def local(counts: Any) -> Any:
            whole = self._runner.whole(counts)
            return whole.unit, whole.samples, whole.denominators

        return self._runner.strategy.run(local, args=(counts,))

    def _run_all(self, data: Any, size: Any, whole: Any) -> Any:
        def local(data: Any, whole: Any) -> Any:
            if whole is not None:
                whole = Whole(*whole, looks=self._runner.looks())
            return self._run(self._batch(data), size, whole)

        with self.state.taken():
            return self._runner.strategy.run(local, args=(data, whole))

    def _finish(self, sums: Any) -> dict[str, Any]:
        def local(sums: Any) -> list[Any]:
            return self._runner.close(dict(sums), self._runner.unit(sums["samples"]))

        strategy, variables = self._runner.strategy, self._model.trainable_variables
        flat = replicas.sum_from_outside(strategy, variables, local, (sums,))
        with self.state.dropped(flat):
            return self._runner.update(flat)
