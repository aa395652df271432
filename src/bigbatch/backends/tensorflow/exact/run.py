"""A batch in stages: one loop over its micro-batches for each pass."""

from __future__ import annotations

import contextlib
from typing import Any, Callable

import tensorflow as tf

from bigbatch.backends.tensorflow.exact.graph import MicrobatchGraph
from bigbatch.backends.tensorflow.exact.replay import Invariants, replay
from bigbatch.backends.tensorflow.replicas import inside_one_of_many, sum_from_inside
from bigbatch.backends.tensorflow.values import widened
from bigbatch.backends.tensorflow.variables import ANY_SHAPE
from bigbatch.core.stages import Operation, Stages
from bigbatch.core.storage import Pass


class StagedBatch:
    """Runs the passes of one batch, in the graph that is being built.

    Args:
        graph: the graph of a micro-batch.
        stages: its stages.
        values: returns what enters the graph of a micro-batch, by name, given where it begins
            and how many samples it has.
        constants: what enters it and is the same for all micro-batches, by name.
        microbatches: how many micro-batches there are.
        bounds: returns where a micro-batch begins and how many samples it has.
        storage: the device that tensors between stages are stored on; `None`: where they are.
    """

    def __init__(
        self,
        graph: MicrobatchGraph,
        stages: Stages,
        *,
        values: Callable[[Any, Any], dict[str, Any]],
        constants: dict[str, Any],
        microbatches: Any,
        bounds: Callable[[Any], tuple[Any, Any]],
        storage: str | None,
    ) -> None:
        self._graph, self._stages = graph, stages
        self._values, self._bounds = values, bounds
        self._microbatches = microbatches
        self._storage = storage
        self._invariants = Invariants(graph, stages, constants)
        self._stored: dict[str, Any] = {}
        self._done = tf.constant(0)

    def run(self, passes: list[Pass], add: Callable[[list[Any]], None]) -> None:
        """Run all passes.

        Args:
            passes: the passes.
            add: called in a loop with the results of a micro-batch, `None` for those that
                another pass has.
        """
        for one in passes:
            self._run(one, add)
        self._invariants.finish()

    def _run(self, one: Pass, add: Callable[[list[Any]], None]) -> None:
        known = {name: self._invariants.value(name) for name in sorted(one.invariants)}
        frees, stores = sorted(one.frees), sorted(one.stores)
        kept = sorted(one.reads - one.frees)
        summed = [self._tensor(operation.inputs[0]) for operation in one.sums]

        def body(index: Any, sums: list[Any], freed: list[Any], new: list[Any]) -> Any:
            start, count = self._bounds(index)
            values = {**known, **self._values(start, count)}
            values.update((name, self._read(self._stored[name], index, name)) for name in kept)
            values.update((n, self._read(array, index, n)) for array, n in zip(freed, frees))
            freed = [self._without(array, index, values[n]) for array, n in zip(freed, frees)]
            for operation in one.operations:
                if values.keys().isdisjoint(operation.outputs):  # samples are there
                    replay(self._graph, operation.name, values, count)
            if one.results:
                add([self._result(one, i, values) for i in range(len(self._stages.results))])
            with self._on_storage():
                new = [array.write(index, values[name]) for array, name in zip(new, stores)]
            sums = [
                so_far + tf.cast(values[tensor.name], so_far.dtype)
                for so_far, tensor in zip(sums, summed)
            ]
            return index + 1, sums, freed, new

        with tf.control_dependencies([self._done]):
            start = (
                tf.constant(0),
                [self._nothing(*pair) for pair in zip(one.sums, summed)],
                [self._stored.pop(name) for name in frees],
                [self._array(name) for name in stores],
            )
            self._done, sums, _, new = tf.while_loop(
                lambda index, *_: index < self._microbatches,
                body,
                start,
                shape_invariants=(
                    tf.TensorShape([]),
                    [_shape_of_sum(tensor) for tensor in summed],
                    [ANY_SHAPE for _ in frees],
                    [ANY_SHAPE for _ in stores],
                ),
                parallel_iterations=1,  # or two of them would be in memory at the same time
            )
        self._stored.update(zip(stores, new))
        self._note(one, sums, summed)

    def _note(self, one: Pass, sums: list[Any], like: list[Any]) -> None:
        """Let everybody know the sums of a pass, over all replicas."""
        if sums and inside_one_of_many():
            sums = sum_from_inside(sums)
        for operation, total, tensor in zip(one.sums, sums, like):
            total = tf.cast(total, tensor.dtype)
            total.set_shape(tensor.shape)
            self._invariants.values[operation.outputs[0]] = total

    def _result(self, one: Pass, position: int, values: dict[str, Any]) -> Any:
        name = self._stages.results[position]
        return values[name] if position in one.results else None

    def _nothing(self, operation: Operation, tensor: Any) -> Any:
        """Return what the sum of such tensors begins with."""
        shape = tensor.shape if tensor.shape.is_fully_defined() else []
        rows = self._graph.rows.get(operation.name)
        if rows is not None and None not in tensor.shape[1:]:
            shape = [self._invariants.value(rows), *tensor.shape[1:]]
        return tf.zeros(shape, widened(tensor.dtype))

    def _tensor(self, name: str) -> Any:
        """Return a tensor of the graph of a micro-batch."""
        node = self._graph.nodes[self._stages.maker[name].name]
        return node.outputs[int(name.split(":")[1])]

    def _array(self, name: str) -> Any:
        """Return a place for a tensor of every micro-batch."""
        with self._on_storage():
            return tf.TensorArray(
                self._tensor(name).dtype,
                size=self._microbatches,
                clear_after_read=False,
                infer_shape=False,
                element_shape=ANY_SHAPE,
            )

    def _read(self, array: Any, index: Any, name: str) -> Any:
        with self._on_storage():
            value = array.read(index)
        if value.dtype != tf.variant:
            value.set_shape(self._tensor(name).shape)
        return value

    def _without(self, array: Any, index: Any, value: Any) -> Any:
        """Return stored tensors without that of a micro-batch, which has been read."""
        if value.dtype == tf.variant:
            return array
        with self._on_storage(), tf.control_dependencies([value]):
            return array.write(index, tf.zeros([0], value.dtype))

    def _on_storage(self) -> contextlib.AbstractContextManager[Any]:
        return tf.device(self._storage) if self._storage else contextlib.nullcontext()


def _shape_of_sum(tensor: Any) -> Any:
    """Return what is known of the shape of a sum while it is added up."""
    return tensor.shape if tensor.shape.is_fully_defined() else ANY_SHAPE
