"""The memory of this process, as far as the system tells."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path
from typing import Any, Callable

_STATUS = Path("/proc/self/status")
_PEAK = Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory; needs `available_bytes`."""
    return _kilobytes(_STATUS, "VmRSS")


def resident_peak_of(function: Callable[[], Any]) -> int:
    """Call a function; return the most bytes that were in memory. Needs `available_bytes`."""
    _PEAK.write_text("5")  # start the peak from here
    function()
    return _kilobytes(_STATUS, "VmHWM")


def available_bytes() -> int | None:
    """Return what this process has and may still have of the system's memory, if it says."""
    with contextlib.suppress(OSError):
        resident = resident_bytes()
        available = _kilobytes(Path("/proc/meminfo"), "MemAvailable") + resident
        limit = _address_space()
        if limit is None:
            return available
        return min(available, limit - _kilobytes(_STATUS, "VmSize") + resident)
    return None


def measurable_bytes() -> int | None:
    """Return `available_bytes`, if peaks can be measured, too."""
    return available_bytes() if os.access(str(_PEAK), os.W_OK) else None


def _address_space() -> int | None:
    """Return how much the process may map, if that is limited."""
    if sys.platform == "win32":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def _kilobytes(path: Path, name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", path.read_text(), re.MULTILINE)
    if match is None:
        raise OSError(f"{path} does not say {name}")
    return int(match.group(1)) * 1024
