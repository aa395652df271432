"""How much memory a micro-batch takes, and which size to choose: arithmetic, no measuring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable

MARGIN = 0.05
"""The part of the memory that is left free: what measuring and the allocator may be off by."""

GAP = 0.2
"""How far, relative to a size that fits, the next that does not may be away."""


@dataclass(frozen=True)
class MemoryLine:
    """The peak memory of an update, as a line: `fixed + per_sample · samples`."""

    fixed: float
    per_sample: float

    def peak(self, samples: int) -> int:
        """Return the bytes that micro-batches of so many samples take."""
        return round(self.fixed + self.per_sample * samples)

    def largest(self, limit: float) -> int:
        """Return the most samples whose peak is within `limit`; zero if not even one is."""
        if self.peak(1) > limit:
            return 0
        if self.per_sample <= 0:
            return 2**62
        return max(1, int((limit - self.fixed) / self.per_sample))


def fit_line(peaks: dict[int, int]) -> MemoryLine:
    """Return the line through measured peaks, by samples.

    The two largest sizes decide: with few samples something else than activations, such as
    the update itself, may be the peak, which then does not grow.

    Example:
        >>> fit_line({1: 100, 2: 100, 4: 140, 8: 220})
        MemoryLine(fixed=60.0, per_sample=20.0)
    """
    (few, low), (many, high) = [(0, 0), *sorted(peaks.items())][-2:]
    if not few:  # one point: not known yet, but surely not less than nothing
        return MemoryLine(high, 0.0)
    per_sample = max(0.0, (high - low) / (many - few))
    return MemoryLine(high - per_sample * many, per_sample)


class SizeSearch:
    """Which micro-batch size to try next, and which to choose in the end.

    Sizes double until one fails, or is predicted to take far more than there is; then the gap
    is halved until it is small. A size that has not been tried is never chosen.

    Args:
        batch: the samples of a batch.
        limit: the bytes there are.
        is_hard: whether too large a size fails cleanly. If not, no size is tried that is
            predicted to take more than the limit, less a margin.

    Example:
        >>> search = SizeSearch(batch=512, limit=10_000, is_hard=True)
        >>> while search.next_size():
        ...     size = search.next_size()
        ...     search.add(size, 1000 + 30 * size if size <= 300 else None)
        >>> search.chosen
        256
    """

    def __init__(self, batch: int, limit: int, *, is_hard: bool) -> None:
        self._batch = batch
        self._allowed = 1.5 * limit if is_hard else (1 - MARGIN) * limit
        self._too_large = batch + 1
        self._peaks: dict[int, int] = {}

    @property
    def line(self) -> MemoryLine:
        """How the peak grows, by what has been measured."""
        return fit_line(self._peaks)

    def add(self, size: int, peak: int | None) -> None:
        """Note the peak memory of a size, or that it did not fit."""
        if peak is None:
            self._too_large = size
        else:
            self._peaks[size] = peak

    def next_size(self) -> int:
        """Return the size to try next, or zero if it is known what to choose."""
        fits = max(self._peaks, default=0)
        if fits >= self._too_large - 1 or (fits and self._too_large - fits <= GAP * fits):
            return 0
        size = 2 * fits or 1
        if size >= self._too_large:
            size = self._too_large - 1 if self._too_large > self._batch else 0
            size = size or (fits + self._too_large) // 2
        if len(self._peaks) > 1 and self.line.peak(size) > self._allowed:
            size = min(size, self.line.largest(self._allowed))
        return size if size > fits else 0

    @property
    def chosen(self) -> int:
        """The largest size that fits, or a handy one nearly as large; zero if none does.

        Powers of two and divisors of the batch are preferred if within 10 % of the largest.
        """
        fits = max(self._peaks, default=0)
        if fits in (0, self._batch):
            return fits
        handy = [size for size in _handy(self._batch) if 0.9 * fits <= size <= fits]
        return max(handy, default=fits)


def _handy(batch: int) -> Iterable[int]:
    yield from (2**power for power in range(batch.bit_length()))
    yield from (size for size in range(1, batch + 1) if batch % size == 0)


def readable(count: float) -> str:
    """Return a number of bytes to be read by people.

    Example:
        >>> readable(1610612736)
        '1.5 GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
