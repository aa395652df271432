"""The memory of the devices that JAX runs on, and how it says that there is none left."""

from __future__ import annotations

import contextlib
import re
import threading
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator

import jax
import numpy as np

_SAYS_SO = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory")
_STATUS = Path("/proc/self/status")
_local = threading.local()


class OutOfMemoryError(RuntimeError):
    """A device has no memory left: what `jax.errors.JaxRuntimeError` says in its message."""


@contextlib.contextmanager
def noticing() -> Iterator[None]:
    """Return a block in which a lack of memory raises `OutOfMemoryError`."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or any(one in str(error) for one in _SAYS_SO):
            raise OutOfMemoryError(str(error)) from error
        raise


def note_bytes_of(compiled: Any, overwritten: int) -> None:
    """Note what a compiled program takes beside its arguments that are there already.

    `overwritten` are the bytes of arguments that are not there yet: it is given them.
    """
    analysis = compiled.memory_analysis()
    made = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    noted = analysis.temp_size_in_bytes + max(made, 0) + overwritten
    _local.noted = max(getattr(_local, "noted", 0), noted)


class Memory:
    """The memory of the device that holds a model.

    What a micro-batch takes is asked of the compiler, which knows it without running anything.
    """

    OUT_OF_MEMORY = OutOfMemoryError
    TO_COUNT = "use a GPU, whose allocator reports its memory"
    """What to do if a device does not say what is in use."""
    HOW = "memory is the compiler's figure for the program of a micro-batch, which was not run"
    """Where peaks come from."""
    is_hard = False
    """Whether peaks can be measured: JAX has none that can be started anew."""

    def __init__(self, variables: Iterable[Any]) -> None:
        self._variables = list(variables)
        self._device = jax.local_devices()[0]
        self.limit = self._limit()
        """The bytes there are, or `None` if that is not known."""

    def _stats(self) -> dict[str, int] | None:
        return self._device.memory_stats()

    def _limit(self) -> int | None:
        stats = self._stats()
        if stats:
            return stats.get("bytes_limit")
        free = _free_on_host()
        return None if free is None else self.in_use() + free

    def in_use(self) -> int:
        """Return the bytes in use on the device, on a CPU those of arrays."""
        stats = self._stats()
        if stats:
            return stats.get("bytes_in_use", 0)
        return sum(one.nbytes for one in jax.live_arrays())

    def peak_of(self, function: Callable[[], Any]) -> int:
        """Call a function that notes what programs take; return the bytes in use with them."""
        _local.noted = 0
        function()
        return self.in_use() + _local.noted

    def most_on_a_device(self, variables: Iterable[Any]) -> int:
        """Return the bytes of variables."""
        return sum(
            np.dtype(one.dtype).itemsize * int(np.prod(one.shape, dtype=np.int64))
            for one in variables
        )

    def in_one_piece(self) -> None:
        """Do nothing: what the compiler says does not depend on an allocator."""

    def missing(self, message: str) -> int | None:
        """Return about how many bytes were missing, from what a failed allocation says."""
        match = re.search(r"allocat\w+ (\d+) bytes", message)
        return int(match.group(1)) if match else None


def _free_on_host() -> int | None:
    """Return what this process may still have of the system's memory."""
    found = [_kilobytes(Path("/proc/meminfo"), "MemAvailable")]
    with contextlib.suppress(ImportError):
        import resource

        most, _ = resource.getrlimit(resource.RLIMIT_AS)
        has = _kilobytes(_STATUS, "VmSize")
        if most != resource.RLIM_INFINITY and has is not None:
            found.append(max(0, most - has))
    return min((one for one in found if one is not None), default=None)


def _kilobytes(path: Path, name: str) -> int | None:
    with contextlib.suppress(OSError):
        match = re.search(rf"^{name}:\s+(\d+) kB", path.read_text(), re.MULTILINE)
        return int(match.group(1)) * 1024 if match else None
    return None
