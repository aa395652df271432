"""How sparse gradients are kept until the update: as rows, or summed into one dense tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, Tuple

ROWS, DENSE = "rows", "dense"
CHOICES = (ROWS, DENSE)


@dataclass(frozen=True)
class Table:
    """What a trace tells of the sparse gradient of one variable."""

    name: str
    optimizer: str
    """The name of the kind of optimizer that updates it."""
    rows: int
    """How many rows the variable has."""
    row_bytes: int
    """What one of them takes in a sum."""
    rows_per_sample: int | None
    """How many rows a sample looks up, if that is known."""
    has_repeats: bool
    """Whether a row may be looked up more than once."""
    adds_up: bool = False
    """Whether the optimizer makes the same update from rows and from their sum."""


@dataclass
class SparseGradients:
    """What the user has chosen, and what is known of a batch and its tables."""

    choice: str = ROWS
    samples: int | None = None
    """The samples of a batch on one replica, if they are known before a trace."""
    tables: Dict[Tuple[str, int], Table] = field(default_factory=dict)
    """The variables that have sparse gradients, by name and by the `id` of their optimizer."""
    is_known: bool = False
    """Whether a micro-batch has shown which gradients are sparse."""

    def is_summed(self, table: Table) -> bool:
        """Say whether the rows of a table are summed into one dense tensor."""
        if self.choice == DENSE:
            return True
        return table.adds_up and self.rows_of(table) > table.rows

    def rows_of(self, table: Table) -> int:
        """Return how many rows a batch looks up; zero if that is not known."""
        return (self.samples or 0) * (table.rows_per_sample or 0)

    @property
    def differing(self) -> list[Table]:
        """The tables that are summed, although that makes another update where rows repeat."""
        return [
            one
            for one in self.tables.values()
            if self.is_summed(one) and one.has_repeats and not one.adds_up
        ]

    @property
    def larger_than_sums(self) -> list[Table]:
        """The tables whose rows take more memory until the update than a dense sum would."""
        index = 8  # bytes
        return [
            one
            for one in self.tables.values()
            if not self.is_summed(one)
            and self.rows_of(one) * (one.row_bytes + index) > one.rows * one.row_bytes
        ]
