"""The devices of this process that share each micro-batch; the processes that share batches.

A process runs programs on its own devices alone, with its own part of a batch. Processes meet
in one all-reduce per update.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any, Callable, Iterator

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bigbatch.backends.jax import data as batches

_local = threading.local()


class Shards:
    """The devices of a `DataParallel` distribution that are those of this process.

    Args:
        mesh: the devices of all processes, in one dimension.
        axis: the name of that dimension.
    """

    def __init__(self, mesh: Any, axis: str) -> None:
        devices = list(mesh.devices.flat)
        numbers = list(dict.fromkeys(one.process_index for one in devices))
        own = [one for one in devices if one.process_index == jax.process_index()]
        self.mesh, self.axis = Mesh(np.array(own), (axis,)), axis
        self.count = len(own)
        """How many devices there are."""
        self.each = NamedSharding(self.mesh, P(axis))
        """A leading dimension is spread over the devices."""
        self.processes = len(numbers)
        """How many processes share a batch."""
        self.process = numbers.index(jax.process_index())
        """How many parts of a batch, one for each process, come before that of this one."""
        self._whole = NamedSharding(self.mesh, P())
        self._of_all = NamedSharding(mesh, P(axis))
        self._whole_of_all = NamedSharding(mesh, P())
        self._sum = jax.jit(self._reduced_of_all)
        self._sum_here = jax.jit(self._reduced)

    def cuts(self, count: int, size: int) -> Iterator[tuple[int, int]]:
        """Return where micro-batches begin, and their samples: at most about `size`.

        They divide by the devices, but for the last samples of a batch that does not.
        """
        left = count % self.count
        size = max(size // self.count, 1) * self.count
        for start in range(0, count - left, size):
            yield start, min(size, count - left - start)
        if left:
            yield count - left, left

    def divides(self, part: Any) -> bool:
        """Say whether every device gets as many rows of a micro-batch."""
        return batches.sample_count(part) % self.count == 0

    def placed(self, part: Any) -> Any:
        """Return a micro-batch whose rows are spread over the devices, if they divide."""
        if not self.divides(part):
            return part
        return jax.tree.map(lambda leaf: jax.device_put(leaf, self.each), part)

    def mapped(
        self, function: Callable[..., Any], inputs: Any, outputs: Any, mesh: Any = None
    ) -> Any:
        """Return a function that every device calls with its part of the inputs."""
        options = {"in_specs": inputs, "out_specs": outputs, "check_vma": False}
        return jax.shard_map(function, mesh=mesh or self.mesh, **options)

    def sum(self, values: Any) -> Any:
        """Return arrays with one entry per device, added up over devices and processes."""
        if self.processes == 1:
            return self.sum_here(values)
        return self.here(self._sum(jax.tree.map(self._with_others, values)))

    def sum_here(self, values: Any) -> Any:
        """Return arrays with one entry per device, added up over those of this process."""
        return self._sum_here(values)

    def sum_of_processes(self, values: Any) -> Any:
        """Return the sum of arrays that each process has one of."""
        return values if self.processes == 1 else self.sum(self.spread(values))

    def spread(self, values: Any) -> Any:
        """Return arrays with one entry per device: the values on the first, zero on others."""

        def on_first(one: Any) -> Any:
            return jnp.zeros((self.count, *one.shape), one.dtype).at[0].set(one)

        spread = jax.jit(lambda some: jax.tree.map(on_first, some), out_shardings=self.each)
        return spread(values)

    def _reduced_of_all(self, values: Any) -> Any:
        return self._psum(values, self._of_all.mesh)

    def _reduced(self, values: Any) -> Any:
        return self._psum(values, self.mesh)

    def _psum(self, values: Any, mesh: Any) -> Any:
        def reduce(values: Any) -> Any:
            summed = jax.lax.psum(values, self.axis)
            return jax.tree.map(lambda one: one[0], summed)

        return self.mapped(reduce, P(self.axis), P(), mesh)(values)

    def _with_others(self, leaf: Any) -> Any:
        """Return an array with one entry per device as a part of one of all processes."""
        shape = self._of_all.mesh.size, *leaf.shape[1:]
        return jax.make_array_from_single_device_arrays(shape, self._of_all, _parts(leaf))

    def here(self, values: Any) -> Any:
        """Return arrays that all devices have as arrays of the devices of this process.

        The memory is the same.
        """

        def own(leaf: Any) -> Any:
            if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
                return leaf
            # Of what `device_put` returns JAX 0.10 does not give the only part by itself.
            arrays = _parts(leaf) if self.count > 1 else [leaf.addressable_data(0)]
            return jax.make_array_from_single_device_arrays(leaf.shape, self._whole, arrays)

        return jax.tree.map(own, values)

    def everywhere(self, values: Any) -> Any:
        """Return arrays that all processes have as arrays of all devices: undo `here`."""
        if self.processes == 1:
            return values

        def whole(leaf: Any) -> Any:
            arrays = _parts(jax.device_put(leaf, self._whole))
            to = self._whole_of_all
            return jax.make_array_from_single_device_arrays(leaf.shape, to, arrays)

        return jax.tree.map(whole, values)


def _parts(leaf: Any) -> list[Any]:
    return [one.data for one in leaf.addressable_shards]


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Return a block in which a process shares nothing: not with devices, nor with others."""
    before = getattr(_local, "is_alone", False)
    _local.is_alone = True
    try:
        yield
    finally:
        _local.is_alone = before


def current_shards() -> Shards | None:
    """Return the devices that share batches now; `None` if there is one, or other layouts."""
    return None if getattr(_local, "is_alone", False) else shards_of_all()


def shards_of_all() -> Shards | None:
    """Return what `current_shards` does outside of `alone`."""
    distribution = keras.distribution.distribution()
    if not isinstance(distribution, keras.distribution.DataParallel):
        return None
    mesh: Any = distribution.device_mesh.backend_mesh
    is_shared = len(mesh.shape) == 1 and mesh.size > 1
    return _shards(mesh) if is_shared else None


@functools.lru_cache(maxsize=8)
def _shards(mesh: Any) -> Shards:
    return Shards(mesh, mesh.axis_names[0])
