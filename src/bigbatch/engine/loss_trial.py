"""Find what a loss divides by, by trying it on samples of the first batch.

The same samples are given to each part of the loss whole and cut into two unequal parts. If
the value for all of them is the mean of the values for the parts, weighted by samples, it is a
mean; if it is their sum, a sum; if neither, it can only be computed for the batch as a whole.
Means and sums have to be found with two other cuts of the same samples, too.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Iterator

import numpy as np

from bigbatch.backends.keras import backend_of, metrics_of
from bigbatch.core.patching import replaced
from bigbatch.core.trial_rows import first_part
from bigbatch.engine.loss_plan import Kind, LossPlan

ROWS = 16
"""How many samples are tried at most."""

ENOUGH = 8
"""How many samples are waited for, in batches of few: fewer may all have the same label."""

FEWEST = 3
"""How many samples are needed for two unequal parts."""

_ROUNDING = 100
"""How many times the precision of a number two equal values may differ, being sums."""

_MOST = 0.02
"""How much values of low precision may differ at most, relative to their size."""


class LossTrial:
    """Tries the parts of the loss of a model, and its metrics, with a few samples.

    Nothing of the model is different afterwards.

    Args:
        model: a built Keras model.
        sample: at least `FEWEST` samples of its first batch; see `Backend.sample`.
    """

    def __init__(self, model: Any, sample: Any) -> None:
        self._model = model
        self._backend = backend_of(model)
        self._sample = sample
        self._cut_after(first_part(sample.count))
        self.reads_call = False
        """Whether a custom `compute_loss` reads what `call` has stored."""
        self.bytes_of_outputs = 0
        """The bytes of what the model returns for one sample."""
        self.bytes_of_metrics: dict[int, int] = {}
        """The bytes of what a metric is given for one sample, by the `id` of the metric."""
        self.has_rows = True
        """Whether every output has one row for each sample."""

    def plan(self) -> LossPlan:
        """Return the kinds of all parts of the loss and of the metrics."""
        count = self._sample.count
        with self._sample.undone():
            added, outputs = self._call(range(count))
            leaves = self._backend.ops.flatten(outputs)
            self.has_rows = all(self._sample.has_rows(leaf) for leaf in leaves)
            self.bytes_of_outputs = self._backend.data.bytes_of(leaves) // count
            plan = self._plan_of_parts(added, outputs)
            for first in (count - self._first, count // 2):
                if plan.has_sums:  # a part may have the average count of labels, by chance
                    self._cut_after(first)
                    plan.keep_common(self._plan_of_parts(added, outputs))
        return plan

    def _cut_after(self, first: int) -> None:
        """Cut the samples into two parts, the first of which has so many."""
        count = self._sample.count
        self._first = first
        self._parts = [range(count), range(first), range(first, count)]

    def _plan_of_parts(self, added: dict[int, list[Any]], outputs: Any) -> LossPlan:
        """Return the kinds that the parts show, given what a call with all samples returned."""
        backend, model, plan = self._backend, self._model, LossPlan()
        plan.added = self._added(added)
        # What cannot be tried, as it takes no such outputs or labels, is as before.
        with contextlib.suppress(Exception), self._without_metrics():
            if backend.compile_loss_of(model) is not None:
                plan.terms = self._terms(outputs)
        with contextlib.suppress(Exception):
            plan.metrics = self._metrics(outputs)
        with contextlib.suppress(Exception), self._without_metrics():
            if backend.has_custom_compute_loss(model):
                plan.compute_loss = self._compute_loss(plan, outputs)
                plan.is_tried = True
        return plan

    @contextlib.contextmanager
    def _without_metrics(self) -> Iterator[None]:
        """Return a block in which no metric is updated: on replicas it cannot be here."""
        with contextlib.ExitStack() as stack:
            for metric in metrics_of(self._model):
                stack.enter_context(replaced(metric, update_state=lambda *_, **__: None))
            yield

    def _added(self, whole: dict[int, list[Any]]) -> dict[int, list[Kind]]:
        """Return the kinds of what layers pass to `add_loss`, given that for all samples."""
        kinds: dict[int, list[Kind]] = {}
        if whole:
            parts = [self._call(rows)[0] for rows in self._parts[1:]]
            for layer, values in whole.items():
                each = zip(values, *(part[layer] for part in parts))
                kinds[layer] = [self._kind(*of_parts) for of_parts in each]
        return kinds

    def _call(self, rows: Any) -> tuple[dict[int, list[Any]], Any]:
        """Call the model on some samples; return what layers add to the loss, and outputs."""
        added: dict[int, list[Any]] = {}

        def note(layer: Any, position: int, loss: Any) -> Any:
            del position
            added.setdefault(id(layer), []).append(np.sum(self._backend.ops.numpy(loss)))
            return loss

        with self._backend.changing_added_losses(self._model, note):
            x = self._sample.rows(self._sample.x, rows)
            return added, self._backend.call(self._model, x, training=False)

    def _terms(self, outputs: Any) -> list[Kind]:
        """Return the kinds of the losses given to `compile`."""
        outputs = self._sample.varied(outputs)
        of_parts = [self._values_of_terms(outputs, rows) for rows in self._parts]
        return [self._kind_of_term(*values) for values in zip(*of_parts)]

    def _values_of_terms(self, outputs: Any, rows: Any) -> list[Any]:
        """Return what `_noting` notes of each term."""
        noted: list[Any] = []
        noting = functools.partial(self._noting, noted)
        with self._backend.watching_loss(self._model, noting, lambda *_: None):
            self._backend.compute_compiled_loss(self._model, *self._labelled(outputs, rows))
        return noted

    def _noting(self, noted: list[Any], loss: Any) -> Any:
        """Return a loss that notes its value, weights, and elements if Keras reduces them."""
        backend = self._backend

        def call(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            elements = backend.elements(loss, y_true, y_pred)
            value = backend.value_of(loss, y_true, y_pred, sample_weight, "")
            values = None if elements is None else backend.ops.numpy(elements[0])
            weights = None if sample_weight is None else backend.ops.numpy(sample_weight)
            noted.append((backend.ops.numpy(value), weights, values))
            return value

        return call

    def _labelled(self, outputs: Any, rows: Any) -> tuple[Any, Any, Any]:
        """Return targets, outputs and weights of some samples."""
        of = self._sample
        return of.rows(of.y, rows), of.rows(outputs, rows), of.rows(of.sample_weight, rows)

    def _kind_of_term(self, *parts: Any) -> Kind:
        values, weights, elements = zip(*parts)
        if not self._have_rows(elements):
            return self._kind(*values)
        if not self._is_by_row(*elements):
            return Kind.WHOLE
        # A custom `compute_loss` may have divided weights by what it counted.
        is_weighted = self._have_rows(weights) and not self._is_by_row(*weights)
        return self._kind(*values) if is_weighted else Kind.KERAS

    def _have_rows(self, parts: Any) -> bool:
        """Say whether arrays have a row for each sample of their part."""
        return all(one is not None and one.ndim for one in parts) and all(
            len(one) == len(rows) for one, rows in zip(parts, self._parts)
        )

    def _compute_loss(self, plan: LossPlan, outputs: Any) -> Kind:
        """Return the kind of what a custom `compute_loss` adds to the compiled loss."""
        outputs = self._sample.varied(outputs)
        whole, part, _ = self._parts
        values = [
            self._value_of_compute_loss(plan, outputs, rows, rows) for rows in self._parts
        ]
        totals, others, noted = zip(*values)
        # It may change what it hands over to the compiled losses.
        plan.terms = [self._kind_of_term(*parts) for parts in zip(*noted)] or plan.terms
        kind = self._kind(*others, scale=np.abs(totals).max())
        if kind is Kind.WHOLE:
            differs = True
            with contextlib.suppress(Exception):  # what was stored has other samples
                _, other, _ = self._value_of_compute_loss(plan, outputs, part, whole)
                differs = not _equal(others[1], other, np.abs(totals[1]))
            self.reads_call = self.reads_call or differs
        return kind

    def _value_of_compute_loss(
        self, plan: LossPlan, outputs: Any, rows: Any, called: Any
    ) -> tuple[Any, Any, list[Any]]:
        """Return `compute_loss` of some samples, and that without compiled losses and weights.

        The third is what `_noting` notes of compiled losses.

        Args:
            plan: the kinds of what layers add to the loss.
            outputs: the outputs for all samples.
            rows: the samples to compute the loss of.
            called: the samples on which the model is called before.
        """
        backend, model, sample = self._backend, self._model, self._sample
        compiled: list[Any] = []
        noted: list[Any] = []

        def as_mean(layer: Any, position: int, loss: Any) -> Any:
            if plan.kind_of_added(id(layer), position) is not Kind.SUM:
                return loss
            return backend.ops.times(loss, sample.count / len(called))

        with backend.changing_added_losses(model, as_mean):
            backend.call(model, sample.rows(sample.x, called), training=False)
        y, y_pred, sample_weight = self._labelled(outputs, rows)
        x = sample.rows(sample.x, rows)
        noting = functools.partial(self._noting, noted)
        with backend.watching_loss(model, noting, lambda *_: None, compiled.append):
            value = backend.compute_loss(model, x, y, y_pred, sample_weight)
        total = np.sum(backend.ops.numpy(value))
        others = [*compiled, *backend.regularisers_of(model)]
        return total, total - sum(np.sum(backend.ops.numpy(one)) for one in others), noted

    def _metrics(self, outputs: Any) -> dict[int, Kind]:
        """Return the kinds of the compiled metrics that do not add up sample by sample."""
        outputs, kinds = self._sample.varied(outputs), {}
        of_parts = [self._arguments_of_metrics(outputs, rows) for rows in self._parts]
        for (metric, whole), *parts in zip(*of_parts):
            with contextlib.suppress(Exception):  # as Keras has it
                kind = self._kind_of_metric(metric, whole, *(given for _, given in parts))
                if kind is not Kind.KERAS:
                    kinds[id(metric)] = kind
                    count = self._backend.data.bytes_of(whole)
                    self.bytes_of_metrics[id(metric)] = count // self._sample.count
        return kinds

    def _arguments_of_metrics(self, outputs: Any, rows: Any) -> list[tuple[Any, Any]]:
        """Return each compiled metric with what it is updated with for some samples."""
        given: list[tuple[Any, Any]] = []

        def note(metric: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            given.append((metric, (y_true, y_pred, sample_weight)))

        with contextlib.ExitStack() as stack:
            for metric in self._backend.compiled_metrics(self._model):
                noting = functools.partial(note, metric)
                stack.enter_context(replaced(metric, update_state=noting))
            labelled = self._labelled(outputs, rows)
            self._backend.update_compiled_metrics(self._model, *labelled)
        return given

    def _kind_of_metric(self, metric: Any, *parts: Any) -> Kind:
        """Return `KERAS` for a metric whose state adds up."""
        backend = self._backend
        function = backend.function_of(metric)
        if function is None:
            if backend.replicas(self._model) > 1:
                return Kind.KERAS  # its state is not to be had on one replica alone
            whole = self._state_after(metric, parts[:1])
            cut = self._state_after(metric, parts[1:])
            return Kind.KERAS if all(map(_equal, whole, cut)) else Kind.WHOLE
        values = [backend.ops.numpy(function(*given[:2])) for given in parts]
        if values[0].ndim:
            return Kind.KERAS if self._is_by_row(*values) else Kind.WHOLE
        if parts[0][2] is not None or self._sample.mask_of(parts[0][1]) is not None:
            return Kind.WHOLE
        kind = self._kind(*values)
        return kind if kind is Kind.MEAN else Kind.WHOLE

    def _state_after(self, metric: Any, updates: Any) -> list[Any]:
        metric.reset_state()
        for y_true, y_pred, sample_weight in updates:
            metric.update_state(y_true, y_pred, sample_weight=sample_weight)
        return [self._backend.ops.numpy(variable) for variable in metric.variables]

    def _is_by_row(self, whole: Any, first: Any, second: Any) -> bool:
        """Say whether each value belongs to one sample, and depends on that alone."""
        together = np.concatenate([first, second])
        return together.shape == whole.shape and _equal(whole, together)

    def _kind(self, whole: Any, first: Any, second: Any, scale: float = 0.0) -> Kind:
        """Return how a number for all samples follows from those for the parts.

        Rounding is relative to these numbers, or to `scale`.
        """
        numbers = [np.asarray(value) for value in (whole, first, second)]
        if len({number.shape for number in numbers}) > 1:
            return Kind.WHOLE
        whole, first, second = numbers
        scale = max(scale, *(float(np.abs(one).max(initial=0)) for one in (first, second)))
        share = self._first / self._sample.count
        if _equal(whole, share * first + (1 - share) * second, scale):
            return Kind.MEAN
        return Kind.SUM if _equal(whole, first + second, scale) else Kind.WHOLE


def _equal(one: Any, other: Any, scale: float = 0.0) -> bool:
    """Say whether two arrays differ by no more than rounding does, relative to their size."""
    one, other = np.asarray(one), np.asarray(other)
    if one.dtype.kind not in "fiub":  # bfloat16 is of no kind that NumPy knows
        one, other = one.astype(np.float16), other.astype(np.float16)
    precision = float(np.finfo(one.dtype).eps) if one.dtype.kind == "f" else 0.0
    one, other = one.astype(np.float64), other.astype(np.float64)
    if not np.isfinite(one).all():
        return True  # nothing can be learned from it
    scale = max(scale, float(np.abs(one).max(initial=0)))
    apart = np.abs(one - other).max(initial=0)
    return bool(apart <= min(_ROUNDING * precision, _MOST) * scale)
