"""The memory of devices: what they have, and what something takes at most."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from typing import Any, Callable, Iterable

import numpy as np
import tensorflow as tf

from bigbatch.backends.tensorflow.compat import memory_limits
from bigbatch.backends.tensorflow.data import bytes_of
from bigbatch.core.process_memory import (
    available_bytes,
    measurable_bytes,
    resident_bytes,
    resident_peak_of,
)

_MOST_OF_A_CPU = 2**36
"""The bytes that TensorFlow's allocator for GPUs takes on a CPU, if it is not told."""


class Memory:
    """The memory of some devices of this process.

    GPUs, and a CPU with TensorFlow's own allocator (`TF_CPU_ALLOCATOR_USE_BFC=true`), count
    every byte. For any other CPU it is what the system says of the process, where it does.

    Args:
        devices: the names of the devices, as variables have them.
    """

    OUT_OF_MEMORY = tf.errors.ResourceExhaustedError
    """The error of something that does not fit."""
    TO_COUNT = (
        "set TF_CPU_ALLOCATOR_USE_BFC=true before TensorFlow is imported to count every byte"
    )
    """What to do if a device does not say what is in use."""

    def __init__(self, devices: Iterable[str]) -> None:
        specs = [tf.DeviceSpec.from_string(device) for device in devices]
        names = {f"{spec.device_type}:{spec.device_index}" for spec in specs}
        # Next to a GPU only small things are on the CPU. Logical CPUs share one allocator.
        others = sorted(name for name in names if not name.startswith("CPU"))
        self._devices = others or ["CPU:0"]
        self.is_hard = True
        """Whether what does not fit ends with an error, not with the process."""
        try:
            self._current(self._devices[0])
        except ValueError:
            self.is_hard = False
        if self.is_hard and self._devices == ["CPU:0"]:
            self.is_hard = _counts_small_tensors()
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
        for device in self._devices:
            tf.config.experimental.reset_memory_stats(device)

    def peak(self) -> int:
        """Return the most bytes that were in use on a device; needs `is_hard`."""
        info = tf.config.experimental.get_memory_info
        return max(info(device)["peak"] for device in self._devices)

    def in_use(self) -> int:
        """Return the bytes in use on the device that has the most. `limit` must be known."""
        if not self.is_hard:
            return resident_bytes()
        return max(map(self._current, self._devices))

    def most_on_a_device(self, variables: Iterable[Any]) -> int:
        """Return the bytes of variables on the device that has the most of them."""
        by_device: dict[str, int] = {}
        for variable in variables:
            # Logical CPUs share one memory.
            spec = tf.DeviceSpec.from_string(variable.device)
            device = "CPU" if spec.device_type == "CPU" else variable.device
            by_device[device] = by_device.get(device, 0) + bytes_of(variable)
        return max(by_device.values())

    def in_one_piece(self) -> None:
        """Let the allocator of a CPU have its memory in one piece, as that of a GPU does.

        It gets it in pieces of twice the size each, and rounds up to a piece: then a peak says
        more of what ran before than of what runs. Nothing is written to what it gets.
        """
        if self.is_hard and self._devices == ["CPU:0"] and self.limit is not None:
            megabytes = max(0, self.limit - self.in_use()) // 2**20
            with contextlib.suppress(tf.errors.ResourceExhaustedError):
                tf.raw_ops.Empty(shape=[int(0.9 * megabytes), 2**20], dtype=tf.uint8)

    def missing(self, message: str) -> int | None:
        """Return about how many bytes were missing, from what a failed allocation says.

        What was asked for and is not there, next to the most that was in use.
        """
        wanted = _wanted(message)
        if wanted is None or self.limit is None or not self.is_hard:
            return None
        return max(1, min(wanted, self.peak() + wanted - self.limit))

    def _current(self, device: str) -> int:
        return tf.config.experimental.get_memory_info(device)["current"]

    def _limit(self) -> int | None:
        if not self.is_hard:
            return measurable_bytes()
        if self._devices == ["CPU:0"]:
            megabytes = os.environ.get("TF_CPU_BFC_MEM_LIMIT_IN_MB")
            if megabytes:
                return int(megabytes) * 2**20
            available = available_bytes()
            return None if available is None else min(available, _MOST_OF_A_CPU)
        limits = memory_limits()
        return min((limits[name] for name in self._devices if name in limits), default=None)


@functools.lru_cache(None)
def _counts_small_tensors() -> bool:
    """Say whether the CPU's allocator counts every byte.

    oneDNN's, which most builds have, counts tensors from 256 KiB on and has no limit. It is
    tried three times, because other threads allocate, too.
    """
    info, found = tf.config.experimental.get_memory_info, []
    for _ in range(3):
        with tf.init_scope(), tf.device("CPU:0"):
            before = info("CPU:0")["current"]
            small = tf.raw_ops.Empty(shape=[1000], dtype=tf.uint8)
            found.append(info("CPU:0")["current"] > before)
            del small
    return sum(found) > 1


def _wanted(message: str) -> int | None:
    """Return the bytes of the tensor that could not be allocated, if the message says."""
    match = re.search(r"tensor with shape\[([\d,]*)\] and type (\w+)", message)
    if match is None:
        match = re.search(r"allocate (\d+) bytes", message)
        return int(match.group(1)) if match else None
    shape = [int(length) for length in match.group(1).split(",") if length]
    return tf.as_dtype(match.group(2)).size * int(np.prod(shape, dtype=np.int64))
