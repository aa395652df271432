"""Operations of the graph of a micro-batch, made once more in the graph that is being built."""

from __future__ import annotations

from typing import Any

from bigbatch.backends.tensorflow.compat import copied_operation
from bigbatch.backends.tensorflow.exact.graph import MicrobatchGraph
from bigbatch.backends.tensorflow.exact.shapes import shape_at
from bigbatch.core.stages import Operation, Stages


def replay(graph: MicrobatchGraph, name: str, values: dict[str, Any], count: Any) -> None:
    """Make an operation once more.

    Args:
        graph: the graph that it is in.
        name: its name.
        values: the tensors that stand for its inputs, by their names there; its outputs are
            added.
        count: the samples of the micro-batch; `None` if it does not depend on samples.
    """
    op = graph.nodes[name]
    if name in graph.shapes:
        laws = zip(op.outputs, graph.shapes[name])
        outputs = [shape_at(law, count, output.dtype) for output, law in laws]
    else:
        inputs = [values[tensor.name] for tensor in graph.inputs(op)]
        outputs = copied_operation(op, inputs)
    values.update((output.name, copy) for output, copy in zip(op.outputs, outputs))


class Invariants:
    """What is the same in all micro-batches, computed once, when somebody asks for it.

    Operations that touch the same variable keep their order. Everything it computes is part of
    the graph that is being built when it is asked for.

    Args:
        graph: the graph of a micro-batch.
        stages: its stages.
        constants: the values of what enters the graph, by name.
    """

    def __init__(
        self, graph: MicrobatchGraph, stages: Stages, constants: dict[str, Any]
    ) -> None:
        self._graph, self._stages = graph, stages
        self.values = {**graph.captures, **constants}
        """What is known, by the name of the tensor in the graph of a micro-batch."""
        self._done: set[str] = set()
        self._touching: dict[str, list[Operation]] = {}
        for one in stages.operations:
            for variable in (*one.reads, *one.changes):
                self._touching.setdefault(variable, []).append(one)

    def value(self, name: str) -> Any:
        """Return what stands for a tensor."""
        if name not in self.values:
            self._run(self._stages.maker[name])
        return self.values[name]

    def finish(self) -> None:
        """Change everything that changes once per batch and is not changed yet."""
        for one in self._stages.operations:
            is_needed = one.changes or one.is_effect
            if is_needed and not self._stages.is_local[one.name] and not one.is_sum:
                self._run(one)

    def _run(self, operation: Operation) -> None:
        pending = [operation]
        while pending:  # no recursion: graphs are deeper than Python's stack
            one = pending[-1]
            if one.name in self._done:
                pending.pop()
                continue
            missing = [
                maker
                for name, maker in zip(one.inputs, self._stages.input_operations(one))
                if name not in self.values
            ]
            missing += [o for o in self._before(one) if o.name not in self._done]
            if missing:
                pending += missing
                continue
            pending.pop()
            self._done.add(one.name)
            if one.outputs and all(output in self.values for output in one.outputs):
                continue
            replay(self._graph, one.name, self.values, None)

    def _before(self, operation: Operation) -> list[Operation]:
        """Return what has to happen to the same variables first."""
        found = []
        for variable in (*operation.reads, *operation.changes):
            for other in self._touching[variable]:
                if other.name == operation.name:
                    break
                is_change = variable in other.changes or variable in operation.changes
                if is_change and not self._stages.is_local[other.name]:
                    found.append(other)
        return found
