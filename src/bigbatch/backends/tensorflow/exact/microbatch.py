"""One traced micro-batch, cut into stages: how a batch of any number of them runs."""

from __future__ import annotations

from typing import Any, Callable, Iterable

import tensorflow as tf

from bigbatch.backends.tensorflow.batch import Batch
from bigbatch.backends.tensorflow.compat import inlined_functions
from bigbatch.backends.tensorflow.exact.graph import MicrobatchGraph
from bigbatch.backends.tensorflow.exact.markers import Markers, marking
from bigbatch.backends.tensorflow.exact.run import StagedBatch
from bigbatch.core.exact import Storage, Stored
from bigbatch.core.stages import Stages
from bigbatch.core.storage import Pass, passes, times_run
from bigbatch.errors import ContextError, explain

_HOST_DEVICE = "CPU:0"


class MarkedFunction:
    """A function of a micro-batch, in which sums over micro-batches are marked.

    Args:
        compute: the function.
        replicas: on how many replicas a batch is.
    """

    def __init__(self, compute: Callable[..., Any], replicas: int) -> None:
        self._compute, self._replicas = compute, replicas
        self.markers: dict[int, Markers] = {}
        """The marks of each graph that was traced, by the `id` of the graph."""

    def __call__(self, *args: Any) -> Any:
        """Call the function; what it sums up is marked in the graph that is being traced."""
        markers = Markers(self._replicas)
        with marking(markers), inlined_functions(compiled=True):
            results = self._compute(*args)
        self.markers[id(markers.graph)] = markers
        return results


class StagedMicrobatch:
    """The stages of a traced micro-batch.

    Args:
        graph: its graph: of the start of a micro-batch, one constant, and samples.
        markers: the sums over micro-batches in it.
        kept: the variables that every micro-batch changes.
        storage: what is stored between stages, and where.
    """

    def __init__(
        self, graph: Any, markers: Markers, kept: Iterable[Any], storage: Storage
    ) -> None:
        if any(markers.sums.values()) and not markers.seeds:
            raise ContextError(
                explain(
                    received="a train_step that does not use GradientTape.gradient",
                    expected="gradients of a loss, which bigbatch can weight before they are "
                    "summed over micro-batches",
                    fix='use tf.GradientTape in train_step, or batch_norm="pooled"',
                )
            )
        given = graph.inputs[: len(graph.inputs) - len(graph.captures)]
        start, self._constant, *leaves = given
        samples = [leaf for leaf in leaves if leaf.shape.rank]
        others = [leaf for leaf in leaves if not leaf.shape.rank]
        self._start, self._leaves = start.name, [leaf.name for leaf in leaves]
        self._graph = MicrobatchGraph(graph, samples, [start, *others], markers)
        inside = {id(outer): inner.name for outer, inner in graph.captures}
        handles = [id(variable.handle) for variable in kept]
        self._stages = Stages(
            self._graph.operations,
            [tensor.name for tensor in self._graph.results],
            [inside[handle] for handle in handles if handle in inside],
        )
        self.sums = self._stages.depth
        """How many sums over micro-batches follow one another in the forward pass."""
        self._storage = storage
        self._passes: dict[Stored, list[Pass]] = {}

    def passes(self) -> list[Pass]:
        """Return the passes of a batch, with what is stored now."""
        stored = self._storage.choice(self.sums)
        if stored not in self._passes:
            self._passes[stored] = passes(self._stages, stored.every, refills=stored.refills)
        return self._passes[stored]

    def __str__(self) -> str:
        loops = self.passes()
        again = times_run(self._stages, loops)
        return (
            f"{self.sums} sums over the batch one after the other, {len(loops)} loops over its "
            f"micro-batches, {self._storage.choice(self.sums)}: convolutions and matrix "
            f"products run {again:.2f} times"
        )

    def run(
        self,
        constant: Any,
        batch: Batch,
        before: Any,
        size: Any,
        add: Callable[[list[Any]], None],
    ) -> None:
        """Run all micro-batches of a batch.

        Args:
            constant: what is the same for all micro-batches.
            batch: the batch.
            before: the samples before it.
            size: samples per micro-batch.
            add: called with results of one micro-batch; `None` where there is none yet.
        """
        count = tf.convert_to_tensor(batch.count)

        def bounds(index: Any) -> tuple[Any, Any]:
            start = tf.cast(index, count.dtype) * size
            return start, tf.minimum(size, count - start)

        def values(start: Any, rows: Any) -> dict[str, Any]:
            leaves = [leaf for leaf in batch.rows(start, rows) if leaf is not None]
            tensors = tf.nest.flatten(leaves, expand_composites=True)
            entering = dict(zip(self._leaves, tensors))
            entering[self._start] = before + tf.cast(start, tf.int64)
            return entering

        staged = StagedBatch(
            self._graph,
            self._stages,
            values=values,
            constants={self._constant.name: constant},
            microbatches=tf.cast((count + size - 1) // size, tf.int32),
            bounds=bounds,
            storage=_HOST_DEVICE if self._storage.is_on_host else None,
        )
        staged.run(self.passes(), add)
