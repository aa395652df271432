"""The logs of a batch: metrics, and other values that `train_step` returns."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Iterator, NamedTuple

from bigbatch.backends.keras import Held, backend_of
from bigbatch.core.patching import replaced
from bigbatch.engine.batch_metrics import BatchMetrics
from bigbatch.engine.loss_terms import TermRecorder
from bigbatch.engine.totals import LogTotals


class MetricResult(NamedTuple):
    """Where a logged value comes from: one of the numbers that a metric says."""

    metric: Any
    position: int


class BatchLogs:
    """Adds up the logs of micro-batches, and updates metrics that are updated once per batch.

    Most metrics are up to date when a micro-batch has run. What Keras updates with one number
    per batch, such as the mean of its loss, is updated when the number of all replicas is
    known. `of_microbatch`, `so_far` and `close` are called on each replica, `update` outside
    `strategy.run`.

    Args:
        model: a Keras model.
        held: its metrics.
    """

    def __init__(self, model: Any, held: Held) -> None:
        self._model, self._held = model, held
        self._backend = backend_of(model)
        self.metrics = BatchMetrics(model)
        """Updates the metrics that need the whole batch."""
        # What a micro-batch has turned out to do, known when it has been traced.
        self._tracked: list[tuple[Any, bool | None, bool]] = []
        self._by_samples: list[bool] = []
        self._sources: list[MetricResult | None] = []
        self._is_rows: list[bool] = []
        self._variables: list[Any] = []
        self._is_sum: list[bool] = []
        self._summed: set[int] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[dict[int, tuple[Any, MetricResult]]]:
        """Return a block in which it is noted which tensors are results of metrics.

        A log need not have the name of the metric that it is of.
        """
        noted: dict[int, tuple[Any, MetricResult]] = {}

        def result(metric: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
            value = original(*args, **kwargs)
            for index, leaf in enumerate(self._backend.ops.flatten(value)):
                noted[id(leaf)] = leaf, MetricResult(metric, index)
            return value

        with contextlib.ExitStack() as stack:
            for metric in self._held.metrics():
                noting = functools.partial(result, metric, metric.result)
                stack.enter_context(replaced(metric, result=noting))
            yield noted

    def of_microbatch(
        self,
        recorder: TermRecorder,
        noted: dict[int, tuple[Any, MetricResult]],
        logs: dict[str, Any],
        samples: Any,
        loss_weight: Any,
        batch_metrics: list[Any],
        sums: set[str],
    ) -> LogTotals:
        """Return what adds up.

        Args:
            recorder: what saw the metrics of a micro-batch.
            noted: what `watching` gave, by the `id` of tensors.
            logs: what `train_step` returned: a dict, perhaps of dicts.
            samples: the samples of the micro-batch.
            loss_weight: what its loss counts for.
            batch_metrics: what `metrics` noted of it.
            sums: the names of logs that are sums over samples.
        """
        ops, backend = self._backend.ops, self._backend
        self._tracked = [(one.metric, one.by_samples, one.of_loss) for one in recorder.numbers]
        leaves, names = ops.flatten(logs), ops.flatten(self._names(logs))
        # Of a variable Keras logs what it holds when the batch is done. A slice of one, which
        # TensorFlow lets assign, too, is a value.
        self._variables = [leaf if hasattr(leaf, "assign_add") else None for leaf in leaves]
        known: dict[str, MetricResult] = {}
        if not all(map(ops.is_tensor, leaves)):  # numbers of Python, with names alone
            left_alone = recorder.left_alone(self._model)
            known = {k: v for k, v in self._results_by_name().items() if k not in left_alone}
        self._sources = [
            noted.get(id(leaf), (None, None))[1] if ops.is_tensor(leaf) else known.get(name)
            for leaf, name in zip(leaves, names)
        ]
        rows = [
            backend.rows_of_samples(leaf, samples) if source is None else None
            for leaf, source in zip(leaves, self._sources)
        ]
        self._is_rows = [one is not None for one in rows]
        named = list(zip(self._sources, names))
        self._is_sum = [source is None and name in sums for source, name in named]
        self._summed = {id(one.metric) for one, name in named if one and name in sums}
        values = [
            ops.times(leaf, ops.ones() if is_sum else samples) if own is None else own
            for leaf, own, is_sum in zip(leaves, rows, self._is_sum)
        ]
        return LogTotals(
            values=ops.pack(logs, values),
            numbers=[
                ops.times(
                    one.value, self._weight(one.metric, one.of_loss, samples, loss_weight)
                )
                for one in recorder.numbers
            ],
            batch_metrics=self.metrics.weighted(batch_metrics, samples),
            weights=[number.weight for number in recorder.numbers],
        )

    def _weight(self, metric: Any, of_loss: bool, samples: Any, loss_weight: Any) -> Any:
        """Return what the number counts for with which a metric is updated."""
        if id(metric) in self._summed:
            return self._backend.ops.ones()
        return loss_weight if of_loss else samples

    def _names(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Return the name of every value of logs, in their structure."""
        same = self._backend.ops.map_structure
        return {
            name: self._names(value)
            if isinstance(value, dict)
            else same(lambda _, name=name: name, value)
            for name, value in logs.items()
        }

    def _results_by_name(self) -> dict[str, MetricResult]:
        found: dict[str, MetricResult] = {}
        for metric in self._model.metrics:
            result = self._backend.result_of(metric)
            names = sorted(result) if isinstance(result, dict) else [metric.name]
            found.update((name, MetricResult(metric, i)) for i, name in enumerate(names))
        return found

    def so_far(self, totals: LogTotals, count: Any) -> dict[str, Any]:
        """Return this replica's logs, times `count`: metrics as they are, else the sums."""
        ops = self._backend.ops
        metrics = {id(one.metric): one.metric for one in self._sources if one is not None}
        results = {k: ops.flatten(self._backend.result_of(m)) for k, m in metrics.items()}
        values = [
            value if one is None else ops.times(results[id(one.metric)][one.position], count)
            for value, one in zip(ops.flatten(totals.values), self._sources)
        ]
        return ops.pack(totals.values, values)

    def divided(self, values: dict[str, Any], count: Any) -> dict[str, Any]:
        """Return logs, given what `so_far` returned, added up over replicas."""
        ops = self._backend.ops
        logs = [
            value.values if is_rows else value if is_sum else ops.divided(value, count)
            for value, is_rows, is_sum in zip(ops.flatten(values), self._is_rows, self._is_sum)
        ]
        return ops.pack(values, logs)

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
        means = [one for one, _, _ in self._tracked] + self._other_means()
        metrics = [[tensor(one.total), tensor(one.count)] for one in means]
        values = self.so_far(totals, count)
        return totals._replace(values=values, batch_metrics=[]), metrics

    def _other_means(self) -> list[Any]:
        """Return metrics that are up to date, and means, each over a part of the samples."""
        if self._backend.replicas(self._model) == 1:
            return []
        tracked = {id(metric) for metric, _, _ in self._tracked}
        metrics = {id(one.metric): one.metric for one in self._sources if one is not None}
        means = {key: one for key, one in metrics.items() if self._backend.divides_total(one)}
        return [one for key, one in means.items() if key not in tracked]

    def update(
        self, totals: LogTotals, metrics: list[list[Any]], count: Any, loss_weight: Any
    ) -> dict[str, Any]:
        """Update metrics from what `close` returned, summed over replicas; return the logs."""
        ops = self._backend.ops
        numbers = [
            ops.divided(number, self._weight(metric, of_loss, count, loss_weight))
            for number, (metric, _, of_loss) in zip(totals.numbers, self._tracked)
        ]
        weights = [
            own if own is not None else count if by_samples else ops.ones()
            for own, by_samples in zip(totals.weights, self._by_samples)
        ]
        replicas = self._backend.replicas(self._model)

        def local(numbers: list[Any], weights: list[Any]) -> None:
            for (metric, _, _), number, weight in zip(self._tracked, numbers, weights):
                # The parts of the replicas make up the batch.
                metric.update_state(number, sample_weight=weight / replicas)

        self._backend.on_replicas(self._model, local, numbers, weights)
        logs = self.divided(totals.values, count)
        results = self._results(metrics, numbers, weights)
        leaves = [
            value if one is None else results.get(id(one.metric), value)
            for value, one in zip(ops.flatten(logs), self._sources)
        ]
        leaves = [
            value if one is None else ops.tensor(one)
            for value, one in zip(leaves, self._variables)
        ]
        return ops.pack(logs, leaves)

    def _results(
        self, metrics: list[list[Any]], numbers: list[Any], weights: list[Any]
    ) -> dict[int, Any]:
        """Return the results of metrics that have just been updated, by their `id`.

        They are worked out from the totals and counts before, over all replicas: reading them
        would be another reduction.
        """
        ops = self._backend.ops
        sums: dict[int, tuple[Any, Any]] = {}
        for (metric, _, _), (total, count), number, weight in zip(
            self._tracked, metrics, numbers, weights
        ):
            total, count = sums.get(id(metric), (total, count))
            number, weight = ops.like(number, total), ops.like(weight, total)
            sums[id(metric)] = total + number * weight, count + weight
        others = zip(self._other_means(), metrics[len(self._tracked) :])
        sums.update((id(metric), (total, count)) for metric, (total, count) in others)
        return {key: ops.divided(total, count) for key, (total, count) in sums.items()}
