"""`plan`: try micro-batches of several sizes on this device, and plan for this or another."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from typing import Any, Callable, Iterable, Iterator

from bigbatch.backends.keras import (
    backend_of,
    check_compiled,
    check_keras_3,
    check_model,
    is_multi_worker,
    optimizers_of,
)
from bigbatch.core.arguments import positive_integer
from bigbatch.core.memory import MARGIN, MemoryCurve, bytes_of, readable
from bigbatch.core.report import progress
from bigbatch.core.size_search import peak_of
from bigbatch.engine.hooks import setting_of
from bigbatch.engine.loss_terms import SharedDimensions
from bigbatch.engine.trial import all_variables_of, memory_of, unchanged
from bigbatch.errors import ArgumentError, ContextError, explain
from bigbatch.planner.plan import Measurement, Parts, Plan

_ROUGH = (
    "the memory of the device cannot be measured here: figures are rough, from the memory of "
    "the whole process. To measure it, "
)


_UPDATES = 3
"""How often each size is tried: operations take more in some orders than in others."""

_ROWS = 16
"""How many samples of the data are used, again and again."""


def plan(
    model: Any,
    x: Any,
    y: Any = None,
    *,
    batch_size: int,
    memory_limit: int | str | None = None,
    sample_weight: Any = None,
    measure_time: bool = False,
    verbose: bool = True,
) -> Plan:
    """Plan how to train with a batch size: which micro-batch fits, and what memory it needs.

    `plan` makes updates with micro-batches of several sizes, reads how much memory they take,
    and undoes them: the model is as before (and built, if it was not). If `accumulate` has been
    called for the model, its settings are used.

    Args:
        model: a compiled Keras 3 model (on TensorFlow, JAX or torch).
        x: inputs, as for `fit`: arrays or tensors, in any nest; or a `tf.data.Dataset` or
            `keras.utils.PyDataset` of batches. From a data set, the batch with the longest
            samples is used.
        y: targets; `None` if `x` has them, or there are none.
        batch_size: the samples of an update, on all replicas.
        memory_limit: the memory to plan for, in bytes or as text ("8GiB"), of a device that
            holds only this model. The default is the memory of this device.
        sample_weight: weights of the samples, if there are any.
        measure_time: whether to measure the time of an update, too.
        verbose: whether to show progress.

    Returns:
        The plan: `print` it, or see `Plan`.

    Example:
        >>> import keras
        >>> import numpy as np
        >>> import bigbatch
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> plan = bigbatch.plan(
        ...     model, np.ones((64, 4)), np.ones((64, 1)), batch_size=64, verbose=False
        ... )
        >>> plan.microbatch_size, plan.microbatches  # it all fits
        (64, 1)
    """
    check_model(model)
    check_keras_3(model, "plan")
    batch_size = positive_integer(batch_size, "batch_size")
    limit = None if memory_limit is None else bytes_of(memory_limit)
    check_compiled(model)
    if is_multi_worker(model):
        raise ArgumentError(
            explain(
                received="a model that several processes train",
                expected="a model on one worker, whose memory does not depend on the others",
                fix="plan for the same model in one process, with one worker's batch",
            )
        )
    trials = _Trials(model, backend_of(model).longest(x, y, sample_weight), batch_size)
    with trials.undone(), progress(verbose, "bigbatch: measuring") as say:
        return trials.plan(limit, measure_time, say)


class _Trials:
    """Updates that are tried to see what they take.

    Args:
        model: a compiled Keras model.
        data: a batch with samples as large as they get.
        batch_size: the samples of an update, on all replicas.
    """

    def __init__(self, model: Any, data: Any, batch_size: int) -> None:
        self._model = model
        self._backend = backend = backend_of(model)
        self._replicas = backend.replicas(model)
        self._batch_size = batch_size
        self._share = -(-batch_size // self._replicas)
        backend.build_under_strategy(model, None, data)
        self._trainer = setting_of(model).trainer_of_slices(model)
        self._trainer.phases.prepare(data, SharedDimensions.SAME, None)
        self._sample = backend.sample(model, data, _ROWS)
        self._bytes_per_sample = self._bytes(self._sample.repeated(1))
        self._memory = memory_of(model)
        if self._memory.limit is None and not self._memory.is_hard:
            raise ContextError(
                explain(
                    received="a device that does not report how much memory is in use",
                    expected="a GPU, a CPU on Linux, or an allocator that counts",
                    fix=self._memory.TO_COUNT,
                )
            )
        self._trainer.trace(self._batch(2))  # makes the variables that are still missing
        self._memory.in_one_piece()
        self._others = self._memory.in_use() - self._state_bytes()
        self._put_back: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Return a block after which the model is as before."""
        with unchanged(self._model) as self._put_back:
            yield

    def plan(self, limit: int | None, measure_time: bool, say: Callable[[str], None]) -> Plan:
        """Return a plan for a device with so many bytes, or for this one."""
        here = self._here()
        there = here if limit is None else limit
        if there == math.inf:
            raise ArgumentError(
                explain(
                    received="no memory_limit, on a device that does not report its memory",
                    expected="the memory to plan for",
                    fix="pass memory_limit, for example '8GiB'",
                )
            )
        peaks: dict[int, int] = {}
        seconds: dict[int, float | None] = {}
        too_large = None
        for size in _sizes(self._share):
            # More than one size, or nothing is known of what a sample takes.
            if len(peaks) > 1:
                predicted = MemoryCurve(peaks).peak(size)
                if predicted > (1 - MARGIN) * here or min(peaks.values()) > there:
                    break
            say(f"micro-batches of {size} of {self._share} samples")
            peak = peak_of(self._memory, size, self._run, self._put_back)
            tried = self._share if self._trainer.phases.is_exact else 2 * size
            untried = self._share - min(tried, self._share)
            if peak is None:
                too_large = size
                break
            peaks[size] = peak - self._others + untried * self._bytes_per_sample
            if measure_time:
                seconds[size] = self._seconds(size)
        measured = (Measurement(n, peak, seconds.get(n)) for n, peak in peaks.items())
        found = Plan(
            self._batch_size,
            self._replicas,
            int(there),
            self._parts(MemoryCurve(peaks)),
            tuple(measured),
            too_large if there <= here or len(peaks) < 2 else None,
            self._remarks(),
            is_rough=not self._memory.is_hard,
        )
        return dataclasses.replace(
            found, remarks=(*found.remarks, *self._choices(found.microbatch_size))
        )

    def _choices(self, size: int) -> Iterator[str]:
        """Yield what each choice takes of what is stored between stages, if it is open."""
        phases = self._trainer.phases
        is_less = self._memory.is_hard and size > 0 and phases.store_all()
        while is_less:
            with contextlib.suppress(ContextError):  # not even one sample fits
                peak = peak_of(self._memory, size, self._run, self._put_back)
                takes = "does not fit" if peak is None else readable(peak - self._others)
                (what,) = phases.passes[0].runs.remarks()
                yield f"{what.split(': ', 1)[1]}: {takes} in micro-batches of {size}"
            is_less = phases.store_less()

    def _remarks(self) -> tuple[str, ...]:
        """Return what to know of the measurements."""
        if self._memory.is_hard:
            return ()
        return (getattr(self._memory, "HOW", _ROUGH + self._memory.TO_COUNT),)

    def _here(self) -> float:
        """Return the bytes that this device has for the model, infinite if it does not say."""
        limit = self._memory.limit
        return math.inf if limit is None else limit - self._others

    def _batch(self, samples: int) -> Any:
        data = self._sample.repeated(min(samples, self._share))
        return self._backend.data.on_every_replica(self._model, data)

    def _run(self, size: int) -> None:
        # Two micro-batches, so that what is added up is there too. What stages store is there
        # for all micro-batches of a batch.
        is_exact = self._trainer.phases.is_exact
        data = self._batch(self._share if is_exact else 2 * size)
        if self._trainer.phases.knows_bytes(data, size):
            return
        for _ in range(_UPDATES):
            self._trainer.try_on(data, size)

    def _seconds(self, size: int) -> float | None:
        """Return the time of an update, from those of a short and a less short one."""
        times = []
        try:
            for samples in (min(k * size, self._share) for k in (2, 6)):
                data = self._batch(samples)
                taken = []
                for _ in range(_UPDATES):
                    start = time.perf_counter()
                    logs = self._trainer.try_on(data, size)
                    ops = self._backend.ops
                    ops.map_structure(ops.numpy, logs)  # or a GPU may not be done
                    taken.append(time.perf_counter() - start)
                times.append((samples, statistics.median(taken)))
        except self._backend.OUT_OF_MEMORY:  # six micro-batches have more inputs than two
            return None
        finally:
            self._put_back()
        (few, short), (many, long) = times
        if few == many:
            return long
        return max(long, long + (long - short) / (many - few) * (self._share - many))

    def _state_bytes(self) -> int:
        """Return the bytes of variables on the device that has the most of them."""
        return self._memory.most_on_a_device(all_variables_of(self._model))

    def _bytes(self, values: Any) -> int:
        return self._backend.data.bytes_of(values)

    def _parts(self, curve: MemoryCurve) -> Parts:
        weights = self._bytes(list(self._model.weights))
        return Parts(
            weights=weights,
            optimizer=self._bytes([one.variables for one in optimizers_of(self._model)]),
            gradients=self._trainer.buffer_bytes,
            batch=self._share * self._bytes_per_sample,
            activations_per_sample=round(curve.per_sample),
        )


def _sizes(share: int) -> Iterable[int]:
    """Return powers of two up to the whole, and the whole."""
    size = 1
    while size < share:
        yield size
        size *= 2
    yield share
