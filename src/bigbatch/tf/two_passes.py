"""Two passes over the micro-batches of a batch, the second just as the first.

A loss in which the samples of a batch meet needs the outputs of the whole batch before the
gradient of any of them is known: the first pass gives outputs, the second gradients.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable

import tensorflow as tf

from bigbatch.errors import ContextError, explain
from bigbatch.tf import replicas
from bigbatch.tf.batch import Batch
from bigbatch.tf.dependence import DRAWS_ANEW, changed_in
from bigbatch.tf.microbatches import Trace, total


def rows(output: Any) -> Any:
    """Return what has one row per sample as something that `total` joins, not adds."""
    return tf.IndexedSlices(output, tf.range(tf.shape(output)[0]))


def joined_rows(slices: Any, dtype: Any, count: Any) -> Any:
    """Return what `total` made of `rows`, in its type and with the samples that are known."""
    output = tf.cast(slices.values, dtype)
    return tf.ensure_shape(
        output, [count if isinstance(count, int) else None, *output.shape[1:]]
    )


def pulled_back(tape: Any, outputs: list[Any], seeds: list[Any], variables: Any) -> Any:
    """Return the gradients of Σ⟨output, seed⟩; seeds may be `None`."""
    pairs = [(output, seed) for output, seed in zip(outputs, seeds) if seed is not None]
    if not pairs:
        return tf.nest.map_structure(lambda _: None, variables)
    outputs, seeds = ([pair[index] for pair in pairs] for index in (0, 1))
    return tape.gradient(outputs, variables, output_gradients=seeds)


class TwoPasses:
    """Two passes over the micro-batches of `batch`.

    Variables that a micro-batch changes, such as the state of random layers, have in the second
    pass the values they had in the first, and afterwards those they had before the second.

    Args:
        batch: the samples.
        microbatch_size: samples per micro-batch; the last one may be smaller.
        jit_compile: whether XLA compiles a micro-batch, in a graph.
        kept: variables that every micro-batch changes, such as metrics.
    """

    def __init__(
        self,
        batch: Batch,
        microbatch_size: Any,
        jit_compile: bool | None = None,
        kept: Iterable[Any] = (),
    ) -> None:
        self._kept = list(kept)
        self._batch = batch
        self._size = microbatch_size
        self._jit_compile = jit_compile
        self._changed: list[Any] = []
        self._before: list[Any] = []

    def first(self, forward: Callable[..., Any]) -> Any:
        """Return `forward(*micro_batch)`, joined or added up over the micro-batches."""

        def begin(graph: Any) -> None:
            if graph is None:
                function = tf.function(forward, autograph=False)
                graph = function.get_concrete_function(*self._batch.specs_of_arguments()).graph
            _check_random(graph)
            self._changed = changed_in(graph)
            self._before = [variable.read_value() for variable in self._changed]

        return self._total(forward, self._batch, begin)

    def second(
        self,
        compute: Callable[..., Any],
        seeds: list[Any],
        begin: Callable[[Any], None] = lambda _: None,
    ) -> Any:
        """Return the sum of `compute(seeds, *micro_batch)`.

        Args:
            compute: called with the rows of `seeds` that belong to a micro-batch.
            seeds: tensors with one row per sample, or `None`.
            begin: called when `compute` has been traced, before it runs.
        """
        after = [variable.read_value() for variable in self._changed]
        for variable, value in zip(self._changed, self._before):
            variable.assign(value)
        arguments = self._batch.arguments(self._batch.leaves)
        batch = Batch((list(seeds), *arguments), may_be_empty=self._batch.may_be_empty)
        sums = self._total(compute, batch, begin)
        for variable, value in zip(self._changed, after):
            variable.assign(value)
        return sums

    def _total(self, compute: Any, batch: Batch, begin: Callable[[Any], None]) -> Any:
        options: dict[str, Any] = {"jit_compile": self._jit_compile, "kept": self._kept}
        options["trace"] = Trace()
        return total(compute, batch, self._size, begin=begin, **options)


def _check_random(graph: Any) -> None:
    for op in graph.get_operations():
        if op.op_def.is_stateful and op.type.startswith(DRAWS_ANEW):
            raise ContextError(
                explain(
                    received=f"a forward pass with the random operation {op.name!r} "
                    f"({op.type}), whose numbers cannot be drawn again",
                    expected="random numbers that a second pass over the batch can repeat",
                    fix="draw them with keras.random and a keras.random.SeedGenerator, or "
                    "with a tf.random.Generator; for layers of Keras 2 call "
                    "tf.keras.backend.experimental.enable_tf_random_generator() first",
                )
            )


class Share:
    """The rows of a batch on all replicas, and those of this one.

    Args:
        count: the samples of this replica.
    """

    def __init__(self, count: Any) -> None:
        self._count = count
        self._several = replicas.inside_one_of_many()
        self.replicas = 1
        self.total = count
        """The samples of all replicas."""
        if self._several:
            context = tf.distribute.get_replica_context()
            counts = replicas.gather_from_inside(tf.reshape(count, [1]))
            place = context.replica_id_in_sync_group
            self.replicas = context.num_replicas_in_sync
            self.total = tf.reduce_sum(counts)
            self._start = tf.reduce_sum(counts[:place])
            self.is_first = tf.equal(place, 0)

    def whole(self, nest: Any) -> Any:
        """Return tensors with one row per sample, as they are for the batch of all replicas."""
        if not self._several:
            return nest
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else replicas.gather_from_inside(leaf), nest
        )

    def own(self, tensor: Any) -> Any:
        """Return this replica's rows of what `whole` gave."""
        if not self._several or tensor is None:
            return tensor
        return tensor[self._start : self._start + self._count]
