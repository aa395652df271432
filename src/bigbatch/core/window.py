"""When a window is full and how long the next one is: decided here, obeyed everywhere.

The arithmetic is written so that Python integers and tensors both go through it.
"""

from __future__ import annotations

from typing import Any, Callable, Union

from bigbatch.core.arguments import positive_integer

AccumulationSteps = Union[int, Callable[[int], int], None]
"""Micro-batches per update: a number, a schedule from updates made, or "until `flush`"."""

UNTIL_FLUSH = 0
"""The length of a window that only `flush` ends."""


def window_length(accumulation_steps: AccumulationSteps, updates: int) -> int:
    """Return how many micro-batches the window that follows `updates` updates holds.

    Example:
        >>> window_length(4, updates=0)
        4
        >>> window_length(lambda updates: 1 if updates < 1000 else 4, updates=1000)
        4
        >>> window_length(None, updates=7) == UNTIL_FLUSH
        True
    """
    if accumulation_steps is None:
        return UNTIL_FLUSH
    if callable(accumulation_steps):
        return positive_integer(accumulation_steps(updates), f"accumulation_steps({updates})")
    return positive_integer(accumulation_steps, "accumulation_steps")


def is_full(micro_batches: Any, length: Any) -> Any:
    """Say whether a window of `length` that holds `micro_batches` calls for an update."""
    return (length > UNTIL_FLUSH) & (micro_batches >= length)


def whole_and_rest(samples: Any, microbatch_size: int) -> tuple[Any, Any]:
    """Return how many whole micro-batches a batch has and how many samples are left over.

    Example:
        >>> whole_and_rest(70, 32)
        (2, 6)
    """
    return samples // microbatch_size, samples % microbatch_size
