"""The model's own `train_step` on one micro-batch, without an update."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from bigbatch.backends.keras import backend_of, metrics_of, optimizers_of
from bigbatch.core.patching import replaced
from bigbatch.engine.batch_logs import BatchLogs
from bigbatch.engine.batch_norm import BatchNorm
from bigbatch.engine.captured import CapturedGradients, Capturing
from bigbatch.engine.loss_plan import LossPlan
from bigbatch.engine.loss_terms import (
    ONE,
    ONE_PER_REPLICA,
    OWN,
    SAMPLES,
    Lengths,
    TermRecorder,
)
from bigbatch.engine.statistics import statistics_of
from bigbatch.engine.totals import BatchContext, StatisticTotals, Totals

_ALMOST_NOTHING = 1e-20
"""Nothing beside any number that counts, in float32 too, but not zero."""


class CountsNeededError(Exception):
    """A micro-batch that runs eagerly shows only now that the batch has to be counted first."""


class MicroBatch:
    """Runs micro-batches of a model; the values that it returns add up.

    With n what a micro-batch counts for, its samples as a rule, `run` returns n·value, and for
    gradients n/nominal·∇loss.

    Args:
        model: a Keras model.
        batch_norm: what batch normalisation does; see `BatchNorm`.
    """

    def __init__(self, model: Any, batch_norm: str) -> None:
        self._model = model
        self._backend = backend_of(model)
        self._replicas = self._backend.replicas(model)
        self._capturing = Capturing(model)
        self.norm = BatchNorm(model, batch_norm)
        self.logs = BatchLogs(model)
        self.statistics = statistics_of(model)
        self.lengths = Lengths.SAME
        self.is_odd = False
        """Whether tensors of a batch differ in their number of samples."""
        self.is_counted = False
        """Whether the batch has been counted, if it runs eagerly."""
        self.plan = LossPlan()
        """What the parts of the loss do; complete when a micro-batch has been traced."""
        self.captured: list[CapturedGradients] = []
        """What each optimizer was given; their variables are known after a trace."""
        self.sums: dict[int, Any] = {}
        """Where gradients are added up, by the `id` of their optimizer."""

    def prepare(self) -> None:
        """Make places to add up gradients in, before anything is traced."""
        if self._model.run_eagerly:  # Python adds them up
            return
        for optimizer in optimizers_of(self._model):
            if id(optimizer) not in self.sums:
                self.sums[id(optimizer)] = self._backend.gradient_sums(self._model)

    def makes_room(self) -> bool:
        """Make places for variables that tracing has made; say whether there are any."""
        before, self.sums = self.sums, {}
        self.prepare()
        if _places(self.sums) > _places(before):
            return True
        self.sums = before  # which have been traced to be used
        return False

    @property
    def buffer_bytes(self) -> int:
        """The bytes in which gradients are added up, once a micro-batch has been traced."""
        if self._model.run_eagerly:
            return sum(self._backend.data.bytes_of(one.variables) for one in self.captured)
        return sum(one.bytes for sums in self.sums.values() for one in sums.used)

    def kept(self) -> list[Any]:
        """Return the variables that every micro-batch changes: metrics, sums of gradients."""
        metrics = [v for one in metrics_of(self._model) for v in one.variables]
        variables = [self._backend.native(variable) for variable in metrics]
        variables += [one.variable for sums in self.sums.values() for one in sums.all]
        local = functools.partial(self._backend.local_results, self._model)
        return [part for variable in variables for part in local(variable)]

    def run(self, vector: Any, data: Any) -> Totals:
        """Run `train_step` on a micro-batch.

        Args:
            vector: a `BatchContext`, as numbers.
            data: the micro-batch.
        """
        ops, backend, model = self._backend.ops, self._backend, self._model
        context = BatchContext.of(vector)
        samples = ops.weight(backend.data.sample_count(data))
        recorder = TermRecorder(
            backend,
            self.plan,
            functools.partial(self._correction, context, samples),
            self.lengths,
            replicas=self._replicas,
            can_weigh=self._can_weigh,
            is_odd=self.is_odd,
        )

        def weight() -> Any:  # known when the loss is
            return self._loss_weight(recorder, samples) / context.nominal_samples

        squared_norms: dict[int, Any] = {}

        def keep(captured: CapturedGradients) -> None:
            weighted = self.keep(captured, weight())
            if self.statistics is not None and self.statistics.with_noise:
                # Divided by what they were weighted by, but for one factor of the samples.
                by = samples / context.nominal_samples
                norm = ops.divided(ops.squared_norm(weighted), by)
                squared_norms[id(captured.optimizer)] = norm

        capturing = self._capturing.gradients(lambda loss: ops.times(loss, weight()), keep)
        with contextlib.ExitStack() as stack:
            moments = stack.enter_context(self.norm.watching())
            stack.enter_context(recorder.watching(model))
            metrics = stack.enter_context(self.logs.metrics.watching(self.plan))
            stack.enter_context(backend.losses_of_one_replica(model, self._replicas))
            stack.enter_context(backend.metrics_on_replicas(model))
            results = stack.enter_context(self.logs.watching())
            captured = stack.enter_context(capturing)
            logs = backend.train_step_of(model)(data)
        self.captured = captured
        statistics = None
        if self.statistics is not None:
            norms = [squared_norms.get(id(one.optimizer)) for one in captured]
            statistics = StatisticTotals(ops.ones(), norms)
        loss_weight = self._loss_weight(recorder, samples)
        gradients = [one.gradients for one in captured]
        for one in captured:  # which stay here, and must not keep them in memory
            one.gradients = []
        return Totals(
            gradients=gradients,
            samples=samples,
            loss_weight=loss_weight,
            logs=self.logs.of_microbatch(
                recorder, results, logs, samples, loss_weight, metrics
            ),
            moments=moments,
            statistics=statistics,
        )

    def keep(self, captured: CapturedGradients, weight: Any = None) -> list[Any]:
        """Weight gradients, and add those up that can be; return all of them, weighted."""
        ops, variables = self._backend.ops, captured.variables
        weight = None if captured.is_weighted else weight
        gradients = self._backend.shaped(captured.gradients, variables)
        weighted = [ops.as_gradient_of(v, g, weight) for v, g in zip(variables, gradients)]
        sums = self.sums.get(id(captured.optimizer))
        captured.gradients = weighted if sums is None else sums.add(variables, weighted)
        return weighted

    def summed(self, captured: CapturedGradients, gradients: list[Any]) -> list[Any]:
        """Return the gradients of a batch, given the sum of those that have no place."""
        sums, ops = self.sums.get(id(captured.optimizer)), self._backend.ops
        return [
            ops.added(sums and sums.value(variable), gradient)
            for variable, gradient in zip(captured.variables, gradients)
        ]

    def open(self) -> None:
        """Begin to add up gradients, on this replica; a micro-batch has been traced."""
        for sums in self.sums.values():
            for one in sums.used:
                one.open()

    def close(self) -> None:
        """Give the memory of the sums back, on this replica; who has read them has them."""
        for sums in self.sums.values():
            for one in sums.used:
                one.close()

    def _can_weigh(self) -> bool:
        """Say whether micro-batches may count for the denominator of a term of the loss.

        Then it need not be known before. The loss must be that term and regularisers alone,
        and loss scaling, which needs gradients of the size they have in the full batch, off.
        """
        model, backend = self._model, self._backend
        return (
            self._replicas > 1
            and not model.run_eagerly
            and not backend.has_custom_train_step(model)
            and not backend.uses_inputs_after_call(model)
            and backend.number_of_terms(model) == 1
            and not backend.losses_of_layers(model)
            and not backend.scales_loss(model.optimizer)
        )

    def _loss_weight(self, recorder: TermRecorder, samples: Any) -> Any:
        """Return what a micro-batch counts for."""
        if recorder.loss_weight is None:
            return samples
        # If all is masked, the gradients of regularisers are left, and are not lost.
        return self._backend.ops.weight(recorder.loss_weight) + _ALMOST_NOTHING * samples

    def _correction(
        self, context: BatchContext, samples: Any, position: int, denominator: Any
    ) -> Any:
        """Return what a term is multiplied by, given its denominator in a micro-batch."""
        if denominator is OWN:
            return None
        replicas = self._backend.divides_by_replicas(self._replicas)
        if denominator is SAMPLES:
            return None if replicas == 1 else replicas
        self.plan.needs_samples = True
        if denominator is ONE:
            return context.samples / samples  # Keras does not divide sums by the replicas
        if denominator is ONE_PER_REPLICA:
            return context.samples / samples * replicas
        self.plan.needs_denominators = True
        if self._model.run_eagerly and not self.is_counted:
            raise CountsNeededError
        divided = self._backend.ops.divided
        # A custom step may compute its loss more than once.
        of_batch = context.denominators[position % self._backend.number_of_terms(self._model)]
        return divided(denominator * context.samples, of_batch * samples) * replicas

    def count(self, vector: Any, data: Any) -> list[Any]:
        """Return the samples, and what the terms divide by, of one micro-batch.

        Of the forward pass only masks and shapes are computed.
        """
        del vector
        backend, model = self._backend, self._model
        x, y, sample_weight = backend.unpacked(data)
        recorder = TermRecorder(backend, self.plan, lambda *_: 1, self.lengths)
        # The compiled loss alone: a custom compute_loss may change state, and must not twice.
        # Neither must metrics of layers.
        with contextlib.ExitStack() as stack:
            for metric in model.metrics:
                stack.enter_context(replaced(metric, update_state=lambda *_, **__: None))
            stack.enter_context(recorder.watching(model))
            y_pred = backend.call(model, x, training=False)
            backend.compute_compiled_loss(model, y, y_pred, sample_weight)
        samples = backend.ops.weight(backend.data.sample_count(data))
        return [samples, *(samples if isinstance(d, str) else d for d in recorder.denominators)]


def _places(sums: dict[int, Any]) -> int:
    return sum(len(one.all) for one in sums.values())
