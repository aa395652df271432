"""The model's own `train_step` on micro-batches, and one update from what they gave."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from bigbatch.keras import compat
from bigbatch.keras.batch_logs import BatchLogs
from bigbatch.keras.batch_norm import BatchNorm
from bigbatch.keras.collector import Collected, collecting, metrics_of, optimizers_of
from bigbatch.keras.insight import Insight, insight_of
from bigbatch.keras.patching import replaced
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
from bigbatch.tf.compat import outside_strategy_scope
from bigbatch.tf.microbatches import Trace
from bigbatch.tf.optimizers import adapted
from bigbatch.tf.plain_optimizers import PlainOptimizer
from bigbatch.tf.sums import DenseSums
from bigbatch.tf.values import (
    WEIGHT_DTYPE,
    added,
    after,
    as_gradient_of,
    divided,
    flattened,
    half_squared_norm,
    packed,
    shaped,
    times,
)

_ALMOST_NOTHING = 1e-20
"""Nothing beside any number that counts, in float32 too, but not zero."""


@dataclass(frozen=True)
class Whole:
    """What is known of the batch when one of its micro-batches runs."""

    unit: Any
    """What gradients are divided by: about the samples of the batch on all replicas.

    So float16 meets numbers of the size they have in the full batch.
    """
    samples: Any = None
    """The samples of the batch on all replicas, if they are known."""
    denominators: list[Any] | None = None
    """What each term of the compiled loss divides by on all replicas, if it is known."""
    looks: Any = None
    """Whether the noise of its gradients is looked at; `None` if that of no batch is."""


class Runner:
    """Trains a model with batches that are never there as a whole.

    `run` and `close` are called on each replica, `update` outside `strategy.run`. With n what a
    micro-batch counts for, its samples as a rule, what `run` returns is n·value, and for
    gradients n/unit·∇loss: the sum over the micro-batches is what `close` takes.

    Args:
        model: a Keras model.
        batch_norm: what batch normalisation does; see `BatchNorm`.
        lengths: what the micro-batches of a batch have in common.
    """

    def __init__(self, model: Any, batch_norm: str, lengths: Lengths) -> None:
        self._model = model
        self._lengths = lengths
        self._keras = compat.keras_of(model)
        self.strategy = compat.strategy_of(model)
        self._replicas = self.strategy.num_replicas_in_sync
        self._norm = BatchNorm(model, batch_norm)
        # What a micro-batch has turned out to do, known when it has been traced.
        self._collected: list[Collected] = []
        self._optimizers: list[PlainOptimizer] = []
        self._structure: Any = None
        self._sums: dict[int, DenseSums] = {}
        self._insight = insight_of(model)
        self.logs = BatchLogs(model, self.strategy)
        """What is logged of a batch."""

    def prepare(self) -> None:
        """Make places to add up gradients in, before anything is traced.

        What has none, because it is sparse or was built only by tracing, is added up as it
        comes out of a micro-batch.
        """
        with self.strategy.scope():
            for optimizer in optimizers_of(self._model):
                joins = not self._model.run_eagerly
                sums = self._sums.setdefault(id(optimizer), DenseSums(joins=joins))
                sums.prepare(self._model.trainable_variables)

    @property
    def buffer_bytes(self) -> int:
        """The bytes in which gradients are added up, once a micro-batch has been traced."""
        return sum(one.bytes for sums in self._sums.values() for one in sums.used)

    @property
    def kept(self) -> list[Any]:
        """The variables that every micro-batch changes: metrics, and sums of gradients."""
        metrics = [v for one in metrics_of(self._model) for v in one.variables]
        variables = [self._keras.native(variable) for variable in metrics]
        variables += [one.variable for sums in self._sums.values() for one in sums.all]
        local = self.strategy.experimental_local_results
        return [part for variable in variables for part in local(variable)]

    def new_trace(self) -> Trace:
        """Return what traces micro-batches that run eagerly.

        A custom `train_step` is not: it may keep tensors for Python code to look at.
        """
        return Trace(0) if self._keras.has_own_train_step(self._model) else Trace()

    def open(self, graph: Any = None) -> None:
        """Begin a batch on this replica; what its micro-batches do has been traced."""
        del graph
        for sums in self._sums.values():
            sums.open()

    def looks(self) -> Any:
        """Say whether the noise of the next batch is looked at, as `Whole` has it."""
        return None if self._insight is None else self._insight.looks()

    def _keep(self, collected: Collected, weight: Any = None) -> list[Any]:
        """Add up the gradients of a micro-batch, those that can be, and let them go.

        Returns:
            All of them, as they are added up.
        """
        weight = None if collected.is_weighted else weight
        variables, sums = collected.variables, self._sums.get(id(collected.optimizer))
        gradients = list(map(shaped, collected.gradients, variables))
        kept: list[Any] = []
        if sums is not None:
            gradients, kept = sums.add(variables, gradients, weight)
        collected.gradients = [
            as_gradient_of(variable, gradient, weight)
            for variable, gradient in zip(variables, gradients)
        ]
        return [*kept, *collected.gradients]

    def run(self, data: Any, whole: Whole) -> dict[str, Any]:
        """Run `train_step` on a micro-batch without an update; return what adds up."""
        samples = tf.cast(sample_count(data), WEIGHT_DTYPE)
        recorder = TermRecorder(
            self._keras,
            functools.partial(self._correction, whole, samples),
            self._lengths,
            replicas=self._replicas,
            can_weigh=functools.partial(self._can_weigh, whole),
        )

        def weight() -> Any:  # known when the loss is
            return self._mass(recorder, samples) / whole.unit

        halves: dict[int, Any] = {}

        def keep(collected: Collected) -> None:
            seen = self._keep(collected, weight())
            if whole.looks is not None:
                half = half_squared_norm(seen, whole.looks)
                half = tf.math.divide_no_nan(half, samples / whole.unit)
                halves[id(collected.optimizer)] = half

        gradients = collecting(self._model, lambda loss: times(loss, weight()), keep)
        with contextlib.ExitStack() as stack:
            moments = stack.enter_context(self._norm.watching())
            stack.enter_context(recorder.watching(self._model))
            stack.enter_context(self._keras.losses_of_one_replica(self._model, self._replicas))
            stack.enter_context(self._keras.metrics_on_replicas(self._model))
            collected = stack.enter_context(gradients)
            logs = self._keras.train_step_of(self._model)(data)
        self._collected = collected
        insight = None
        if self._insight is not None:
            insight = {
                "microbatches": tf.sign(samples),
                "halves": [halves.get(id(one.optimizer)) for one in collected],
            }
        mass = self._mass(recorder, samples)
        return {
            "gradients": [one.gradients for one in collected],
            "logs": self.logs.of_microbatch(recorder, logs, samples, mass),
            "moments": moments,
            "samples": samples,
            "mass": mass,
            "insight": insight,
        }

    def _can_weigh(self, whole: Whole) -> bool:
        """Say whether micro-batches may count for the denominator of a term of the loss.

        Then it need not be known before. The loss must be that term and regularisers alone,
        and loss scaling, which needs gradients of the size they have in the full batch, off.
        """
        model = self._model
        return (
            self._replicas > 1
            and whole.denominators is None
            and not self._keras.has_own_train_step(model)
            and not self._keras.uses_inputs_after_call(model)
            and self._keras.number_of_terms(model) == 1
            and not self._keras.losses_of_layers(model)
            and not self._keras.scales_loss(model.optimizer)
        )

    @staticmethod
    def _mass(recorder: TermRecorder, samples: Any) -> Any:
        """Return what a micro-batch counts for."""
        if recorder.mass is None:
            return samples
        # If all is masked, the gradients of regularisers are left, and are not lost.
        return tf.cast(recorder.mass, WEIGHT_DTYPE) + _ALMOST_NOTHING * samples

    def _correction(self, whole: Whole, samples: Any, position: int, denominator: Any) -> Any:
        """Return what a term is multiplied by, given its denominator in a micro-batch."""
        if denominator is OWN:
            return None
        divided = self._keras.divides_by_replicas(self._replicas)
        if denominator is SAMPLES:
            return None if divided == 1 else divided
        if whole.samples is None or (denominator is not ONE and whole.denominators is None):
            raise DenominatorsNeededError
        if denominator is ONE:
            return whole.samples / samples  # Keras does not divide sums by the replicas
        assert whole.denominators is not None
        of_batch = whole.denominators[position % len(whole.denominators)]
        share = tf.math.divide_no_nan(denominator * whole.samples, of_batch * samples)
        return share * divided

    def counts(self, data: Any) -> list[Any]:
        """Return the samples, and what the terms divide by, of one micro-batch.

        Of the forward pass only masks and shapes are computed.
        """
        x, y, sample_weight = self._keras.unpacked(data)
        recorder = TermRecorder(self._keras, lambda *_: None, self._lengths)
        # The compiled loss alone: an own compute_loss may change state, and must not twice.
        # Neither must metrics of layers.
        with contextlib.ExitStack() as stack:
            for metric in self._model.metrics:
                stack.enter_context(replaced(metric, update_state=lambda *_, **__: None))
            stack.enter_context(recorder.watching(self._model))
            y_pred = self._keras.call(self._model, x, training=False)
            self._keras.compute_compiled_loss(self._model, y, y_pred, sample_weight)
        samples = tf.cast(sample_count(data), WEIGHT_DTYPE)
        return [samples, *(samples if isinstance(d, str) else d for d in recorder.denominators)]

    def whole(self, counts: list[Any]) -> Whole:
        """Return what `counts`, added up on this replica, say of the batch on all of them."""
        unit = self.unit(counts[0])
        if self._replicas > 1:
            counts = replicas.sum_from_inside(counts)
        return Whole(unit, counts[0], list(counts[1:]), self.looks())

    def unit(self, samples: Any) -> Any:
        """Return the unit of gradients, given the samples of this replica."""
        return samples if self._replicas == 1 else samples * self._replicas

    def close(self, sums: dict[str, Any], unit: Any, *, is_known: bool = False) -> list[Any]:
        """Return what adds up over replicas.

        Args:
            sums: what `run` returned, added up.
            unit: what gradients were divided by.
            is_known: whether the samples of the batch were known when it was traced.
        """
        sums["logs"] = self.logs.close(sums["logs"], sums["samples"], is_known=is_known)
        parts = sums["gradients"]
        sums["gradients"] = list(map(self._summed, self._collected, parts))
        if self._replicas > 1:
            if self._insight is not None:
                halves = sums["insight"]["halves"]
                sums["insight"]["halves"] = [
                    half if half is None else half * unit for half in halves
                ]
            sums["gradients"] = self._scaled(sums["gradients"], unit)
        else:
            if self.looks() is not None:
                sums["insight"]["wholes"] = list(map(self._half, self._collected, parts))
            if unit is not sums["samples"]:
                sums["unit"] = unit
        self._structure = tf.nest.map_structure(lambda _: 0, sums)
        return tf.nest.flatten(sums)

    def _summed(self, collected: Collected, gradients: list[Any]) -> list[Any]:
        """Return the gradients of a batch, given what is left to add to what was kept."""
        sums = self._sums.get(id(collected.optimizer))
        values = {} if sums is None else sums.values()
        return [
            added(values.get(id(variable)), gradient)
            for variable, gradient in zip(collected.variables, gradients)
        ]

    def _half(self, collected: Collected, gradients: list[Any]) -> Any:
        """Return half the squared norm of what `_summed` does."""
        sums = self._sums.get(id(collected.optimizer))
        values, known = ([], set()) if sums is None else sums.joined_values()
        pairs = zip(collected.variables, gradients)
        if any(gradient is not None and id(variable) in known for variable, gradient in pairs):
            return half_squared_norm(self._summed(collected, gradients), self.looks())
        # The same, from fewer tensors.
        return half_squared_norm([*values, *gradients], self.looks())

    def update(self, flat: list[Any]) -> dict[str, Any]:
        """Update the model from what `close` returned, summed over replicas; return logs."""
        sums = tf.nest.pack_sequence_as(self._structure, flat)
        count, mass = sums["samples"], sums["mass"]
        self._build_optimizers()
        # Or an update counter would count one that then fails for want of its gradients.
        with outside_strategy_scope(), after(flat):
            gradients, scale = sums["gradients"], tf.ones([], WEIGHT_DTYPE)
            if self._replicas > 1:
                scale = 1 / mass
                gradients = self._scaled(gradients, scale)
            elif "unit" in sums:
                scale = sums["unit"] / mass
                gradients = self._rescaled(gradients, scale)
            means = [
                [as_gradient_of(*pair) for pair in zip(one.variables, mean)]
                for one, mean in zip(self._collected, gradients)
            ]
            if self._insight is not None:
                self._note(self._insight, sums, means, scale)
            for optimizer, mean in zip(self._optimizers, means):
                optimizer.apply(self.strategy, mean)
            self._norm.update(sums["moments"])
        self._close_sums()
        return self.logs.update(sums["logs"], count, mass)

    def _note(self, insight: Insight, sums: Any, means: list[list[Any]], scale: Any) -> None:
        """Note an update from `means`; on one replica they are its sums times `scale`."""
        halves: list[Any] = []
        looks = self.looks()
        if looks is not None and self._replicas > 1:
            halves = [half_squared_norm(mean, looks) for mean in means]
        elif looks is not None:
            halves = [half * scale**2 for half in sums["insight"]["wholes"]]
        scales = [self._keras.scale_of_gradients(one.optimizer) for one in self._collected]
        # Gradients were weighted with the mass, squares are to be with samples.
        scale = scale * divided(sums["samples"], sums["mass"])
        insight.note(sums["insight"], sums["samples"], list(zip(scales, halves)), scale)

    def _build_optimizers(self) -> None:
        """Make the variables of optimizers that Keras does not know of, as of all others."""
        with tf.init_scope(), self.strategy.scope():
            self._optimizers = [
                adapted(one.optimizer, one.variables) for one in self._collected
            ]

    def _close_sums(self) -> None:
        def local() -> None:
            for sums in self._sums.values():
                sums.close()

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
