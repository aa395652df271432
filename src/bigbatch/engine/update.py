"""One update of a model, from the totals of its micro-batches."""

from __future__ import annotations

from typing import Any

from bigbatch.backends.keras import backend_of
from bigbatch.engine.microbatch import MicroBatch
from bigbatch.engine.totals import ReplicaTotals, Totals


class Update:
    """Passes the gradients of a batch to the optimizers, and changes state once per batch.

    Args:
        model: a Keras model.
        microbatch: what has run its micro-batches.
    """

    def __init__(self, model: Any, microbatch: MicroBatch) -> None:
        self._model = model
        self._backend = backend_of(model)
        self._microbatch = microbatch
        self._replicas = self._backend.replicas(model)

    def local(
        self, totals: Totals, nominal: Any, *, is_nominal: bool, is_known: bool
    ) -> ReplicaTotals:
        """Return what adds up over replicas; called on each of them.

        Args:
            totals: what `MicroBatch.run` returned, added up.
            nominal: what gradients were divided by.
            is_nominal: whether that is sure to be the samples of the batch.
            is_known: whether the samples of the batch were known when it was traced.
        """
        microbatch = self._microbatch
        gradients = list(map(microbatch.summed, microbatch.captured, totals.gradients))
        logs, metrics = totals.logs, []
        if microbatch.part.gives_logs:
            logs, metrics = microbatch.logs.close(logs, totals.samples, is_known=is_known)
        statistics = totals.statistics
        if self._replicas > 1:
            gradients = self._scaled(gradients, nominal)
            if statistics is not None:
                norms = [norm * nominal for norm in statistics.squared_norms]
                statistics = statistics._replace(squared_norms=norms)
        totals = totals._replace(gradients=gradients, logs=logs, statistics=statistics)
        is_done = (is_nominal and not microbatch.weighs_by_term) or self._replicas > 1
        return ReplicaTotals(totals, metrics, None if is_done else nominal)

    def apply(self, replicas: ReplicaTotals) -> dict[str, Any]:
        """Update the model from what `local` returned, summed over replicas; return logs."""
        microbatch, totals = self._microbatch, replicas.totals
        with self._backend.updating(self._model, microbatch.captured, replicas) as apply:
            means, scale = self._means(replicas)
            if microbatch.statistics is not None and microbatch.part.gives_logs:
                self._note(totals, means, scale)
            apply(means, self._keep_result)
            if not microbatch.part.gives_logs:
                return {}
            microbatch.norm.update(totals.moments)
        return self._logs(replicas)

    def looked_at(self, replicas: ReplicaTotals) -> tuple[list[list[Any]], dict[str, Any]]:
        """Return the gradients that `apply` would hand to optimizers, and the logs."""
        gives_logs = self._microbatch.part.gives_logs
        return self._means(replicas)[0], self._logs(replicas) if gives_logs else {}

    def _means(self, replicas: ReplicaTotals) -> tuple[list[list[Any]], Any]:
        """Return the gradients of the batch, and what their sums were multiplied by."""
        ops, microbatch, totals = self._backend.ops, self._microbatch, replicas.totals
        gradients, scale = totals.gradients, ops.ones()
        if self._replicas > 1:
            # The sum over replicas of samples, or of what their only term divides by.
            scale = 1 / totals.loss_weight
            gradients = self._scaled(gradients, scale)
        elif replicas.nominal_samples is not None and microbatch.captured:
            scale = replicas.nominal_samples / totals.loss_weight
            means = [self._is_mean(one) for one in microbatch.captured]
            variables = [v for v, is_mean in zip(self._variables(), means) if is_mean]
            parts = [g for g, is_mean in zip(gradients, means) if is_mean]
            scaled = iter(ops.scaled_unless_one(parts, variables, scale) if parts else ())
            gradients = [next(scaled) if m else g for g, m in zip(gradients, means)]
        return self._scaled(gradients, None), scale

    def _is_mean(self, captured: Any) -> bool:
        """Say whether the gradients of an update are means over samples, not sums."""
        return captured.number not in self._microbatch.plan.updates

    def _variables(self) -> list[list[Any]]:
        return [one.variables for one in self._microbatch.captured]

    def _logs(self, replicas: ReplicaTotals) -> dict[str, Any]:
        totals = replicas.totals
        return self._microbatch.logs.update(
            totals.logs, replicas.metrics, totals.samples, totals.loss_weight
        )

    def _keep_result(self, number: int) -> None:
        """Keep what an update has given weights, if micro-batches run again after it."""
        if number in self._microbatch.made:
            self._microbatch.made[number].keep()

    def _note(self, totals: Totals, means: list[list[Any]], scale: Any) -> None:
        """Note an update from `means`, whose sums were multiplied by `scale`."""
        statistics, ops = self._microbatch.statistics, self._backend.ops
        assert statistics is not None
        assert totals.statistics is not None
        norms = []
        if statistics.with_noise:
            # Gradients were weighted with what the loss counts for, squares with samples.
            scale = scale * ops.divided(totals.samples, totals.loss_weight)
            for one, mean, parts in zip(
                self._microbatch.captured, means, totals.statistics.squared_norms
            ):
                by = 1 / ops.weight(self._backend.scale_of_gradients(one.optimizer)) ** 2
                norms.append((parts * scale * by, ops.squared_norm(mean) * by))
        statistics.note(totals.statistics.microbatches, totals.samples, norms)

    def _scaled(self, gradients: list[list[Any]], scale: Any) -> list[list[Any]]:
        """Return gradients, multiplied by `scale` if they are means."""
        as_gradient_of = self._backend.ops.as_gradient_of
        scaled = []
        for one, parts in zip(self._microbatch.captured, gradients):
            by = scale if self._is_mean(one) else None
            scaled.append([as_gradient_of(*pair, by) for pair in zip(one.variables, parts)])
        return scaled
