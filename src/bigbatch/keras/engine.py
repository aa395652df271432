"""One batch of `fit`: the model's own `train_step` on each micro-batch, then one update."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from bigbatch.keras import compat
from bigbatch.keras.batch_norm import BatchNorm
from bigbatch.keras.collector import Collected, collecting, optimizers_of
from bigbatch.keras.terms import ONE, SAMPLES, DenominatorsNeededError, TermRecorder
from bigbatch.tf import replicas
from bigbatch.tf.batch import Batch, sample_count
from bigbatch.tf.compat import outside_strategy_scope
from bigbatch.tf.microbatches import total
from bigbatch.tf.values import WEIGHT_DTYPE, as_gradient_of, shaped


class SplitEngine:
    """Trains `model` with batches that are cut into micro-batches.

    Args:
        model: a Keras model.
        microbatch_size: samples per micro-batch, on each replica.
        batch_norm: what batch normalisation does; see `BatchNorm`.
    """

    def __init__(self, model: Any, microbatch_size: int, batch_norm: str) -> None:
        self._model = model
        self._microbatch_size = microbatch_size
        self._batch_norm = batch_norm

    def train_on(self, data: Any) -> dict[str, Any]:
        """Make one update from a whole batch, outside `strategy.run`; return the logs."""
        model, strategy = self._model, compat.strategy_of(self._model)
        with outside_strategy_scope():
            norm = BatchNorm(model, self._batch_norm)
        share: Any = None

        def local(data: Any) -> list[Any]:
            nonlocal share
            share = _Share(model, data, self._microbatch_size, norm)
            return tf.nest.flatten(share.run())

        flat = replicas.sum_from_outside(strategy, model.trainable_variables, local, (data,))
        sums = tf.nest.pack_sequence_as(share.structure, flat)
        count = sums["samples"]
        with outside_strategy_scope():
            for one, gradients in zip(share.collected, sums["gradients"]):
                scale = None if strategy.num_replicas_in_sync == 1 else 1 / count
                mean = [as_gradient_of(*pair, scale) for pair in zip(one.variables, gradients)]
                one.optimizer.apply(mean, one.variables)
            norm.update(sums["moments"], count)
        return {name: _divided(value, count) for name, value in sums["logs"].items()}


class _Share:
    """One replica's share of a batch, as micro-batches.

    With n the samples of a micro-batch and N those of the share, the sums are of n·value, and
    for gradients of n/N·∇loss: on several replicas times N afterwards.
    """

    def __init__(self, model: Any, data: Any, microbatch_size: int, norm: BatchNorm) -> None:
        self._model = model
        self._replicas = tf.distribute.get_strategy().num_replicas_in_sync
        self._batch = Batch((data,), may_be_empty=self._replicas > 1)
        self._microbatch_size = microbatch_size
        self._norm = norm
        self._count = tf.cast(self._batch.count, WEIGHT_DTYPE)
        self._global_count: Any = None if self._replicas > 1 else self._count
        self._denominators: list[Any] | None = None
        self._term_metrics: list[Any] = []
        self._mean_metrics: list[Any] = []
        self.collected: list[Collected] = []
        self.structure: Any = None

    def run(self) -> dict[str, Any]:
        """Return the sums over the micro-batches, and bring the metrics up to date."""
        try:
            sums = self._total(self._micro_batch)
        except DenominatorsNeededError:
            counts = [self._count, *self._total(self._denominators_of)]
            if self._replicas > 1:
                counts = replicas.sum_from_inside(counts)
            self._global_count, *self._denominators = counts
            sums = self._total(self._micro_batch)
        self._update_metrics(sums.pop("terms"), sums.pop("means"))
        sums["logs"] = self._logs(sums["logs"])
        if self._replicas > 1:
            sums["gradients"] = [
                [as_gradient_of(*pair, self._count) for pair in zip(one.variables, gradients)]
                for one, gradients in zip(self.collected, sums["gradients"])
            ]
        sums["samples"] = self._count
        self.structure = tf.nest.map_structure(lambda _: 0, sums)
        return sums

    def _total(self, compute: Any) -> Any:
        jit_compile = self._model.jit_compile
        return total(compute, self._batch, self._microbatch_size, jit_compile=jit_compile)

    def _micro_batch(self, data: Any) -> dict[str, Any]:
        samples = tf.cast(sample_count(data), WEIGHT_DTYPE)
        weight = samples / self._count
        recorder = TermRecorder(functools.partial(self._correction, samples))
        gradients = collecting(optimizers_of(self._model), lambda loss: _times(loss, weight))
        terms, norm = recorder.watching(self._model), self._norm.watching()
        losses = compat.losses_of_one_replica(self._model, self._replicas)
        with norm, terms, losses, gradients as collected:
            logs = self._model.train_step(data)
        self.collected = collected
        self._term_metrics = [metric for metric, _ in recorder.values]
        self._mean_metrics = [metric for metric, _ in recorder.means]
        return {
            "gradients": [_weighted(one, weight) for one in collected],
            "logs": {name: _times(value, samples) for name, value in logs.items()},
            "terms": [_times(value, samples / self._replicas) for _, value in recorder.values],
            "means": [_times(value, samples) for _, value in recorder.means],
            "moments": self._norm.moments(samples),
        }

    def _correction(self, samples: Any, position: int, denominator: Any) -> Any:
        """Return what a term is multiplied by, given its denominator in a micro-batch."""
        if denominator is SAMPLES:
            return None if self._replicas == 1 else self._replicas
        if denominator is ONE and self._global_count is not None:
            return self._global_count / samples  # Keras does not divide sums by the replicas
        if self._denominators is None or self._global_count is None:
            raise DenominatorsNeededError
        of_batch = self._denominators[position % len(self._denominators)]
        share = tf.math.divide_no_nan(denominator * self._global_count, of_batch * samples)
        return share * self._replicas

    def _denominators_of(self, data: Any) -> list[Any]:
        """Return what the terms divide by; of the forward pass only masks are computed."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        recorder = TermRecorder(lambda *_: None)
        # The compiled loss alone: an own compute_loss may change state, and must not twice.
        with recorder.watching(self._model):
            compat.compile_loss_of(self._model)(y, compat.call(self._model, x), sample_weight)
        samples = tf.cast(sample_count(data), WEIGHT_DTYPE)
        return [samples if isinstance(d, str) else d for d in recorder.denominators]

    def _update_metrics(self, terms: list[Any], means: list[Any]) -> None:
        """Update once per batch what Keras updates with one number per batch."""
        if not terms and not means:
            return
        # Of a batch, which counts as one; the parts of the replicas have to make that up.
        part = None
        if self._replicas > 1:
            part = self._count / replicas.sum_from_inside(self._count)
        # Keras weights the terms of the loss by the batch size, if that is known.
        known = self._batch.count if isinstance(self._batch.count, int) else part
        for metrics, sums, weight in (
            (self._term_metrics, terms, known),
            (self._mean_metrics, means, part),
        ):
            for metric, value in zip(metrics, sums):
                metric.update_state(_divided(value, self._count), sample_weight=weight)

    def _logs(self, sums: dict[str, Any]) -> dict[str, Any]:
        """Return the logs of this share, weighted: metrics as they are now, else the sums."""
        results = self._model.get_metrics_result()
        return {
            name: _times(results[name], self._count) if name in results else value
            for name, value in sums.items()
        }


def _times(value: Any, weight: Any) -> Any:
    value = tf.convert_to_tensor(value)
    return value * tf.cast(weight, value.dtype)


def _divided(value: Any, by: Any) -> Any:
    return tf.math.divide_no_nan(value, tf.cast(by, value.dtype))


def _weighted(collected: Collected, weight: Any) -> list[Any]:
    scale = None if collected.is_weighted else weight
    return [
        as_gradient_of(variable, shaped(gradient, variable), scale)
        for variable, gradient in zip(collected.variables, collected.gradients)
    ]
