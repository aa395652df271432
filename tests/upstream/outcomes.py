"""How tests and programs ended with and without accumulation, compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from upstream.permitted import PERMITTED, Permitted, permission

PLAIN = "plain"
PASSED = "passed"
LARGEST_DIFFERENCE = 1e-4
"""Of two equal float32 programs, relative to how far training moved the weights.

Equal ones are at 1e-5 and below, the smallest known real difference is at 1e-2.
"""

Outcomes = dict[str, dict[str, str]]
"""By mode and name: "passed", "skipped", or what failed."""


@dataclass(frozen=True)
class Difference:
    """A test or program that passes in plain Keras, and not with accumulation."""

    name: str
    mode: str
    ended: str
    permitted: Permitted | None

    def text(self) -> str:
        """Return it as a line."""
        reason = f"permitted: {self.permitted.reason}" if self.permitted else "NOT PERMITTED"
        return f"{self.mode:7} {self.name}: {self.ended} ({reason})"


@dataclass(frozen=True)
class Row:
    """How many tests of a suite pass in each mode."""

    suite: str
    passed: dict[str, int]
    differ: dict[str, int]
    commit: str
    """The commit that was checked out when it ran."""

    def text(self) -> str:
        """Return it as a line."""
        counts = ", ".join(
            f"{mode} {count} passed"
            + (f" ({self.differ[mode]} differ)" if mode != PLAIN else "")
            for mode, count in self.passed.items()
        )
        return f"{self.suite}: {counts}"


def row_of(suite: str, outcomes: Outcomes, commit: str) -> Row:
    """Count what passed in each mode of a suite."""
    passed = {mode: sum(e == PASSED for e in of.values()) for mode, of in outcomes.items()}
    differ = {
        mode: sum(one.mode == mode for one in differences_of(outcomes)) for mode in outcomes
    }
    return Row(suite, passed, differ, commit)


def differences_of(
    outcomes: Outcomes, permitted: tuple[Permitted, ...] = PERMITTED
) -> list[Difference]:
    """Return what passes plainly and did not pass, or did not run, with accumulation."""
    plain = outcomes[PLAIN]
    return [
        Difference(name, mode, of.get(name, "did not run"), permission(name, mode, permitted))
        for mode, of in outcomes.items()
        for name in plain
        if mode != PLAIN and plain[name] == PASSED and of.get(name) != PASSED
    ]


def outcomes_of_programs(comparisons: list[dict[str, Any]]) -> Outcomes:
    """Return the comparisons that `programs.py` wrote as outcomes."""
    outcomes: Outcomes = {PLAIN: {one["name"]: PASSED for one in comparisons}}
    for one in comparisons:
        ended = PASSED
        if one["error"] is not None:
            ended = f"failed: {one['error']}"
        elif not one["difference"] <= LARGEST_DIFFERENCE:  # nor is NaN
            ended = f"failed: the weights differ by {one['difference']:.1e} of their change"
        outcomes.setdefault(one["mode"], {})[one["name"]] = ended
    return outcomes
