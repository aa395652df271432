"""The typed values that travel from micro-batches to the update; they all add up."""

from __future__ import annotations

from typing import Any, NamedTuple


class BatchContext(NamedTuple):
    """What is known of a batch when one of its micro-batches runs."""

    nominal_samples: Any
    """What gradients are divided by: about the samples of the batch on all replicas.

    So float16 meets numbers of the size they have in the full batch.
    """
    samples: Any
    """The samples of the batch on all replicas; only read if the `LossPlan` needs them."""
    denominators: Any
    """What each term of the compiled loss divides by on all replicas; as `samples`."""

    @classmethod
    def of(cls, vector: Any) -> BatchContext:
        """Return what a vector holds: nominal samples, samples, denominators."""
        return cls(vector[0], vector[1], vector[2:])


class LogTotals(NamedTuple):
    """What micro-batches log, times what they count for."""

    values: dict[str, Any]
    """What `train_step` returned, by name; dicts may stand in dicts."""
    numbers: list[Any]
    """The numbers with which metrics are updated once per batch."""
    batch_metrics: list[Any]
    """What `BatchMetrics` keep until the batch is complete."""
    weights: list[Any]
    """What the batch counts as in each of them; `None` where it is its samples, or one."""


class StatisticTotals(NamedTuple):
    """What callbacks want to know of micro-batches."""

    microbatches: Any
    squared_norms: list[Any]
    """For each optimizer |gᵢ|²·bᵢ of its gradients; none if nobody asks for the noise."""


class Totals(NamedTuple):
    """What a micro-batch gives, times what it counts for, and so the sum over a batch."""

    gradients: list[list[Any]]
    """For each optimizer, ∇loss times weight over nominal samples, variable by variable.

    `None` where the backend adds the gradient up while the micro-batch runs.
    """
    samples: Any
    loss_weight: Any
    """What the loss counts for: samples, or the denominator of its only term."""
    logs: LogTotals
    moments: list[Any]
    """The moments of batch normalisation layers, call by call."""
    statistics: StatisticTotals | None


class ReplicaTotals(NamedTuple):
    """What one replica has when its micro-batches are done, to be summed over replicas."""

    totals: Totals
    metrics: list[list[Any]]
    """The total and the count of metrics that are updated once per batch."""
    nominal_samples: Any
    """`None` if gradients need no other scale: it is the samples of the batch."""
