"""How many micro-batches make an update, as training goes on: plain values, no framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, Tuple

from bigbatch.core.arguments import positive_integer
from bigbatch.errors import ArgumentError, explain


@dataclass(frozen=True)
class Piecewise:
    """A schedule that is constant in pieces; see `piecewise`."""

    pieces: Tuple[Tuple[int, int], ...]
    """Pairs of updates made and the micro-batches per update from then on, in order."""

    def __call__(self, updates: int) -> int:
        """Return the micro-batches of the update that follows `updates` updates."""
        return [steps for start, steps in self.pieces if start <= updates][-1]


def piecewise(steps: Mapping[int, int]) -> Piecewise:
    """Return a schedule for `accumulation_steps` that changes after given numbers of updates.

    Args:
        steps: micro-batches per update, by the number of updates made; the first key is 0.

    Example:
        >>> schedule = piecewise({0: 1, 1000: 4})
        >>> schedule(0), schedule(999), schedule(1000)
        (1, 1, 4)
    """
    if not isinstance(steps, Mapping) or 0 not in steps:
        raise ArgumentError(
            explain(
                received=f"piecewise({steps!r})",
                expected="a dict from updates made to micro-batches per update, from 0 on",
                fix="for example piecewise({0: 1, 1000: 4})",
            )
        )
    for updates in steps:
        if updates != 0:
            positive_integer(updates, "a key of piecewise()")
    return Piecewise(
        tuple((n, positive_integer(steps[n], f"piecewise()[{n}]")) for n in sorted(steps))
    )


@dataclass(frozen=True)
class Grow:
    """A schedule that grows; see `grow`."""

    to: int
    every: int
    start: int
    factor: float

    def __call__(self, updates: int) -> int:
        """Return the micro-batches of the update that follows `updates` updates."""
        steps, at_most = float(self.start), float(self.to)
        for _ in range(updates // self.every):
            steps *= self.factor
            if steps >= at_most:
                return self.to
        return min(self.to, round(steps))


def grow(to: int, *, every: int, start: int = 1, factor: float = 2) -> Grow:
    """Return a schedule for `accumulation_steps` that grows to a number and stays there.

    The gradient noise scale grows as the loss falls: a small batch is enough at first, and a
    large one pays later. `to` is the critical batch (see `NoiseScale`) divided by the batch.

    Args:
        to: the micro-batches per update in the end.
        every: the number of updates between two steps of growth.
        start: the micro-batches per update at first.
        factor: by how much each step multiplies the micro-batches.

    Example:
        >>> schedule = grow(to=12, every=1000)
        >>> [schedule(updates) for updates in (0, 999, 1000, 2000, 3000, 4000, 9000)]
        [1, 1, 2, 4, 8, 12, 12]
    """
    to, every = positive_integer(to, "to"), positive_integer(every, "every")
    start = positive_integer(start, "start")
    if start > to:
        raise _bad_growth(f"start={start}, to={to}", "a start that is not above the end")
    is_number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
    if not is_number or not factor > 1:
        raise _bad_growth(f"factor={factor!r}", "a number above 1")
    return Grow(to, every, start, factor)


def _bad_growth(received: Any, expected: str) -> ArgumentError:
    fix = "for example grow(to=16, every=1000), which doubles every 1000 updates"
    return ArgumentError(explain(received=received, expected=expected, fix=fix))
