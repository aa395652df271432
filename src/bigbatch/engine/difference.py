"""What is seen of micro-batches that differ from the full batch, and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bigbatch.core.outcome import of_parts, relative_norm

LOSS = "the loss"
_SHOWN = 3
"""How many causes a warning names."""


@dataclass(frozen=True)
class Cause:
    """One thing that makes updates differ."""

    where: str
    """The layer, loss, variable or logged value, by name."""
    what: str
    """What it does, in words."""
    size: float | None
    """The relative difference, if it is known."""
    fix: str
    subject: str = ""
    """`LOSS`, or the logged value it is about: users may have been told about it."""

    def __str__(self) -> str:
        size = "" if self.size is None else f" (difference {self.size:.0e})"
        return f"{self.where}: {self.what}{size}. Fix: {self.fix}."


def text_of(causes: list[Cause]) -> str:
    """Return the text of a warning."""
    lines = "\n".join(f"- {cause}" for cause in causes[:_SHOWN])
    is_tried = any(cause.size is not None for cause in causes)
    tried = " Samples of the first batch, cut into micro-batches, gave other results than in"
    how = f".{tried} one part:" if is_tried else ":"
    return f"training will differ from the full batch{how}\n{lines}"


class Call(NamedTuple):
    """One call of a layer, with arrays."""

    layer: Any
    inputs: list[Any]
    outputs: list[Any]
    losses: list[Any]


class Part(NamedTuple):
    """One micro-batch that Python has run: its share of the samples, and what was seen."""

    share: float
    calls: list[Call]
    gradients: list[Any]


def differ(values: list[list[Any]], shares: list[float]) -> float:
    """Return how much values of the whole differ from those of its parts put together."""
    largest = 0.0
    for whole, *parts in zip(*values):
        if whole is None or np.asarray(whole).dtype.kind != "f":
            continue
        largest = max(largest, relative_norm(whole, of_parts(whole, parts, shares)))
    return largest
