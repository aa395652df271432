"""Several devices that share each micro-batch: one sum per device, reduced once per update.

Under `keras.distribution.DataParallel` the compiler would reduce the gradients of every
micro-batch. Here `shard_map` lets each device run its own rows and add to its own sums, which
have a leading dimension of one entry per device. One all-reduce per update adds them up.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator

import jax
import jax.numpy as jnp
import keras
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bigbatch.backends.jax import data as batches
from bigbatch.backends.jax.memory import noticing
from bigbatch.backends.jax.ops import widened


class Shards:
    """The devices of a `DataParallel` distribution.

    Args:
        mesh: the devices, in one dimension.
        axis: the name of that dimension.
    """

    def __init__(self, mesh: Any, axis: str) -> None:
        self.mesh, self.axis = mesh, axis
        self.count = int(mesh.shape[axis])
        """How many devices there are."""
        self.each = NamedSharding(mesh, P(axis))
        """A leading dimension is spread over the devices."""

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

    def mapped(self, function: Callable[..., Any], inputs: Any, outputs: Any) -> Any:
        """Return a function that every device calls with its part of the inputs."""
        options = {"in_specs": inputs, "out_specs": outputs, "check_vma": False}
        return jax.shard_map(function, mesh=self.mesh, **options)


def current_shards() -> Shards | None:
    """Return the devices that share batches now; `None` if there is one, or other layouts."""
    distribution = keras.distribution.distribution()
    if not isinstance(distribution, keras.distribution.DataParallel):
        return None
    mesh: Any = distribution.device_mesh.backend_mesh
    is_shared = len(mesh.shape) == 1 and mesh.size > 1 and jax.process_count() == 1
    return Shards(mesh, mesh.axis_names[0]) if is_shared else None


class ShardedSums:
    """What each device has added up of a batch.

    Args:
        shards: the devices.
        pure: `Accumulation._pure`: runs a micro-batch, and returns what is added up.
        shapes: the shapes of what is added up.
        is_same: for each variable that a micro-batch may change whether its value is the same
            on every device. The others are metrics to which micro-batches add.
    """

    def __init__(
        self, shards: Shards, pure: Callable[..., Any], shapes: Any, is_same: list[bool]
    ) -> None:
        self.shards, self.is_same = shards, is_same
        self._pure, self._shapes = pure, shapes
        self._begin = jax.jit(self._begun, out_shardings=shards.each)
        self.step: Any = jax.jit(self._add_on_shards, donate_argnums=0)
        """Adds a micro-batch to the sums."""
        self._reduce = jax.jit(self._reduced)
        self.held: Any = None
        """The sums of a batch that has begun, and the values of metrics."""

    def lowered(self, fixed: Any, changing: Any, context: Any, start: Any, data: Any) -> Any:
        """Return the program of a micro-batch of such types, not yet compiled."""
        metrics, same = self.apart(changing)
        held = jax.tree.map(
            lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=self.shards.each),
            jax.eval_shape(self._begun, metrics),
        )
        count = self.shards.count
        rows = count * max(batches.sample_count(data) // count, 1)

        def shared(leaf: Any) -> Any:
            shape = rows, *leaf.shape[1:]
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=self.shards.each)

        return self.step.lower(held, fixed, same, context, start, jax.tree.map(shared, data))

    def apart(self, values: list[Any]) -> tuple[list[Any], list[Any]]:
        """Return the values of variables: those of metrics, and those that are the same."""
        metrics = [one for one, same in zip(values, self.is_same) if not same]
        return metrics, [one for one, same in zip(values, self.is_same) if same]

    def _together(self, metrics: list[Any], same: list[Any]) -> list[Any]:
        of_metrics, others = iter(metrics), iter(same)
        return [next(others if is_same else of_metrics) for is_same in self.is_same]

    def _begun(self, metrics: list[Any]) -> Any:
        """Return sums of nothing; metrics as they are on the first device, zero on others."""
        count = self.shards.count
        sums = [jnp.zeros((count, *one.shape), widened(one.dtype)) for one in self._shapes]
        first = [jnp.zeros((count, *one.shape), one.dtype).at[0].set(one) for one in metrics]
        return sums, first

    def _add_on_shards(
        self, held: Any, fixed: Any, same: Any, context: Any, start: Any, data: Any
    ) -> Any:
        shards = self.shards
        is_split = shards.divides(data)

        def add(held: Any, fixed: Any, same: Any, context: Any, start: Any, data: Any) -> Any:
            sums, metrics = jax.tree.map(lambda one: one[0], held)
            device = jax.lax.axis_index(shards.axis).astype(jnp.uint32)
            if is_split:  # the draws of a row are those of its place in the batch
                start = start + device * jnp.uint32(batches.sample_count(data))
            changing = self._together(metrics, same)
            result, _, changing, *_ = self._pure(fixed, changing, context, start, data)
            new, same = self.apart(changing)
            added = [one + other.astype(one.dtype) for one, other in zip(sums, result)]
            if not is_split:  # every device has run all rows, and the first one counts them
                first = device == 0
                added = [jnp.where(first, one, old) for one, old in zip(added, sums)]
                new = [jnp.where(first, one, old) for one, old in zip(new, metrics)]
            return jax.tree.map(lambda one: one[None], (added, new)), same

        each, whole = P(shards.axis), P()
        inputs = each, whole, whole, whole, whole, each if is_split else whole
        arguments = held, fixed, same, context, start, data
        return shards.mapped(add, inputs, (each, whole))(*arguments)

    def _reduced(self, values: Any) -> Any:
        shards = self.shards

        def reduce(values: Any) -> Any:
            summed = jax.lax.psum(values, shards.axis)
            return jax.tree.map(lambda one: one[0], summed)

        return shards.mapped(reduce, P(shards.axis), P())(values)

    def add(
        self, fixed: Any, changing: list[Any], context: Any, start: Any, part: Any
    ) -> list[Any]:
        """Run a micro-batch; return the new values of variables that are the same for all."""
        metrics, same = self.apart(changing)
        held = self._begin(metrics) if self.held is None else self.held
        self.held = None  # overwritten
        with noticing():
            self.held, same = self.step(
                held, fixed, same, context, start, self.shards.placed(part)
            )
        return same

    def reduce(self, values: Any) -> Any:
        """Return what devices have added up of something, added up over the devices."""
        with noticing():
            return self._reduce(values)
