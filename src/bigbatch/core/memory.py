"""How much memory a micro-batch takes, and which size to choose: arithmetic, no measuring."""

from __future__ import annotations

import math
import re
from typing import Any, Mapping

import numpy as np

from bigbatch.errors import ArgumentError, explain

MARGIN = 0.05
"""The part of the memory that is left free: what measuring and the allocator may be off by."""

GAP = 0.125
"""Stop when the smallest failing size is within 12.5 % of the largest fitting one."""


class MemoryCurve:
    """The peak memory of an update by the size of its micro-batches, from what was measured.

    Between measured sizes it is a straight line, and beyond the largest the line through it and
    the largest that is half of it or less. With few samples something else than activations,
    such as the update itself or the scratch memory of an operation, is the peak, which hardly
    grows; and sizes that are nearly the same say nothing.

    Args:
        peaks: measured bytes, by samples per micro-batch.

    Example:
        >>> curve = MemoryCurve({1: 100, 2: 120, 4: 160, 8: 240})
        >>> curve.peak(3), curve.peak(16), curve.largest(420)
        (140, 400, 17)
    """

    def __init__(self, peaks: Mapping[int, int]) -> None:
        self._points = sorted(peaks.items())
        self.per_sample = 0.0  # not known yet, but surely not less than nothing
        """What one more sample takes, where it is the samples that count."""
        if len(self._points) > 1:
            many, high = self._points[-1]
            halves = [point for point in self._points if point[0] <= many / 2]
            few, low = (halves or self._points)[-1 if halves else 0]
            self.per_sample = max(0.0, (high - low) / (many - few))

    def peak(self, size: int) -> int:
        """Return the bytes that micro-batches of so many samples take."""
        sizes, peaks = zip(*self._points)
        beyond = max(0, size - sizes[-1])
        return round(float(np.interp(size, sizes, peaks)) + self.per_sample * beyond)

    def largest(self, limit: float) -> int:
        """Return the most samples whose peak is within `limit`; zero if not even one is."""
        size, peak = self._points[-1]
        if peak > limit:
            return max((n for n in range(1, size) if self.peak(n) <= limit), default=0)
        return size + int((limit - peak) / self.per_sample) if self.per_sample else 2**62


class SizeSearch:
    """Which micro-batch size to try next, and which to choose in the end.

    The whole batch is tried first: an allocator that gets its memory in pieces gets large ones
    then. If it fails, sizes double until one does, or is predicted to take far more than there
    is; then sizes between them are tried until the gap is small. What is chosen is a little
    smaller than what fits: the next update may take more.

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
        285
    """

    def __init__(self, batch: int, limit: int, *, is_hard: bool) -> None:
        self._batch = batch
        self._limit = limit
        self._is_hard = is_hard
        # What is too much by prediction may fit: allocators count what they round up.
        self._allowed = (1.5 if is_hard else 1 - MARGIN) * limit
        self._too_large = batch + 1
        self._peaks: dict[int, int] = {}

    @property
    def curve(self) -> MemoryCurve:
        """How the peak grows, by what has been measured."""
        return MemoryCurve(self._peaks)

    def add(self, size: int, peak: int | None) -> None:
        """Note the peak memory of a size, or that it did not fit."""
        if peak is None:
            self._too_large = size
        else:
            self._peaks[size] = peak

    def next_size(self) -> int:
        """Return the size to try next, or zero if it is known what to choose."""
        fits = max(self._peaks, default=0)
        if self._is_hard and not fits and self._too_large > self._batch:
            return self._batch
        if fits >= self._too_large - 1 or (fits and self._too_large - fits <= GAP * fits):
            return 0
        size = 2 * fits or 1
        if size >= self._too_large:
            size = self._too_large - 1 if self._too_large > self._batch else 0
            size = size or self._between(fits)
        if len(self._peaks) > 1 and self.curve.peak(size) > self._allowed:
            size = min(size, self.curve.largest(self._allowed))
            if size - fits <= GAP * fits:
                return 0
        return size if size > fits else 0

    def _between(self, fits: int) -> int:
        """Return a size between one that fits and one that does not.

        Rather a little too small: for what does not fit an allocator waits for seconds.
        """
        middle = (fits + self._too_large) // 2
        if len(self._peaks) < 2:
            return middle
        return min(middle, max(self.curve.largest(self._limit), math.ceil((1 + GAP) * fits)))

    @property
    def chosen(self) -> int:
        """The largest size that fits, less a margin, or a handy one; zero if none does."""
        fits = max(self._peaks, default=0)
        return fits if fits in (0, 1, self._batch) else handy(_with_margin(fits), self._batch)


def _with_margin(size: int) -> int:
    return math.ceil((1 - MARGIN) * size)


def handy(size: int, batch: int) -> int:
    """Return a power of two or divisor of the batch within 10 % below `size`, if there is one.

    Example:
        >>> handy(67, batch=200), handy(52, batch=200), handy(45, batch=200)
        (64, 50, 45)
    """
    if size >= batch:
        return batch
    numbers = range(math.ceil(0.9 * size), size + 1)
    return max((n for n in numbers if n and (n & (n - 1) == 0 or batch % n == 0)), default=size)


def bytes_of(text: Any) -> int:
    """Return a number of bytes that may be written with a unit, or raise.

    Example:
        >>> bytes_of("8GiB"), bytes_of("1.5 GB"), bytes_of(4096)
        (8589934592, 1500000000, 4096)
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*)\s*([kmgt]?)(i?)b?\s*", str(text).lower())
    count = 0
    if match and not isinstance(text, bool):
        number, prefix, binary = match.groups()
        base = 1024 if binary else 1000
        count = round(float(number) * base ** " kmgt".index(prefix or " "))
    if count < 1:
        raise ArgumentError(
            explain(
                received=f"memory_limit={text!r}",
                expected="a number of bytes, or a text such as '8GiB', '800MB'",
                fix="pass the memory of the training device, for example '8GiB'",
            )
        )
    return count


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
