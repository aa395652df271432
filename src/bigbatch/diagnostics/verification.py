"""The result of `verify`: whether updates are equal, and if not, why."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from bigbatch.core.memory import readable
from bigbatch.core.report import Report, Table
from bigbatch.errors import DifferenceError

_SHOWN = 8
"""How many variables a table shows: those that differ most."""


@dataclass(frozen=True)
class Hazard:
    """Something that makes, or could make, micro-batches differ from the full batch."""

    where: str
    """The layer, loss or optimizer, by name."""
    what: str
    """What it does."""
    fix: str
    """What to do about it."""


@dataclass(frozen=True)
class Difference:
    """How much one variable differs."""

    variable: str
    gradient: float
    """The largest difference of its gradient, relative to its largest gradient."""
    weight: float
    """The largest difference of its update, relative to its largest update."""


@dataclass(frozen=True)
class Cost:
    """The time and memory of one update."""

    seconds: float
    peak: int | None
    """The most bytes in use, if the device counts them."""


@dataclass(frozen=True)
class Verification:
    """The result of comparing the full batch and the accumulated batch on a user's model.

    `print` it, or see `ok`, `verdict` and `hazards`.
    """

    ok: bool
    """Whether they have been compared and are the same, but for rounding."""
    samples: int
    """How many samples were compared; zero if nothing was."""
    microbatch_size: int
    tolerance: float
    """How much may be rounding, relative to the largest value."""
    differences: tuple[Difference, ...]
    """Of every weight."""
    logs: dict[str, float]
    """The relative differences of the loss and the metrics."""
    full: Cost | None
    """What the full batch takes; `None` if it was not run."""
    accumulated: Cost | None
    """What micro-batches take."""
    hazards: tuple[Hazard, ...]
    """What makes them differ, or would."""
    notes: tuple[str, ...] = ()
    """What was done to be able to compare."""

    @property
    def is_equal(self) -> bool:
        """Whether this one update is equal; others may differ."""
        largest = [max(one.gradient, one.weight / 10) for one in self.differences]
        values = (*largest, *self.logs.values())
        return bool(largest) and all(value <= self.tolerance for value in values)

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        names = ", ".join(hazard.where for hazard in self.hazards)
        if not self.samples:
            because = f", because of {names}" if names else ""
            return f"Not the same: the full batch could not be compared{because}."
        size = f"micro-batches of {self.microbatch_size} samples"
        if self.ok:
            largest = max(one.gradient for one in self.differences)
            return (
                f"The same: {size} give the update of the full batch of {self.samples} "
                f"(largest difference of a gradient {largest:.0e}, which is rounding)."
            )
        if self.is_equal:
            return (
                f"Not the same: {size} gave the update of the full batch of {self.samples} "
                f"this time, but will not always, because of {names}."
            )
        because = f"because of {names}" if names else "for a reason that no test found"
        return (
            f"Not the same: {size} do not give the update of the full batch of "
            f"{self.samples}, {because}."
        )

    def raise_if_different(self) -> Verification:
        """Raise a `DifferenceError` unless `ok`; return this result."""
        if not self.ok:
            raise DifferenceError(str(self))
        return self

    def report(self) -> Report:
        """Return what `print` shows."""
        rows = sorted(self.differences, key=lambda one: -max(one.gradient, one.weight))
        variables = Table(
            ("variable", "gradient: max |Δ| / max", "update: max |Δ| / max"),
            [
                (one.variable, f"{one.gradient:.1e}", f"{one.weight:.1e}")
                for one in rows[:_SHOWN]
            ],
        )
        logs = Table(
            ("logged value", "|Δ| / |full batch|"),
            [(name, f"{value:.1e}") for name, value in self.logs.items()],
        )
        tables = [table for table in (variables, logs, self._costs()) if table.rows]
        notes = [f"{one.where}: {one.what}. {one.fix}" for one in self.hazards]
        more = len(rows) - _SHOWN
        if more > 0:
            notes.append(f"{more} more variables differ less.")
        if self.full is not None and self.full.peak is None:
            notes.append("Memory was not measured: this device does not count it.")
        return Report(self.verdict, tables, [*notes, *self.notes])

    def _costs(self) -> Table:
        """Return time, and memory if it was measured, of both updates."""
        costs = [("full batch", self.full), ("accumulated", self.accumulated)]
        known = [(name, cost) for name, cost in costs if cost is not None]
        is_measured = bool(known) and all(cost.peak is not None for _, cost in known)
        headings = ("one update", "time", *(["peak memory"] if is_measured else []))
        rows = [
            (
                name,
                f"{cost.seconds:.3g} s",
                *([readable(cost.peak or 0)] if is_measured else []),
            )
            for name, cost in known
        ]
        return Table(headings, rows)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values; numbers that are not finite are `None`."""
        return _finite({"verdict": self.verdict, **asdict(self)})

    def __str__(self) -> str:
        return self.report().text()

    def __rich__(self) -> Any:
        """Return it for a terminal with colours."""
        return self.report().__rich__()

    def _repr_html_(self) -> str:
        return self.report().html()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
