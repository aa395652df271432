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
from dataclasses import dataclass
from typing import Any, Callable, Iterator, NamedTuple

from bigbatch.backends.base import Backend
from bigbatch.core.patching import replaced

SAMPLES = "samples"
"""The denominator of a term that is a mean over samples: no correction is needed."""

OWN = "own"
"""As `SAMPLES`, of a mean that the user's function has made: Keras leaves it as it is."""

ONE = "one"
"""The denominator of a term that is a sum: one for the whole batch, so that parts add up."""


class Lengths(enum.Enum):
    """Which dimensions the micro-batches of a batch share, apart from the number of them."""

    SAME = "all dimensions but the first"
    DECLARED = "the dimensions that are known when a graph is traced"
    ANY = "none"


@dataclass
class LossPlan:
    """What the terms of a loss have to know of the batch; found when one is traced."""

    needs_samples: bool = False
    """Whether a term is a sum, and its weight depends on the samples of the batch."""
    needs_denominators: bool = False
    """Whether a term divides by something that has to be counted over the batch first."""


def denominator(
    backend: Backend, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any, lengths: Lengths
) -> Any:
    """Return what `loss` divides the sum over these samples by, or `SAMPLES`, `OWN`, `ONE`.

    This is the arithmetic of `keras.losses.Loss`, of which only the quotient is public.
    """
    ops = backend.ops
    elements = backend.elements(loss, y_true, y_pred)
    if elements is None:
        return OWN
    values, masks = elements
    if not ops.is_tensor(values) or ops.rank(values) == 0:
        # Weights, if there are any, make it one number per sample again.
        return SAMPLES if masks or sample_weight is not None else OWN
    if loss.reduction in ("sum", "none", None):  # the gradient of many numbers is of their sum
        return ONE
    if loss.reduction == "mean_with_sample_weight" and (masks or sample_weight is not None):
        weights = [*masks] if sample_weight is None else [*masks, sample_weight]
        return ops.sum(_product(ops, weights))
    size = ops.size(values)
    if not masks:
        per_sample = values.shape[1:]
        proportional = lengths is Lengths.SAME or not len(per_sample)
        if lengths is Lengths.DECLARED:
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


class TermRecorder:
    """Sees every term of the compiled loss in one micro-batch, and corrects its weight.

    Args:
        backend: knows the Keras of the model.
        correction: called with the position of a term and its denominator in the micro-batch;
            returns the factor to multiply it by. Sums of layers have no position.
        lengths: what the micro-batches of the batch have in common.
        replicas: what Keras multiplies terms by, before it logs them.
        can_weigh: called when a term divides by something else than samples; says whether the
            micro-batch can count for that.
    """

    def __init__(
        self,
        backend: Backend,
        correction: Callable[[int, Any], Any],
        lengths: Lengths,
        *,
        replicas: int = 1,
        can_weigh: Callable[[], bool] = lambda: False,
    ) -> None:
        self._backend = backend
        self._correction = correction
        self._lengths = lengths
        self._replicas = replicas
        self._can_weigh = can_weigh
        self.denominators: list[Any] = []
        self.loss_weight: Any = None
        """What the micro-batch counts for, if not for its samples."""
        self.numbers: list[ScalarMetric] = []
        """What metrics are to be updated with, not now but once per batch."""
        self._updated: set[int] = set()

    @contextlib.contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Return a block in which losses and the values of `Mean` metrics pass through here."""
        with contextlib.ExitStack() as stack:
            for metric in model.metrics:
                if self._backend.is_mean(metric):
                    update_state = functools.partial(self._update, metric, metric.update_state)
                    stack.enter_context(replaced(metric, update_state=update_state))
            watching = self._backend.watching_loss(model, self._corrected, self._record)
            stack.enter_context(watching)
            once = functools.partial(self._correction, -1, ONE)
            stack.enter_context(self._backend.scaling_sums_of_layers(model, once))
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
            by = denominator(self._backend, loss, y_true, y_pred, sample_weight, self._lengths)
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

    def _update(
        self, metric: Any, update_state: Any, values: Any, sample_weight: Any = None
    ) -> None:
        """Update a metric, unless it is with one number: that counts once per batch.

        So does the loss, of which Keras tells how many samples it is of, if these are not what
        micro-batches count for.
        """
        self._updated.add(id(metric))
        values = self._backend.ops.tensor(values)
        is_once = sample_weight is None or self.loss_weight is not None
        if self._backend.ops.rank(values) == 0 and is_once:
            is_loss = sample_weight is not None
            number = ScalarMetric(metric, values, by_samples=is_loss, of_loss=is_loss)
            self.numbers.append(number)
        else:
            update_state(values, sample_weight=sample_weight)

    def _record(self, metric: Any, value: Any) -> None:
        value = self._backend.ops.mean(value) / self._replicas
        self.numbers.append(ScalarMetric(metric, value, by_samples=None, of_loss=True))
