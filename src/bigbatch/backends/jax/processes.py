"""What processes that train a model together tell each other, beside sums of gradients.

Each has a part of every batch. What is found out with a few samples is found out with the same
ones by all, so that all decide the same.
"""

from __future__ import annotations

import io
from typing import Any

import jax
import keras
import numpy as np
from jax.experimental.multihost_utils import process_allgather


def number_of_processes() -> int:
    """Return how many processes have devices of the distribution that is set."""
    distribution = keras.distribution.distribution()
    if distribution is None or jax.process_count() == 1:
        return 1
    devices = distribution.device_mesh.backend_mesh.devices
    return len({one.process_index for one in devices.flat})


def largest(value: int) -> int:
    """Return the largest of the values that processes call this with."""
    if number_of_processes() == 1:
        return value
    return int(np.max(process_allgather(np.asarray(value, np.int32))))


def gathered(nest: Any) -> list[Any]:
    """Return what each process calls this with: nests of arrays in the memory of the host."""
    if number_of_processes() == 1:
        return [nest]
    leaves, structure = jax.tree.flatten(nest)
    leaves = [np.asarray(leaf) for leaf in leaves]
    file = io.BytesIO()
    np.savez(file, *leaves)
    content = np.frombuffer(file.getvalue(), np.uint8)
    sizes = process_allgather(np.asarray(content.size, np.int32)).ravel().tolist()
    content = np.pad(content, (0, max(sizes) - content.size))
    nests = []
    for row, size in zip(process_allgather(content), sizes):
        with np.load(io.BytesIO(row[:size].tobytes())) as arrays:
            # Types that NumPy does not know, such as bfloat16, come back as bytes.
            read = [
                one if one.dtype.kind != "V" else one.view(leaf.dtype)
                for one, leaf in zip(arrays.values(), leaves)
            ]
        nests.append(jax.tree.unflatten(structure, read))
    return nests


def samples_of_all(nest: Any) -> Any:
    """Return the samples that processes call this with, as one batch in their order."""
    first, *others = gathered(nest)
    try:
        return jax.tree.map(lambda *rows: np.concatenate(rows), first, *others)
    except ValueError:  # samples of different shapes
        return first
