"""The graph of one micro-batch as a list of operations that can be put into stages."""

from __future__ import annotations

from typing import Any, Iterable

import tensorflow as tf

from bigbatch.backends.tensorflow.compat import function_graph
from bigbatch.backends.tensorflow.dependence import DRAWS_ANEW, READS
from bigbatch.backends.tensorflow.exact.markers import Markers
from bigbatch.backends.tensorflow.exact.shapes import KnownShape, known_shapes
from bigbatch.core.stages import Operation

_COSTLY = (
    "BatchMatMul",
    "Case",
    "Conv",
    "Cudnn",
    "DepthwiseConv",
    "Einsum",
    "FFT",
    "If",
    "IFFT",
    "MatMul",
    "PartitionedCall",
    "StatefulPartitionedCall",
    "StatelessCase",
    "StatelessIf",
    "StatelessWhile",
    "While",
)
"""How the names begin of operations whose results are worth storing."""
_LOOKUPS = ("LookupTableFind", "LookupTableSize", "VarIsInitialized")
_BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")


class MicrobatchGraph:
    """The operations of a traced micro-batch that lead to results or change something.

    Args:
        graph: the graph, a `FuncGraph`.
        samples: the inputs of the graph that are samples; their first dimension counts them.
        others: the inputs of the graph that differ between micro-batches, besides.
        markers: the sums over micro-batches in it.
    """

    def __init__(
        self, graph: Any, samples: list[Any], others: list[Any], markers: Markers
    ) -> None:
        self.graph = graph
        self.captures = {inner.name: outer for outer, inner in graph.captures}
        """What enters the graph from outside, by the name it has inside."""
        self.results = [resolved(tensor) for tensor in graph.outputs]
        self.shapes: dict[str, list[KnownShape]] = known_shapes(graph, samples)
        """What operations return that ask for shapes which follow from the count of samples."""
        self.rows = markers.rows
        """For sums that are rows of all micro-batches, what says how many rows there are."""
        self._entering = {tensor.name for tensor in (*samples, *others)}
        self._markers = markers
        ordered = self._ordered()
        self.nodes = {op.name: op for op in ordered}
        """The operations of TensorFlow, by name."""
        self.operations = self._needed([self._described(op) for op in ordered])

    def inputs(self, op: Any) -> list[Any]:
        """Return the tensors that an operation needs."""
        return [] if op.name in self.shapes else [resolved(tensor) for tensor in op.inputs]

    def _ordered(self) -> list[Any]:
        """Return operations as they were made, but for inputs that gradients add to loops."""
        done: set[str] = set()
        order = []
        for first in self.graph.get_operations():
            pending = [] if first.type == "IdentityN" else [first]
            while pending:
                op = pending[-1]
                missing = [t.op for t in self.inputs(op) if t.op.name not in done]
                if op.name in done or not missing:
                    pending.pop()
                    if op.name not in done:
                        done.add(op.name)
                        order.append(op)
                else:
                    pending += missing
        return order

    def _described(self, op: Any) -> Operation:
        inputs, sums = self.inputs(op), self._markers.sums
        effects = Effects.of(op, self.graph)
        is_cast = op.type == "Cast"
        return Operation(
            name=op.name,
            inputs=tuple(tensor.name for tensor in inputs),
            outputs=tuple(tensor.name for tensor in op.outputs),
            is_sample=op.name in self.shapes
            or any(tensor.name in self._entering for tensor in op.outputs),
            is_sum=op.name in sums,
            gradient_of=sums.get(op.name),
            is_seed=op.name in self._markers.seeds,
            is_costly=op.type.startswith(_COSTLY),
            is_unrepeatable=effects.draws,
            is_effect=effects.happens,
            widens=is_cast and op.inputs[0].dtype.size < op.outputs[0].dtype.size,
            reads=tuple(tensor.name for tensor in effects.reads),
            changes=tuple(tensor.name for tensor in effects.changes),
        )

    def _needed(self, operations: list[Operation]) -> list[Operation]:
        """Return the operations that lead to a result, a change or another effect."""
        wanted = {tensor.name for tensor in self.results}
        needed = []
        for one in reversed(operations):
            if one.is_effect or one.changes or not wanted.isdisjoint(one.outputs):
                wanted.update(one.inputs)
                needed.append(one)
        return needed[::-1]


def resolved(tensor: Any) -> Any:
    """Return the tensor that one is the same as.

    `tf.custom_gradient` ties its arguments and results together in one identity of them all.
    """
    while tensor.op.type == "IdentityN":
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


class Effects:
    """What an operation does beside computing its outputs from its inputs."""

    def __init__(self) -> None:
        self.reads: list[Any] = []
        """The variables that it reads."""
        self.changes: list[Any] = []
        """The variables that it changes."""
        self.draws = False
        """Whether it returns something else whenever it runs."""
        self.happens = False
        """Whether it does something that nothing in the graph shows, such as to print."""

    @classmethod
    def of(cls, op: Any, graph: Any) -> Effects:
        """Return the effects of an operation of a graph."""
        effects = cls()
        handles = [resolved(t) for t in op.inputs if t.dtype == tf.resource]
        inner = _functions(op, graph)
        if inner is not None:
            effects.look_into(op, inner)
        elif op.type in READS or op.type.startswith(_LOOKUPS):
            effects.reads = handles
        elif handles:
            effects.changes = handles
            effects.draws = bool(op.outputs)
        elif op.op_def is not None and op.op_def.is_stateful:
            effects.draws = bool(op.outputs)
            effects.happens = not op.type.startswith((*DRAWS_ANEW, "Cudnn"))
        return effects

    def look_into(self, op: Any, functions: list[Any]) -> None:
        """Add the effects of the functions that an operation calls."""
        arguments = list(op.inputs)[1:] if op.type in _BRANCHES else list(op.inputs)
        if None in functions:  # it may do anything
            self.changes = [resolved(t) for t in arguments if t.dtype == tf.resource]
            self.draws = self.happens = bool(op.op_def.is_stateful)
            return
        reads: dict[str, Any] = {}
        changes: dict[str, Any] = {}
        for function in functions:
            outer = {t.name: resolved(a) for t, a in zip(function.inputs, arguments)}
            for inner in (Effects.of(o, function) for o in function.get_operations()):
                self.draws |= inner.draws
                self.happens |= inner.happens
                for found, all_of_them in ((inner.reads, reads), (inner.changes, changes)):
                    all_of_them.update(
                        (t.name, outer[t.name]) for t in found if t.name in outer
                    )
        self.changes = _once(changes.values())
        changed = {tensor.name for tensor in self.changes}
        self.reads = [tensor for tensor in _once(reads.values()) if tensor.name not in changed]


def _functions(op: Any, graph: Any) -> list[Any] | None:
    """Return the graphs that an operation calls; `None` if it calls none."""
    names = [
        name
        for name, value in op.node_def.attr.items()
        if value.HasField("func") and not name.startswith("_")
    ]
    if op.type in ("Case", "StatelessCase"):
        return [None]
    return [function_graph(graph, op, name) for name in names] if names else None


def _once(tensors: Iterable[Any]) -> list[Any]:
    return list({tensor.name: tensor for tensor in tensors}.values())
