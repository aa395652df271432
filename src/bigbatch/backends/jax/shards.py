"""Several devices that share each micro-batch: one sum per device, reduced once per update.

Under `keras.distribution.DataParallel` the compiler would reduce the gradients of every
micro-batch. Here `shard_map` lets each device run its own rows and add to its own sums, which
have a leading dimension of one entry per device. One all-reduce per update adds them up.
"""

from __future__ import annotations

from typing import Any, Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from bigbatch.backends.jax import data as batches
from bigbatch.backends.jax.devices import Shards
from bigbatch.backends.jax.memory import noticing
from bigbatch.backends.jax.ops import widened


class ShardedSums:
    """What each device has added up of a batch.

    Args:
        shards: the devices.
        pure: `Accumulation.pure`: runs a micro-batch, and returns what is added up.
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
        self._before: list[Any] = []
        self.step: Any = jax.jit(self._add_on_shards, donate_argnums=0)
        """Adds a micro-batch to the sums."""
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
        """Return sums of nothing, and metrics that nothing has been added to."""
        count = self.shards.count
        sums = [jnp.zeros((count, *one.shape), widened(one.dtype)) for one in self._shapes]
        return sums, [jnp.zeros((count, *one.shape), one.dtype) for one in metrics]

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

    def add(
        self, fixed: Any, changing: list[Any], context: Any, start: Any, part: Any
    ) -> list[Any]:
        """Run a micro-batch; return the new values of variables that are the same for all."""
        metrics, same = self.apart(changing)
        if self.held is None:
            self._before, self.held = metrics, self._begin(metrics)
        held, self.held = self.held, None  # overwritten
        with noticing():
            self.held, same = self.step(
                held, fixed, same, context, start, self.shards.placed(part)
            )
        return same

    def reduce(self, select: Callable[[Any], Any], *, is_whole: bool) -> tuple[Any, list[Any]]:
        """Return what `select` leaves of the sums, over devices, and the values of metrics.

        And over processes, if the batch `is_whole`.
        """
        sums, added = self.held
        values = select(sums), added
        with noticing():
            add_up = self.shards.sum if is_whole else self.shards.sum_here
            sums, added = add_up(values)
            return sums, [one + other for one, other in zip(self._before, added)]
