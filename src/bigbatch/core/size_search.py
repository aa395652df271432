"""How large a micro-batch may be: found by trying.

A `memory` is that of a device: see `bigbatch.backends.tensorflow.memory.Memory`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Callable

from bigbatch.core.memory import SizeSearch, readable
from bigbatch.errors import ArgumentError, ContextError, explain

AUTO = "auto"
"""The micro-batch size that stands for the largest that fits the device."""

_CHOICES = "_bigbatch_choices"


@dataclass(frozen=True)
class ChosenSize:
    """The largest micro-batch size that fits, and what it takes."""

    size: int
    """Samples per micro-batch and replica."""
    peak: int
    """The most bytes in use on a device."""
    limit: int | None
    """The bytes there are; `None` if that is not known, and nothing was tried."""


def largest_that_fits(
    memory: Any,
    batch: int,
    run: Callable[[int], Any],
    put_back: Callable[[], None],
    *,
    until_it_fails: bool = True,
    agreed: Callable[[int], int] = int,
) -> ChosenSize:
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
        return ChosenSize(batch, 0, None)
    limit = -agreed(-(memory.limit or 0))  # the smallest
    search = SizeSearch(batch, limit, is_hard=until_it_fails and not is_soft)
    while search.next_size():
        size = search.next_size()
        peak = peak_of(memory, size, run, put_back)
        search.add(size, agreed(peak) if peak is not None else None)
    return ChosenSize(search.chosen, search.curve.peak(search.chosen), limit)


def peak_of(
    memory: Any, size: int, run: Callable[[int], Any], put_back: Callable[[], None]
) -> int | None:
    """Return the peak memory of a trial, or `None` if it runs out of memory.

    Raises if it does with one sample.
    """
    try:
        if size == 1:
            memory.peak_of(lambda: run(size))  # what is made only once does not count
            put_back()
        return memory.peak_of(lambda: run(size))
    except memory.OUT_OF_MEMORY as error:
        if size == 1:
            raise ContextError(not_even_one(memory, str(error))) from error
        return None
    finally:
        put_back()


def with_smaller_ones(
    run: Callable[[int], Any],
    size: int,
    *,
    out_of_memory: type[Exception],
    memory: Callable[[], Any],
    put_back: Callable[[], None] = lambda: None,
    largest: Callable[[], int] = lambda: 2**62,
) -> tuple[Any, int]:
    """Run something with micro-batches of `size`, or of half as many while that is too much.

    Args:
        run: called with a size; returns the result.
        size: the size to begin with.
        out_of_memory: the error that says that a size is too much.
        memory: returns that of the devices it runs on.
        put_back: undoes what a `run` has changed that ran out of memory.
        largest: returns how large a micro-batch can be at all, on all workers.

    Returns:
        The result, and the size it was had with.
    """
    while True:
        try:
            return run(size), size
        except out_of_memory as error:
            put_back()
            size = min(size, largest())
            if size == 1:
                raise ContextError(not_even_one(memory(), str(error))) from error
        # Outside the handler, whose traceback keeps tensors alive.
        warnings.warn(
            f"bigbatch: out of memory with micro-batches of {size} samples. The batch was "
            f"rolled back and is run again with {size // 2}; the samples of batches and "
            "updates do not change.",
            stacklevel=3,
        )
        size = size // 2


def not_even_one(memory: Any, error: str) -> str:
    """Say that one sample at a time takes more memory than there is, and how much more."""
    limit, missing = memory.limit or 0, memory.missing(error)
    about = f"; about {readable(missing)} are missing" if missing else ""
    return explain(
        received=f"a device with {readable(limit)}, which runs out of memory with one sample "
        f"at a time{about}",
        expected="memory for the weights, the optimizer, one set of gradients, and one sample",
        fix="use a smaller model, mixed precision, an optimizer with fewer slots, shorter "
        "sequences, or a device with more memory",
    )


def chosen_size(owner: Any) -> int | None:
    """Return the size that was chosen for a function of the user's, the last if for several."""
    name = getattr(owner, "__name__", "")
    sizes = [one.microbatch_size for key, one in choices_of(owner).items() if key[0] == name]
    return sizes[-1] if sizes else None


def choices_of(owner: Any) -> dict[Any, Any]:
    """Return what has chosen sizes for a function of the user's, kept with that function."""
    holder = getattr(owner, "__self__", owner)
    try:
        return vars(holder).setdefault(_CHOICES, {})
    except (TypeError, AttributeError):
        raise ArgumentError(
            explain(
                received=f'microbatch_size="auto" for {owner!r}',
                expected="a function, because bigbatch stores the chosen size with it",
                fix="pass a function made with def or lambda",
            )
        ) from None
