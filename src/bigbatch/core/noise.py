"""The gradient noise scale: which batch size is worth having. Arithmetic only.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", for micro-batches of any
sizes. With g the gradient of the mean loss of bᵢ samples, B = Σbᵢ, k micro-batches:

    S  = B/(k−1) · (Σ bᵢ/B·|gᵢ|² − |ḡ|²)     is unbiased for tr Σ, the noise of one sample
    G² = |ḡ|² − S/B                           is unbiased for |G|², the true gradient

Their ratio is the critical batch size. Both are noisy: they are averaged over updates, and
the ratio is that of the averages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, List, Sequence

from bigbatch.errors import ArgumentError, explain

DECAY = 0.99
"""How much of the past an average keeps with every update it is made of: about 200 count."""

SIGNIFICANCE = 1.96
"""Standard errors within which the truth lies, in 95 % of all cases."""

MOMENTS = 7
"""How many numbers an average has: see `moments`."""


def noise_and_signal(mean_square: Any, square_of_mean: Any, batch: Any, count: Any) -> Any:
    """Return S and G² of one update.

    Args:
        mean_square: Σ bᵢ/B·|gᵢ|², over the micro-batches.
        square_of_mean: |ḡ|², of the gradient of the whole batch.
        batch: B, the samples.
        count: k, the micro-batches, two or more.

    Example:
        >>> noise_and_signal(5.0, 3.0, batch=8, count=2)
        (16.0, 1.0)
    """
    noise = batch / (count - 1) * (mean_square - square_of_mean)
    return noise, square_of_mean - noise / batch


def moments(noise: Any, signal: Any, batch: Any) -> List[Any]:
    """Return the numbers whose averages over updates make an estimate."""
    return [1.0, noise, signal, noise * noise, signal * signal, noise * signal, batch]


@dataclass(frozen=True)
class Estimate:
    """An estimate of the gradient noise scale, from averages over updates.

    Args:
        average: the decaying sums of `moments`.
        updates: the number of updates measured.
    """

    average: Sequence[float] = (0.0,) * MOMENTS
    updates: int = 0

    def with_update(
        self, mean_square: float, square_of_mean: float, batch: float, count: float
    ) -> Estimate:
        """Return the estimate after one more update; see `noise_and_signal`.

        An update of one micro-batch says nothing; one that is not finite is left out.
        """
        if count < 2:
            return self
        noise, signal = noise_and_signal(mean_square, square_of_mean, batch, count)
        if not math.isfinite(noise) or not math.isfinite(signal):
            return self
        new = moments(noise, signal, batch)
        average = tuple(DECAY * old + one for old, one in zip(self.average, new))
        return Estimate(average, self.updates + 1)

    @property
    def critical_batch_size(self) -> float | None:
        """The samples beyond which a larger batch pays less; `None` is "not yet known"."""
        interval = self.interval
        if interval is None:
            return None
        _, noise, signal, *_ = self.average
        return max(noise, 0.0) / signal

    @property
    def batch_size(self) -> float:
        """The samples of an update, on average."""
        return self.average[6] / self.average[0] if self.updates else 0.0

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of the critical batch size (Fieller 1954).

        `None` as long as the signal is not significantly above zero: then there is no bound.
        """
        if self.updates < 2:
            return None
        total, *sums, _ = self.average
        noise, signal, noise_2, signal_2, both = (value / total for value in sums)
        # Of how many independent updates an average with these weights is worth.
        weights_2 = (1 - DECAY ** (2 * self.updates)) / (1 - DECAY**2)
        weights = (1 - DECAY**self.updates) / (1 - DECAY)
        share = weights_2 / weights**2
        bound = SIGNIFICANCE**2 * share / (1 - share)
        a = signal**2 - bound * (signal_2 - signal**2)
        b = noise * signal - bound * (both - noise * signal)
        c = noise**2 - bound * (noise_2 - noise**2)
        root = b**2 - a * c
        if not a > 0 or not signal > 0 or root < 0:
            return None
        return max(0.0, (b - math.sqrt(root)) / a), max(0.0, (b + math.sqrt(root)) / a)

    def advice(self) -> str:
        """Say in one sentence what the batch size is worth."""
        critical, batch = self.critical_batch_size, self.batch_size
        if critical is None or self.interval is None:
            return (
                f"The critical batch size is not yet known from {self.updates:,} updates: the "
                "noise of the gradients hides how it compares with them."
            )
        low, high = self.interval
        known = f"{_rounded(critical)} ({_rounded(low)} to {_rounded(high)})"
        yours = f"your batch of {_rounded(batch)}"
        if batch < low / 2:
            return (
                f"{yours} is far below the critical batch of about {known}: accumulating more "
                "should pay nearly linearly."
            ).capitalize()
        if batch < low:
            return (
                f"{yours} is below the critical batch of about {known}: accumulating more "
                "should pay."
            ).capitalize()
        if batch > high:
            return (
                f"{yours} is above the critical batch of about {known}: fewer micro-batches "
                "would be as good, with more updates."
            ).capitalize()
        return (
            f"{yours} is near the critical batch of about {known}: a good compromise of time "
            "and samples."
        ).capitalize()


class NoiseScaleEstimator:
    """Estimates the gradient noise scale in a custom training loop, update by update.

    Example:
        >>> estimator = NoiseScaleEstimator()
        >>> for _ in range(10):
        ...     # in a real loop these differ from update to update
        ...     estimator.add([4, 4], squared_norms=[6.0, 4.0], squared_norm_of_mean=4.5)
        >>> estimator.estimate.critical_batch_size
        1.0
    """

    def __init__(self) -> None:
        self._estimate = Estimate()

    def add(
        self,
        sizes: Sequence[float],
        squared_norms: Sequence[float],
        squared_norm_of_mean: float,
    ) -> None:
        """Add one update.

        Args:
            sizes: the samples of each micro-batch, on every replica.
            squared_norms: |gᵢ|², of the gradient of the mean loss of each micro-batch.
            squared_norm_of_mean: |ḡ|², of the gradient of the mean loss of all samples.
        """
        if len(sizes) != len(squared_norms) or len(sizes) < 2:
            raise ArgumentError(
                explain(
                    received=f"{len(sizes)} sizes and {len(squared_norms)} squared norms",
                    expected="the same number of both, for at least two micro-batches",
                    fix="cut batches into micro-batches: one alone does not show the noise",
                )
            )
        batch = float(sum(sizes))
        mean = sum(b * float(norm) for b, norm in zip(sizes, squared_norms)) / batch
        self._estimate = self._estimate.with_update(
            mean, squared_norm_of_mean, batch, len(sizes)
        )

    @property
    def estimate(self) -> Estimate:
        """The estimate so far."""
        return self._estimate


def _rounded(number: float) -> str:
    """Return a number of samples with two digits that count.

    Example:
        >>> _rounded(2134.5), _rounded(7.2)
        ('2,100', '7')
    """
    if number < 10:
        return f"{number:.0f}"
    scale = 10 ** (math.floor(math.log10(number)) - 1)
    return f"{round(number / scale) * scale:,.0f}"
