"""Two passes over the micro-batches of a batch, the second just as the first.

A loss that compares the samples of a batch needs the outputs of the whole batch before the
gradient of any of them is known: the first pass gives outputs, the second gradients.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable, NamedTuple

import tensorflow as tf

from bigbatch.backends.tensorflow import replicas
from bigbatch.backends.tensorflow.batch import Batch, sample_count
from bigbatch.backends.tensorflow.dependence import DRAWS_ANEW, changed_in
from bigbatch.backends.tensorflow.microbatches import total
from bigbatch.backends.tensorflow.ops import rows, rows_together
from bigbatch.backends.tensorflow.tracing import EagerTrace
from bigbatch.backends.tensorflow.values import WEIGHT_DTYPE, added, as_gradient_of, times
from bigbatch.errors import ContextError, explain


def _joined_rows(slices: Any, dtype: Any, count: Any) -> Any:
    """Return what `total` made of `rows`, in its type and with the samples that are known."""
    output = rows_together(slices, dtype)
    return tf.ensure_shape(
        output, [count if isinstance(count, int) else None, *output.shape[1:]]
    )


def _pulled_back(tape: Any, outputs: list[Any], seeds: list[Any], variables: Any) -> Any:
    """Return the gradients of Σ⟨output, seed⟩; seeds may be `None`."""
    pairs = [(output, seed) for output, seed in zip(outputs, seeds) if seed is not None]
    if not pairs:
        return tf.nest.map_structure(lambda _: None, variables)
    outputs, seeds = ([pair[index] for pair in pairs] for index in (0, 1))
    return tape.gradient(outputs, variables, output_gradients=seeds)


class LossOfBatch(NamedTuple):
    """The loss of a whole batch, and its gradients as far as it is a function of outputs."""

    result: Any
    """Whatever the loss returns besides."""
    variables: Any
    """What to differentiate by."""
    in_loss: Any
    """The gradients of those variables that stand in the loss itself, such as a temperature."""
    of_rows: list[Any]
    """The gradients of what `forward` returned; `None` for none."""
    of_means: list[Any] = []  # noqa: RUF012
    """The gradients of the means that `forward` returned."""


class TwoPasses:
    """Two passes over the micro-batches of a batch, with a loss of the whole between them.

    Variables that a micro-batch changes, such as the state of random layers, have in the second
    pass the values they had in the first, and afterwards those they had before the second.

    Args:
        nest: the samples.
        microbatch_size: samples per micro-batch; the last one may be smaller.
        may_be_empty: whether there may be no samples, as on a replica.
        jit_compile: whether XLA compiles a micro-batch, in a graph.
        kept: variables that every micro-batch changes, such as metrics.
    """

    loss_of_batch = LossOfBatch
    unconverted = staticmethod(tf.autograph.experimental.do_not_convert)

    def __init__(
        self,
        nest: Any,
        microbatch_size: Any,
        *,
        may_be_empty: bool,
        jit_compile: bool | None = None,
        kept: Iterable[Any] = (),
    ) -> None:
        self.batch = Batch(nest, may_be_empty=may_be_empty)
        self.replica_rows = ReplicaRows(self.batch.count)
        self._size = microbatch_size
        self._options = {"jit_compile": jit_compile, "kept": list(kept)}
        self._changed: list[Any] = []
        self._before: list[Any] = []
        self.sums: Any = None
        """The sum over micro-batches of what adds up, after the first pass."""

    def run(
        self,
        forward: Callable[..., tuple[list[Any], list[Any], list[Any]]],
        loss: Callable[[list[Any], list[Any]], LossOfBatch],
        keep: Callable[[Any], Any] = lambda gradients: gradients,
        begin: Callable[[], None] = lambda: None,
    ) -> tuple[LossOfBatch, Any]:
        """Return the loss, and the sum over micro-batches of what `keep` returns.

        Args:
            forward: called with a micro-batch; returns tensors with one row per sample (or
                `None`), numbers that are means over samples, and a nest that adds up.
            loss: called with the same for the batch on all replicas.
            keep: called with the gradients of a micro-batch in the second pass.
            begin: called when the second pass has been traced, before it runs.
        """
        dtypes: list[Any] = []
        whole = tf.cast(self.replica_rows.total, WEIGHT_DTYPE)

        def first(*micro_batch: Any) -> Any:
            outputs, means, sums = forward(*micro_batch)
            dtypes[:] = [None if one is None else one.dtype for one in outputs]
            count = sample_count(micro_batch)
            return (
                [None if one is None else rows(one) for one in outputs],
                [times(mean, count) for mean in means],
                sums,
            )

        parts, sums, self.sums = self._first(first)
        outputs = self.replica_rows.whole(
            [
                None if part is None else _joined_rows(part, dtype, self.batch.count)
                for part, dtype in zip(parts, dtypes)
            ]
        )
        if sums and self.replica_rows.replicas > 1:
            sums = replicas.sum_from_inside(sums)
        result = loss(outputs, [times(value, 1 / whole) for value in sums])

        def second(seeds: list[Any], *micro_batch: Any) -> Any:
            part = tf.cast(sample_count(micro_batch), WEIGHT_DTYPE) / whole
            of_means = [None if one is None else times(one, part) for one in result.of_means]
            with tf.GradientTape() as tape:
                outputs, means, _ = forward(*micro_batch)
            gradients = _pulled_back(
                tape, [*outputs, *means], [*seeds, *of_means], result.variables
            )
            return keep(gradients)

        return result, self._second(
            second, list(map(self.replica_rows.own, result.of_rows)), begin
        )

    def with_those_in_loss(self, result: LossOfBatch, gradients: Any) -> Any:
        """Return the gradients of a batch, given those by way of outputs, on this replica."""

        def both(variable: Any, through_outputs: Any, in_loss: Any) -> Any:
            through_outputs = as_gradient_of(variable, through_outputs)
            # The same on every replica: each has a part of it.
            part = as_gradient_of(variable, in_loss, 1 / self.replica_rows.replicas)
            return added(through_outputs, part)

        return tf.nest.map_structure(both, result.variables, gradients, result.in_loss)

    def recording(self, watched: list[Any]) -> _Recording:
        """Return a block in which a function of tensors is recorded, to be differentiated."""
        return _Recording(watched)

    def _first(self, forward: Callable[..., Any]) -> Any:
        def begin(graph: Any) -> None:
            if graph is None:
                function = tf.function(forward, autograph=False)
                graph = function.get_concrete_function(*self.batch.specs_of_arguments()).graph
            _check_random(graph)
            self._changed = changed_in(graph)
            self._before = [variable.read_value() for variable in self._changed]

        return total(
            forward, self.batch, self._size, begin=begin, trace=EagerTrace(), **self._options
        )

    def _second(
        self, compute: Callable[..., Any], seeds: list[Any], begin: Callable[[], None]
    ) -> Any:
        after = [variable.read_value() for variable in self._changed]
        for variable, value in zip(self._changed, self._before):
            variable.assign(value)
        arguments = self.batch.arguments(self.batch.leaves)
        batch = Batch((seeds, *arguments), may_be_empty=self.batch.may_be_empty)
        sums = total(
            compute,
            batch,
            self._size,
            begin=lambda _: begin(),
            trace=EagerTrace(),
            **self._options,
        )
        for variable, value in zip(self._changed, after):
            variable.assign(value)
        return sums


class _Recording:
    """A block in which a function of tensors is recorded, to be differentiated."""

    def __init__(self, watched: list[Any]) -> None:
        self._watched, self._tape = watched, tf.GradientTape()

    def __enter__(self) -> None:
        self._tape.__enter__()
        self._tape.watch([one for one in self._watched if one.dtype.is_floating])

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def gradients(self, of: Any, seed: Any) -> list[Any]:
        """Return the gradients of `of` by what was watched."""
        return self._tape.gradient(of, self._watched, output_gradients=seed)


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


class ReplicaRows:
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
