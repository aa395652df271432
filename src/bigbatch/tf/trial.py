"""How large a micro-batch may be: found by trying."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Callable

import tensorflow as tf

from bigbatch.core.memory import SizeSearch, readable
from bigbatch.errors import ContextError, explain
from bigbatch.tf.memory import Memory


@dataclass(frozen=True)
class Found:
    """The largest micro-batch size that fits, and what it takes."""

    size: int
    """Samples per micro-batch and replica."""
    peak: int
    """The most bytes in use on a device."""
    limit: int | None
    """The bytes there are; `None` if that is not known, and nothing was tried."""


def largest_that_fits(
    memory: Memory,
    batch: int,
    run: Callable[[int], Any],
    put_back: Callable[[], None],
    *,
    until_it_fails: bool = True,
    agreed: Callable[[int], int] = int,
) -> Found:
    """Run something with micro-batches of several sizes, and undo it, to find what fits.

    Raises if not even one sample does.

    Args:
        memory: that of the devices it runs on.
        batch: the largest size there can be.
        run: called with a size; runs two micro-batches of it, so that what is added up is
            there too.
        put_back: undoes what `run` has changed.
        until_it_fails: whether to try what may not fit. An allocator waits for seconds before
            it gives up.
        agreed: returns the largest of what all workers call it with, if there are several.
            They have to try the same, and fail together.
    """
    is_unknown, is_soft = agreed(memory.limit is None), agreed(not memory.is_hard)
    batch = agreed(batch)
    if is_unknown:
        return Found(batch, 0, None)
    limit = -agreed(-(memory.limit or 0))  # the smallest
    search = SizeSearch(batch, limit, is_hard=until_it_fails and not is_soft)
    while search.next_size():
        size = search.next_size()
        peak = peak_of(memory, size, run, put_back)
        search.add(size, agreed(peak) if peak is not None else None)
    return Found(search.chosen, search.curve.peak(search.chosen), limit)


def peak_of(
    memory: Memory, size: int, run: Callable[[int], Any], put_back: Callable[[], None]
) -> int | None:
    """Return the peak memory of a trial, or `None` if it runs out of memory.

    Raises if it does with one sample.
    """
    try:
        if size == 1:
            memory.peak_of(lambda: run(size))  # what is made only once does not count
            put_back()
        return memory.peak_of(lambda: run(size))
    except tf.errors.ResourceExhaustedError as error:
        if size == 1:
            raise ContextError(not_even_one(memory, error)) from error
        return None
    finally:
        put_back()


def not_even_one(memory: Memory, error: tf.errors.ResourceExhaustedError) -> str:
    """Say that one sample at a time takes more memory than there is, and how much more."""
    limit, missing = memory.limit or 0, memory.missing(error.message)
    about = f"; about {readable(missing)} are missing" if missing else ""
    return explain(
        received=f"a device with {readable(limit)}, which runs out of memory with one sample "
        f"at a time{about}",
        expected="memory for the weights, the optimizer, one set of gradients, and one sample",
        fix="use a smaller model, mixed precision, an optimizer with fewer slots, shorter "
        "sequences, or a device with more memory",
    )


def warn_of_smaller_size(size: int, smaller: int) -> None:
    """Say that micro-batches are smaller from now on, and that nothing else is."""
    warnings.warn(
        f"bigbatch: out of memory with micro-batches of {size} samples. The batch was rolled "
        f"back and is run again with {smaller}; batches and updates stay what they are.",
        stacklevel=3,
    )
