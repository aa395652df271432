"""The model's own `train_step` on micro-batches, and one update from what they gave."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from bigbatch.keras import compat
from bigbatch.keras.batch_norm import BatchNorm
from bigbatch.keras.collector import Collected, collecting, optimizers_of
from bigbatch.keras.insight import insight_of
from bigbatch.keras.terms import (
    ONE,
    OWN,
    SAMPLES,
    DenominatorsNeededError,
    Lengths,
    TermRecorder,
)
from bigbatch.tf import replicas
from bigbatch.tf.batch import sample_count
from bigbatch.tf.buffers import DenseSum
from bigbatch.tf.compat import outside_strategy_scope
from bigbatch.tf.values import (
    WEIGHT_DTYPE,
    after,
    as_gradient_of,
    flattened,
    packed,
    shaped,
    squared_norm,
)


@dataclass(frozen=True)
class Whole:
    """What is known of the batch when one of its micro-batches runs."""

    unit: Any
    """What gradients are divided by: the samples of this replica, or about as many."""
    samples: Any = None
    """The samples of the batch on all replicas, if they are known."""
    denominators: list[Any] | None = None
    """What each term of the compiled loss divides by on all replicas, if it is known."""


class Runner:
    """Trains a model with batches that are never there as a whole.

    `run` and `close` are called on each replica, `update` outside `strategy.run`. With n the
    samples of a micro-batch, what `run` returns is n·value, and for gradients n/unit·∇loss:
    the sum over the micro-batches is what `close` takes.

    Args:
        model: a Keras model.
        batch_norm: what batch normalisation does; see `BatchNorm`.
        lengths: what the micro-batches of a batch have in common.
    """

    def __init__(self, model: Any, batch_norm: str, lengths: Lengths) -> None:
        self._model = model
        self._lengths = lengths
        self.strategy = compat.strategy_of(model)
        self._replicas = self.strategy.num_replicas_in_sync
        self._norm = BatchNorm(model, batch_norm)
        # What a micro-batch has turned out to do, known when it has been traced.
        self._collected: list[Collected] = []
        self._term_metrics: list[Any] = []
        self._mean_metrics: list[Any] = []
        self._left_alone: set[str] = set()
        self._structure: Any = None
        self._sums: dict[tuple[int, int], DenseSum] = {}
        self._insight = insight_of(model)

    def prepare(self) -> None:
        """Make places to add up gradients in, before anything is traced.

        What has none, because it is sparse or was built only by tracing, is added up as it
        comes out of a micro-batch.
        """
        with self.strategy.scope():
            for optimizer in optimizers_of(self._model):
                for variable in self._model.trainable_variables:
                    key = (id(optimizer), id(variable))
                    if key not in self._sums:
                        self._sums[key] = DenseSum(variable)

    @property
    def buffer_bytes(self) -> int:
        """The bytes in which gradients are added up, once a micro-batch has been traced."""
        return sum(one.bytes for one in self._sums.values() if one.is_used)

    def open(self, graph: Any = None) -> None:
        """Begin a batch on this replica; what its micro-batches do has been traced."""
        del graph
        for one in self._sums.values():
            if one.is_used:
                one.open()

    def _keep(self, weight: Any, collected: Collected) -> None:
        """Add up the gradients of a micro-batch, those that can be, and let them go."""
        pairs = list(zip(collected.variables, collected.gradients))
        collected.gradients = []
        for variable, gradient in pairs:
            total = self._sums.get((id(collected.optimizer), id(variable)))
            if gradient is None or isinstance(gradient, tf.IndexedSlices):
                total = None
            gradient = _weighted(collected, variable, gradient, weight)
            if self._insight is not None and self._insight.with_noise:
                collected.squares.append(squared_norm(gradient))
            if total is not None:
                total.add(gradient)
            collected.sums.append(total)
            collected.gradients.append(gradient if total is None else None)

    def run(self, data: Any, whole: Whole) -> dict[str, Any]:
        """Run `train_step` on a micro-batch without an update; return what adds up."""
        samples = tf.cast(sample_count(data), WEIGHT_DTYPE)
        weight = samples / whole.unit
        correction = functools.partial(self._correction, whole, samples)
        recorder = TermRecorder(correction, self._lengths)
        keep = functools.partial(self._keep, weight)
        gradients = collecting(self._model, lambda loss: times(loss, weight), keep)
        terms = recorder.watching(self._model)
        losses = compat.losses_of_one_replica(self._model, self._replicas)
        with self._norm.watching() as moments, terms, losses, gradients as collected:
            logs = compat.train_step_of(self._model)(data)
        self._collected = collected
        self._term_metrics = [metric for metric, _ in recorder.values]
        self._mean_metrics = [metric for metric, _ in recorder.means]
        self._left_alone = recorder.left_alone(self._model)
        insight = None
        if self._insight is not None:
            insight = self._insight.of_microbatch(collected, samples, weight)
        return {
            "gradients": [one.gradients for one in collected],
            "logs": {name: times(value, samples) for name, value in logs.items()},
            "terms": [times(value, samples / self._replicas) for _, value in recorder.values],
            "means": [times(value, samples) for _, value in recorder.means],
            "moments": moments,
            "samples": samples,
            "insight": insight,
        }

    def _correction(self, whole: Whole, samples: Any, position: int, denominator: Any) -> Any:
        """Return what a term is multiplied by, given its denominator in a micro-batch."""
        if denominator is OWN:
            return None
        if denominator is SAMPLES:
            return None if self._replicas == 1 else self._replicas
        if whole.samples is None or (denominator is not ONE and whole.denominators is None):
            raise DenominatorsNeededError
        if denominator is ONE:
            return whole.samples / samples  # Keras does not divide sums by the replicas
        assert whole.denominators is not None
        of_batch = whole.denominators[position % len(whole.denominators)]
        share = tf.math.divide_no_nan(denominator * whole.samples, of_batch * samples)
        return share * self._replicas

    def counts(self, data: Any) -> list[Any]:
        """Return the samples, and what the terms divide by, of one micro-batch.

        Of the forward pass only masks and shapes are computed.
        """
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        recorder = TermRecorder(lambda *_: None, self._lengths)
        # The compiled loss alone: an own compute_loss may change state, and must not twice.
        with recorder.watching(self._model):
            compat.compile_loss_of(self._model)(
                y, compat.call(self._model, x, training=False), sample_weight
            )
        samples = tf.cast(sample_count(data), WEIGHT_DTYPE)
        return [samples, *(samples if isinstance(d, str) else d for d in recorder.denominators)]

    def whole(self, counts: list[Any]) -> Whole:
        """Return what `counts`, added up on this replica, say of the batch on all of them."""
        unit = counts[0]
        if self._replicas > 1:
            counts = replicas.sum_from_inside(counts)
        return Whole(unit, counts[0], list(counts[1:]))

    def close(self, sums: dict[str, Any], unit: Any, known_count: Any = None) -> list[Any]:
        """Bring this replica's metrics up to date; return what adds up over replicas.

        Args:
            sums: what `run` returned, added up.
            unit: what gradients were divided by.
            known_count: the samples of the batch, if they were known when it was traced.
        """
        count = sums["samples"]
        self._update_metrics(sums.pop("terms"), sums.pop("means"), count, known_count)
        sums["logs"] = self.logs(sums["logs"], count)
        sums["gradients"] = [
            [
                gradient if total is None else total.value()
                for total, gradient in zip(one.sums, gradients)
            ]
            for one, gradients in zip(self._collected, sums["gradients"])
        ]
        if self._replicas > 1:
            sums["gradients"] = self._scaled(sums["gradients"], unit)
            if self._insight is not None:
                squares = sums["insight"]["squares"]
                sums["insight"]["squares"] = [square * unit for square in squares]
        elif unit is not count:
            sums["unit"] = unit
        self._structure = tf.nest.map_structure(lambda _: 0, sums)
        return tf.nest.flatten(sums)

    def update(self, flat: list[Any]) -> dict[str, Any]:
        """Update the model from what `close` returned, summed over replicas; return logs."""
        sums = tf.nest.pack_sequence_as(self._structure, flat)
        count = sums["samples"]
        self._build_optimizers()
        # Or an update counter would count one that then fails for want of its gradients.
        with outside_strategy_scope(), after(flat):
            gradients, scale = sums["gradients"], tf.ones([], WEIGHT_DTYPE)
            if self._replicas > 1:
                scale = 1 / count
                gradients = self._scaled(gradients, scale)
            elif "unit" in sums:
                scale = sums["unit"] / count
                gradients = self._rescaled(gradients, scale)
            means = [
                [as_gradient_of(*pair) for pair in zip(one.variables, mean)]
                for one, mean in zip(self._collected, gradients)
            ]
            if self._insight is not None:
                optimizers = [one.optimizer for one in self._collected]
                self._insight.note(sums["insight"], list(zip(optimizers, means)), scale)
            for one, mean in zip(self._collected, means):
                one.optimizer.apply(mean, one.variables)
            self._norm.update(sums["moments"])
        self._close_sums()
        return {name: divided(value, count) for name, value in sums["logs"].items()}

    def _build_optimizers(self) -> None:
        """Make the variables of optimizers that Keras does not know of, as of all others."""
        for one in self._collected:
            if not one.optimizer.built:
                with tf.init_scope(), self.strategy.scope():
                    one.optimizer.build(one.variables)

    def _close_sums(self) -> None:
        def local() -> None:
            for one in self._collected:
                for total in one.sums:
                    if total is not None:
                        total.close()

        self.strategy.run(local)

    def _scaled(self, gradients: list[Any], scale: Any) -> list[Any]:
        return [
            [as_gradient_of(*pair, scale) for pair in zip(one.variables, parts)]
            for one, parts in zip(self._collected, gradients)
        ]

    def _rescaled(self, gradients: list[Any], scale: Any) -> list[Any]:
        """Scale gradients, without copying them if, as in a full window, the scale is one."""
        _, kinds = flattened(gradients)
        tensors = tf.cond(
            scale == 1,
            lambda: flattened(gradients)[0],
            lambda: flattened(self._scaled(gradients, scale))[0],
        )
        return packed(tensors, kinds)

    def logs(self, sums: dict[str, Any], count: Any) -> dict[str, Any]:
        """Return this replica's logs, times `count`: metrics as they are, else the sums."""
        results = self._model.get_metrics_result()
        metrics = results.keys() - self._left_alone
        return {
            name: times(results[name], count) if name in metrics else value
            for name, value in sums.items()
        }

    def _update_metrics(
        self, terms: list[Any], means: list[Any], count: Any, known_count: Any
    ) -> None:
        """Update once per batch what Keras updates with one number per batch."""
        if not terms and not means:
            return
        # Of a batch, which counts as one; the parts of the replicas have to make that up.
        part = None
        if self._replicas > 1:
            part = count / replicas.sum_from_inside(count)
        # Keras weights the terms of the loss by the batch size, if that is known.
        known = part if known_count is None else known_count
        for metrics, sums, weight in (
            (self._term_metrics, terms, known),
            (self._mean_metrics, means, part),
        ):
            for metric, value in zip(metrics, sums):
                metric.update_state(divided(value, count), sample_weight=weight)


def divided(value: Any, by: Any) -> Any:
    """Return `value / by` in the type of `value`; zero if there is nothing."""
    return tf.math.divide_no_nan(value, tf.cast(by, value.dtype))


def times(value: Any, weight: Any) -> Any:
    """Return `value * weight` in the type of `value`, or as a weight if that is no float."""
    value = tf.convert_to_tensor(value)
    if not value.dtype.is_floating:
        value = tf.cast(value, WEIGHT_DTYPE)
    return value * tf.cast(weight, value.dtype)


def _weighted(collected: Collected, variable: Any, gradient: Any, weight: Any) -> Any:
    scale = None if collected.is_weighted else weight
    return as_gradient_of(variable, shaped(gradient, variable), scale)
