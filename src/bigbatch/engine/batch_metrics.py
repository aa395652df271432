"""Metrics that are one number for a batch, which the numbers of micro-batches do not add up to.

A function that returns one number (RMSE, Dice, a masked accuracy) is updated once per batch:
with the mean over micro-batches if it is a mean over samples, else with the outputs and labels
of all micro-batches, which are kept until the batch is complete.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Iterator

from bigbatch.backends.keras import backend_of, mask_of, set_mask
from bigbatch.core.patching import replaced
from bigbatch.engine.loss_plan import Kind, LossPlan


class BatchMetrics:
    """Notes what such metrics are given by micro-batches, and updates them once.

    All methods are called on each replica.

    Args:
        model: a Keras model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._backend = backend_of(model)
        self._noted: list[tuple[Any, Kind]] = []
        self._types: list[Any] = []

    @contextlib.contextmanager
    def watching(self, plan: LossPlan) -> Iterator[list[Any]]:
        """Return a block in which the metrics of a plan are not updated.

        The list it gives fills with what they are given, call by call.
        """
        self._noted, self._types = [], []
        given: list[Any] = []
        with contextlib.ExitStack() as stack:
            for metric in self._backend.compiled_metrics(self._model) if plan.metrics else ():
                kind = plan.metrics.get(id(metric))
                if kind is not None:
                    note = functools.partial(
                        self._note, given, metric, kind, metric.update_state
                    )
                    stack.enter_context(replaced(metric, update_state=note))
            yield given

    def _note(
        self,
        given: list[Any],
        metric: Any,
        kind: Kind,
        update_state: Any,
        y_true: Any,
        y_pred: Any,
        sample_weight: Any = None,
    ) -> None:
        backend, ops = self._backend, self._backend.ops
        values = [y_true, y_pred, sample_weight, mask_of(y_pred)]
        if kind is Kind.MEAN:
            function = backend.function_of(metric)
            assert function is not None
            given.append(ops.tensor(function(y_true, y_pred)))
            self._types.append(None)
        elif any(None in value.shape[1:] for value in values if value is not None):
            update_state(y_true, y_pred, sample_weight=sample_weight)  # rows of many lengths
            return
        else:
            tensors = [None if value is None else ops.tensor(value) for value in values]
            given.append([None if one is None else ops.rows(one) for one in tensors])
            self._types.append([None if one is None else one.dtype for one in tensors])
        self._noted.append((metric, kind))

    def weighted(self, given: list[Any], samples: Any) -> list[Any]:
        """Return what adds up over micro-batches, of what one with `samples` was given."""
        times = self._backend.ops.times
        return [
            times(value, samples) if kind is Kind.MEAN else value
            for value, (_, kind) in zip(given, self._noted)
        ]

    def update(self, totals: list[Any], samples: Any) -> None:
        """Update the metrics from what `weighted` returned, added up over micro-batches."""
        if totals:
            update = functools.partial(self._update, totals, samples)
            # There may be none on one of several replicas.
            if self._backend.replicas(self._model) > 1:
                self._backend.ops.when(samples > 0, update)
            else:
                update()

    def _update(self, totals: list[Any], samples: Any) -> None:
        ops = self._backend.ops
        for (metric, kind), types, total in zip(self._noted, self._types, totals):
            if kind is Kind.MEAN:
                self._backend.update_mean(metric, ops.divided(total, samples))
                continue
            y_true, y_pred, sample_weight, mask = (
                None if rows is None else ops.rows_together(rows, dtype)
                for rows, dtype in zip(total, types)
            )
            if mask is not None:
                set_mask(y_pred, mask)
            metric.update_state(y_true, y_pred, sample_weight=sample_weight)
