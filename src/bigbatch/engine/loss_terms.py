"""The terms of a compiled loss and what each divides by.

Every micro-batch i counts for nᵢ/N of the batch, its samples. A term that Keras divides by
something else (valid elements under a mask, the sum of the sample weights, nothing) is
multiplied by (Dᵢ/D)/(nᵢ/N), so that over the batch it is divided by the D of the batch.
If D is not known while micro-batches run, as on several replicas before they have met, and
there is one such term, a micro-batch counts for Dᵢ/D instead: D can then come last.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from typing import Any, Callable, Iterator, NamedTuple

from bigbatch.backends.base import Backend
from bigbatch.core.patching import replaced
from bigbatch.engine.loss_plan import Kind, LossPlan

SAMPLES = "samples"
"""The denominator of a term that is a mean over samples: no correction is needed."""

OWN = "own"
"""As `SAMPLES`, of a mean that the user's function has made: Keras leaves it as it is."""

ONE = "one"
"""The denominator of a term that is a sum: one for the whole batch, so that parts add up."""

ONE_PER_REPLICA = "one per replica"
"""As `ONE`, of a sum that Keras takes for a mean and divides by the number of replicas."""


class SharedDimensions(enum.Enum):
    """Which dimensions the micro-batches of a batch share, apart from the number of them."""

    SAME = "all dimensions but the first"
    DECLARED = "the dimensions that are known when a graph is traced"
    ANY = "none"


def denominator(
    backend: Backend,
    loss: Any,
    y_true: Any,
    y_pred: Any,
    sample_weight: Any,
    lengths: SharedDimensions,
    kind: Kind = Kind.KERAS,
) -> Any:
    """Return what `loss` divides the sum over these samples by, or one of the names above.

    This is the arithmetic of `keras.losses.Loss`, whose quotient alone is public; unless
    `kind`, found by trying, says that the loss itself makes one number of its samples.
    """
    ops = backend.ops
    elements = backend.elements(loss, y_true, y_pred)
    if elements is None:
        return ONE if kind is Kind.SUM else OWN
    values, masks = elements
    is_number = not ops.is_tensor(values) or ops.rank(values) == 0
    if is_number or kind is not Kind.KERAS:
        # Weights, if there are any, make it one number per sample again.
        is_reduced = not is_number and loss.reduction not in ("sum", "none", None)
        if is_reduced or (is_number and (masks or sample_weight is not None)):
            return ONE_PER_REPLICA if kind is Kind.SUM else SAMPLES
        return ONE if kind is Kind.SUM else OWN
    if loss.reduction in ("sum", "none", None):  # the gradient of many numbers is of their sum
        return ONE
    if loss.reduction == "mean_with_sample_weight" and (masks or sample_weight is not None):
        weights = [*masks] if sample_weight is None else [*masks, sample_weight]
        return ops.sum(_product(ops, weights))
    size = ops.size(values)
    if not masks:
        per_sample = values.shape[1:]
        proportional = lengths is SharedDimensions.SAME or not len(per_sample)
        if lengths is SharedDimensions.DECLARED:
            proportional = all(length is not None for length in per_sample)
        return SAMPLES if proportional else size
    # As many elements as there are, less those under the mask.
    mask = _product(ops, masks)
    return size * ops.sum(mask) / ops.size(mask)


def _product(ops: Any, tensors: list[Any]) -> Any:
    tensors = [ops.tensor(tensor) for tensor in tensors]
    rank = min(ops.rank(tensor) for tensor in tensors)
    product = ops.ones()
    for tensor in tensors:
        # Keras drops a last dimension of one where ranks differ by it.
        tensor = ops.squeeze_last(tensor) if ops.rank(tensor) > rank else tensor
        product = product * ops.weight(tensor)
    return product


class ScalarMetric(NamedTuple):
    """One number with which a metric is updated once per batch."""

    metric: Any
    value: Any
    by_samples: bool | None
    """Whether the batch counts as its samples, not as one; `None`: if they are known before."""
    of_loss: bool
    """Whether it is of the loss, and counts for what the loss divides by."""
    weight: Any = None
    """What the batch counts as, if that is neither its samples nor one; it adds up."""


class TermRecorder:
    """Sees every part of the loss in one micro-batch, and corrects its weight.

    Args:
        backend: knows the Keras of the model.
        plan: what the parts of the loss do with a part of the batch.
        correction: called with the position of a term and its denominator in the micro-batch;
            returns the factor to multiply it by. Sums of layers have no position.
        lengths: what the micro-batches of the batch have in common.
        replicas: what Keras multiplies terms by, before it logs them.
        can_weigh: called when a term divides by something else than samples; says whether the
            micro-batch can count for that.
        is_odd: whether tensors of a batch differ in their number of samples.
    """

    def __init__(
        self,
        backend: Backend,
        plan: LossPlan,
        correction: Callable[[int, Any], Any],
        lengths: SharedDimensions,
        *,
        replicas: int = 1,
        can_weigh: Callable[[], bool] = lambda: False,
        is_odd: bool = False,
    ) -> None:
        self._backend = backend
        self._plan = plan
        self._correction = correction
        self._lengths = lengths
        self._replicas = replicas
        self._can_weigh = can_weigh
        self._is_odd = is_odd
        self.denominators: list[Any] = []
        self.loss_weight: Any = None
        """What the micro-batch counts for, if not for its samples."""
        self.numbers: list[ScalarMetric] = []
        """What metrics are to be updated with, not now but once per batch."""
        self._updated: set[int] = set()
        self._compiled: list[Any] = []

    @contextlib.contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Return a block in which losses and the values of `Mean` metrics pass through here."""
        with contextlib.ExitStack() as stack:
            for metric in model.metrics:
                if self._backend.is_mean(metric):
                    update_state = functools.partial(self._update, metric, metric.update_state)
                    stack.enter_context(replaced(metric, update_state=update_state))
            watching = self._backend.watching_loss(
                model, self._corrected, self._record, self._compiled.append
            )
            stack.enter_context(watching)
            stack.enter_context(
                self._backend.changing_added_losses(model, self._corrected_added)
            )
            if self._plan.compute_loss is Kind.SUM and not self._plan.is_gathered:
                compute = functools.partial(self._compute_loss, model, model.compute_loss)
                stack.enter_context(replaced(model, compute_loss=compute))
            yield

    def left_alone(self, model: Any) -> set[str]:
        """Return the names of metrics that say nothing, as `train_step` did not update them."""
        updated = self._updated | {id(number.metric) for number in self.numbers}
        said, unsaid = set(), set()
        for metric in model.metrics:
            is_known = self._backend.is_mean(metric) and id(metric) not in updated
            (unsaid if is_known else said).add(metric.name)
        return unsaid - said

    def _corrected(self, loss: Any) -> Callable[..., Any]:
        ops = self._backend.ops

        def call(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            position = len(self.denominators)
            kind = self._plan.kind_of_term(position)
            by = denominator(
                self._backend, loss, y_true, y_pred, sample_weight, self._lengths, kind
            )
            value = self._backend.value_of(loss, y_true, y_pred, sample_weight, by)
            if ops.is_tensor(by) and self._can_weigh():
                self.loss_weight, by = by, SAMPLES
            self.denominators.append(by)
            factor = self._correction(position, by)
            if factor is None:
                return value
            corrected = ops.times(value, factor)
            if ops.rank(value):  # not reduced: what is logged is the mean of these numbers
                corrected += ops.stop_gradient(value - corrected)
            return corrected

        return call

    def _corrected_added(self, layer: Any, position: int, loss: Any) -> Any:
        """Return what a layer adds to the loss; Keras adds up the numbers of a tensor."""
        is_sum = self._plan.kind_of_added(id(layer), position) is Kind.SUM
        if not is_sum and not self._backend.ops.rank(loss):
            return loss
        return self._backend.ops.times(loss, self._correction(-1, ONE))

    def _compute_loss(self, model: Any, compute: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a custom loss that is a sum but for compiled losses and regularisers."""
        self._compiled.clear()
        total, ops = compute(*args, **kwargs), self._backend.ops
        others = [one for one in self._compiled if one is not None]
        rest = sum([*others, *map(ops.sum, self._backend.regularisers_of(model))], 0.0)
        return rest + ops.times(total - rest, self._correction(-1, ONE))

    def _update(
        self, metric: Any, update_state: Any, values: Any, sample_weight: Any = None
    ) -> None:
        """Update a metric, unless it is with one number: that counts once per batch.

        So does the loss if micro-batches do not count for the samples of the first input:
        Keras tells the metric how many these are.
        """
        self._updated.add(id(metric))
        values = self._backend.ops.tensor(values)
        is_once = sample_weight is None or self._is_odd or self.loss_weight is not None
        if self._backend.ops.rank(values) == 0 and is_once:
            is_loss = sample_weight is not None
            values = self._backend.ops.noted(values)
            number = ScalarMetric(metric, values, by_samples=is_loss, of_loss=is_loss)
            if is_loss and self._is_odd:
                number = number._replace(weight=self._backend.ops.weight(sample_weight))
            self.numbers.append(number)
        else:
            update_state(values, sample_weight=sample_weight)

    def _record(self, metric: Any, value: Any) -> None:
        value = self._backend.ops.noted(self._backend.ops.mean(value) / self._replicas)
        self.numbers.append(ScalarMetric(metric, value, by_samples=None, of_loss=True))
