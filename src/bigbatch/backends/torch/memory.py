"""The memory of devices: what they have, and what something takes at most."""

from __future__ import annotations

import contextlib
import re
from typing import Any, Callable, Iterable, Iterator

import torch

from bigbatch.backends.torch.data import bytes_of
from bigbatch.core.process_memory import measurable_bytes, resident_bytes, resident_peak_of

OUT_OF_MEMORY: type[Exception] = torch.OutOfMemoryError
"""The error of something that does not fit."""

_MESSAGES = re.compile(
    "can't allocate memory|not enough memory|out of memory|could not create a primitive",
    re.IGNORECASE,
)
"""What allocators and oneDNN say that have no error of their own, also if Keras repeats it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error is one of memory, whatever its type is."""
    if isinstance(error, (OUT_OF_MEMORY, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and bool(_MESSAGES.search(str(error)))


@contextlib.contextmanager
def naming_out_of_memory() -> Iterator[None]:
    """Return a block in which every error of memory is an `OUT_OF_MEMORY`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OUT_OF_MEMORY) or not is_out_of_memory(error):
            raise
        message = str(error) or type(error).__name__
        # Without the cause, whose traceback keeps tensors alive.
        raise OUT_OF_MEMORY(message) from None


class Memory:
    """The memory of some devices of this process.

    CUDA counts every byte. For a CPU it is what the system says of the process, where it does.

    Args:
        devices: the devices that tensors are on.
    """

    OUT_OF_MEMORY = OUT_OF_MEMORY
    TO_COUNT = "use a CUDA device to count every byte"
    """What to do if a device does not say what is in use."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._gpus = sorted({d.index or 0 for d in devices if d.type == "cuda"})
        self.is_hard = bool(self._gpus)
        """Whether every byte is counted."""
        self.limit = self._limit()
        """The bytes there are on each device, or `None` if that is not known."""

    def peak_of(self, function: Callable[[], Any]) -> int:
        """Call a function; return the most bytes in use on a device. `limit` must be known."""
        if not self.is_hard:
            return resident_peak_of(function)
        self.reset_peak()
        function()
        return self.peak()

    def reset_peak(self) -> None:
        """Start `peak` from what is in use now; needs `is_hard`."""
        for gpu in self._gpus:
            torch.cuda.reset_peak_memory_stats(gpu)

    def peak(self) -> int:
        """Return the most bytes that were in use on a device; needs `is_hard`."""
        return max(map(torch.cuda.max_memory_allocated, self._gpus))

    def in_use(self) -> int:
        """Return the bytes in use on the device that has the most. `limit` must be known."""
        if not self.is_hard:
            return resident_bytes()
        return max(map(torch.cuda.memory_allocated, self._gpus))

    def most_on_a_device(self, variables: Iterable[Any]) -> int:
        """Return the bytes of variables on the device that has the most of them."""
        by_device: dict[str, int] = {}
        for variable in variables:
            name = str(variable.device)
            by_device[name] = by_device.get(name, 0) + bytes_of(variable)
        return max(by_device.values())

    def in_one_piece(self) -> None:
        """Do nothing: peaks do not depend on the pieces of the allocator."""

    def missing(self, message: str) -> int | None:
        """Return about how many bytes were missing, from what a failed allocation says."""
        match = re.search(r"allocate (\d+) bytes", message)
        return int(match.group(1)) if match else None

    def _limit(self) -> int | None:
        if not self.is_hard:
            return measurable_bytes()
        return min(
            free + torch.cuda.memory_allocated(gpu)
            for gpu in self._gpus
            for free, _ in [torch.cuda.mem_get_info(gpu)]
        )
