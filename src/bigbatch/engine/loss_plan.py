"""How each part of a loss adds up over parts of the batch; decided before the first update."""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass, field


class Kind(enum.Enum):
    """How the value for a batch follows from the values for its micro-batches.

    Members are in the order in which workers that disagree give way.
    """

    MEAN = "a mean over samples"
    SUM = "a sum over samples"
    KERAS = "the reduction of Keras over values of single samples"
    WHOLE = "a value of the whole batch"


@dataclass
class LossPlan:
    """How the parts of a loss are put together over the micro-batches of a batch.

    The kinds are found by trying (`loss_trial.py`), what has to be known of the batch when a
    micro-batch is traced.
    """

    terms: list[Kind] = field(default_factory=list)
    """The kind of each loss given to `compile`; `KERAS` for those that were not tried."""
    compute_loss: Kind = Kind.MEAN
    """The kind of what a custom `compute_loss` adds to these."""
    is_tried: bool = False
    """Whether there is a custom `compute_loss`, and it was tried."""
    added: dict[int, list[Kind]] = field(default_factory=dict)
    """The kinds of what a layer passes to `add_loss`, call by call, by the `id` of layers."""
    metrics: dict[int, Kind] = field(default_factory=dict)
    """The kinds of metrics that are no sum over samples, by the `id` of the metric."""
    updates: set[int] = field(default_factory=set)
    """The updates of a custom `train_step`, by number, whose loss is a sum over samples."""
    logs: set[str] = field(default_factory=set)
    """The names of what a custom `train_step` logs that is a sum over samples."""
    needs_samples: bool = False
    """Whether a part is a sum, and its weight depends on the samples of the batch."""
    needs_denominators: bool = False
    """Whether a term divides by something that has to be counted over the batch first."""
    is_odd: bool = False
    """Whether tensors of a batch differ in their number of samples."""
    is_gathered: bool = False
    """Whether `compute_loss` is called with the outputs of the whole batch, gathered."""
    is_countable: bool = False
    """Whether counting was tried and runs: eagerly that tells `needs_denominators`."""
    is_counted: bool = False
    """Whether what the terms of the batch divide by has been counted, if it runs eagerly."""

    def kind_of_term(self, position: int) -> Kind:
        """Return the kind of a loss given to `compile`; a step may compute them repeatedly."""
        return self.terms[position % len(self.terms)] if self.terms else Kind.KERAS

    def kind_of_added(self, layer: int, position: int) -> Kind:
        """Return the kind of what a layer passes to `add_loss`."""
        kinds = self.added.get(layer)
        return kinds[position % len(kinds)] if kinds else Kind.MEAN

    @property
    def has_sums(self) -> bool:
        """Whether a part was found to be a mean or a sum of numbers for parts of a batch."""
        kinds = [*self.terms, *self.metrics.values(), *itertools.chain(*self.added.values())]
        kinds += [self.compute_loss] * self.is_tried
        return Kind.MEAN in kinds or Kind.SUM in kinds

    def keep_common(self, other: LossPlan) -> None:
        """Keep the kinds that were found with another cut of the same samples, too."""

        def common(one: Kind, two: Kind) -> Kind:
            return one if one is two else Kind.WHOLE

        if len(self.terms) == len(other.terms):
            self.terms = [*map(common, self.terms, other.terms)]
        self.compute_loss = common(self.compute_loss, other.compute_loss)
        for layer, kinds in self.added.items():
            self.added[layer] = [*map(common, kinds, other.added[layer])]
        for one in {*self.metrics, *other.metrics}:
            found = (plan.metrics.get(one, Kind.KERAS) for plan in (self, other))
            self.metrics[one] = common(*found)

    @property
    def needs_whole_batch(self) -> bool:
        """Whether a part of the loss is only known for the batch as a whole."""
        return Kind.WHOLE in (*self.terms, self.compute_loss)
