"""What is logged of a batch: metrics, and what `train_step` returns besides."""

from __future__ import annotations

from typing import Any

from bigbatch.backends.keras import backend_of
from bigbatch.engine.batch_metrics import BatchMetrics
from bigbatch.engine.loss_terms import TermRecorder
from bigbatch.engine.totals import LogTotals


class BatchLogs:
    """Adds up what micro-batches log, and updates once what is updated once per batch.

    Most metrics are up to date when a micro-batch has run. What Keras updates with one number
    per batch, such as the mean of its loss, is updated when the number of all replicas is
    known. `of_microbatch`, `so_far` and `close` are called on each replica, `update` outside
    `strategy.run`.

    Args:
        model: a Keras model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._backend = backend_of(model)
        self.metrics = BatchMetrics(model)
        """Updates the metrics that need the whole batch."""
        # What a micro-batch has turned out to do, known when it has been traced.
        self._tracked: list[tuple[Any, bool | None, bool]] = []
        self._by_samples: list[bool] = []
        self._left_alone: set[str] = set()

    def of_microbatch(
        self,
        recorder: TermRecorder,
        logs: dict[str, Any],
        samples: Any,
        loss_weight: Any,
        batch_metrics: list[Any],
    ) -> LogTotals:
        """Return what adds up.

        Args:
            recorder: what saw the metrics of a micro-batch.
            logs: what `train_step` returned.
            samples: the samples of the micro-batch.
            loss_weight: what its loss counts for.
            batch_metrics: what `metrics` noted of it.
        """
        times = self._backend.ops.times
        self._tracked = [(one.metric, one.by_samples, one.of_loss) for one in recorder.numbers]
        self._left_alone = recorder.left_alone(self._model)
        return LogTotals(
            values={name: times(value, samples) for name, value in logs.items()},
            numbers=[
                times(number.value, loss_weight if number.of_loss else samples)
                for number in recorder.numbers
            ],
            batch_metrics=self.metrics.weighted(batch_metrics, samples),
        )

    def so_far(self, totals: LogTotals, count: Any) -> dict[str, Any]:
        """Return this replica's logs, times `count`: metrics as they are, else the sums."""
        results = self._backend.results(self._model)
        metrics = results.keys() - self._left_alone
        times = self._backend.ops.times
        return {
            name: times(results[name], count) if name in metrics else value
            for name, value in totals.values.items()
        }

    def close(
        self, totals: LogTotals, count: Any, *, is_known: bool
    ) -> tuple[LogTotals, list[list[Any]]]:
        """Return what adds up over replicas, for `update`: logs, and states of metrics.

        Args:
            totals: what `of_microbatch` returned, added up.
            count: the samples of this replica.
            is_known: whether the samples of the batch were known when it was traced.
        """
        self._by_samples = [
            is_known if by_samples is None else by_samples for _, by_samples, _ in self._tracked
        ]
        self.metrics.update(totals.batch_metrics, count)
        tensor = self._backend.ops.tensor
        metrics = [[tensor(one.total), tensor(one.count)] for one, _, _ in self._tracked]
        values = self.so_far(totals, count)
        return totals._replace(values=values, batch_metrics=[]), metrics

    def update(
        self, totals: LogTotals, metrics: list[list[Any]], count: Any, loss_weight: Any
    ) -> dict[str, Any]:
        """Update metrics from what `close` returned, summed over replicas; return the logs."""
        ops = self._backend.ops
        numbers = [
            ops.divided(number, loss_weight if of_loss else count)
            for number, (_, _, of_loss) in zip(totals.numbers, self._tracked)
        ]
        weights = [count if by_samples else ops.ones() for by_samples in self._by_samples]
        replicas = self._backend.replicas(self._model)

        def local(numbers: list[Any], weights: list[Any]) -> None:
            for (metric, _, _), number, weight in zip(self._tracked, numbers, weights):
                # The parts of the replicas make up the batch.
                metric.update_state(number, sample_weight=weight / replicas)

        self._backend.on_replicas(self._model, local, numbers, weights)
        logs = {name: ops.divided(value, count) for name, value in totals.values.items()}
        results = self._results(metrics, numbers, weights)
        logs.update((name, results[name]) for name in logs.keys() & results.keys())
        return logs

    def _results(
        self, metrics: list[list[Any]], numbers: list[Any], weights: list[Any]
    ) -> dict[str, Any]:
        """Return the results of metrics that have just been updated.

        They are worked out from the totals and counts before, over all replicas: reading them
        would be another reduction.
        """
        ops = self._backend.ops
        last = {metric.name: metric for metric in self._model.metrics}
        sums: dict[str, tuple[Any, Any]] = {}
        for (metric, _, _), (total, count), number, weight in zip(
            self._tracked, metrics, numbers, weights
        ):
            if last.get(metric.name) is metric:
                total, count = sums.get(metric.name, (total, count))
                number, weight = ops.like(number, total), ops.like(weight, total)
                sums[metric.name] = total + number * weight, count + weight
        return {name: ops.divided(total, count) for name, (total, count) in sums.items()}
