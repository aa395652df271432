"""Which tensors of a traced micro-batch depend on its samples.

Three things follow from it. A lookup whose indices do not depend on samples gives the same rows
in every micro-batch. A draw whose first dimension follows the number of samples belongs to
samples. State whose new value does not depend on samples changes once per batch.
"""

from __future__ import annotations

from typing import Any, Iterator, Sequence

import tensorflow as tf

from bigbatch.backends.tensorflow.compat import function_graph, is_branch

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
DRAWS_ANEW = ("Random", "TruncatedNormal", "ParameterizedTruncatedNormal", "Multinomial")
"""How the names begin of operations that draw other numbers whenever they run."""

_BRANCHES = ("If", "StatelessIf")
_DATA = {"IteratorGetNext", "IteratorGetNextSync", "OptionalGetValue", "PyFunc", "EagerPyFunc"}
READS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"}
"""Operations that read a variable and leave it as it is."""

ASSIGNMENTS = {"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"}
"""Operations that change a variable by a value, their second argument."""

_EFFECTS = {
    "PyFunc",
    "PyFuncStateless",
    "EagerPyFunc",
    "LookupTableInsertV2",
    "LookupTableImportV2",
    "QueueEnqueueV2",
    "QueueDequeueV2",
    "WriteSummary",
    "WriteScalarSummary",
    "WriteFile",
}
_FUNCTIONS = {
    **dict.fromkeys(_CALLS, ("f",)),
    **dict.fromkeys(_BRANCHES, ("then_branch", "else_branch")),
    **dict.fromkeys(("While", "StatelessWhile"), ("body",)),
}


class Dependence:
    """Answers for the graph of one micro-batch, also while it is being traced.

    Everything that enters the graph as an argument is taken for samples. What is captured from
    outside (weights, numbers of the whole batch) is the same for all micro-batches. In a graph
    inside of this one, arguments are followed to where they come from if that is known.

    Args:
        graph: the graph of a micro-batch, a `FuncGraph`.
        outer: for a graph inside of that, the answers for the graph around it.
        arguments: for the graph of a function that is called, what it is called with.
        constants: tensors that enter the graph and are the same for every micro-batch.
    """

    def __init__(
        self,
        graph: Any,
        outer: Dependence | None = None,
        arguments: Sequence[Any] = (),
        constants: Sequence[Any] = (),
    ) -> None:
        self.graph = graph
        self._constants = {id(tensor) for tensor in constants}
        self._outer = outer
        self._sources = {id(inner): source for inner, source in zip(graph.inputs, arguments)}
        self._known: dict[int, bool] = {}
        self._called: dict[int, Dependence | None] = {}
        self._changed: set[int] = set()

    @classmethod
    def of_graphs_around(cls, graph: Any) -> Dependence:
        """Return the answers for a graph inside of others, in a loop that people write."""
        outer = getattr(graph, "outer_graph", None)
        is_graph = outer is not None and hasattr(outer, "captures")
        return cls(graph, cls.of_graphs_around(outer) if is_graph else None)

    def known_counts(self) -> set[int]:
        """Return the numbers of samples that were known when the graphs were traced."""
        captured = {id(inner) for _, inner in self.graph.captures}
        given = [
            op.outputs[0]
            for op in self.graph.get_operations()
            if op.type == "Placeholder" and id(op.outputs[0]) not in captured
        ]
        counts = {one.shape[0] for one in given if one.shape.rank} - {None}
        return counts if self._outer is None else counts | self._outer.known_counts()

    def inside_now(self) -> Dependence | None:
        """Return the answers for the graph that is being traced: this one or a branch in it.

        `None` in a `tf.function` inside: what it captures would stay in it after this trace.
        """
        return self._inside(tf.compat.v1.get_default_graph())

    def _inside(self, graph: Any) -> Dependence | None:
        if graph is self.graph:
            return self
        if not is_branch(graph):
            return None
        outer = self._inside(graph.outer_graph)
        return outer and Dependence(graph, outer)

    def of(self, tensor: Any) -> bool:
        """Say whether the value or the shape of a tensor depends on the samples."""
        if getattr(tensor, "graph", None) is not self.graph:
            return self._outer is not None and self._outer.of(tensor)
        pending = [tensor]
        while pending:  # no recursion: graphs are deeper than Python's stack
            current = pending[-1]
            if id(current) in self._known:
                pending.pop()
                continue
            answer = self._at_once(current)
            if answer is None:
                inputs = current.op.inputs
                unknown = [one for one in inputs if id(one) not in self._known]
                if unknown:
                    pending += unknown
                    continue
                answer = any(self._known[id(one)] for one in inputs)
            self._known[id(current)] = answer
            pending.pop()
        return self._known[id(tensor)]

    def first_dimension(self, shape: Any) -> bool:
        """Say whether the first number of a shape follows the number of samples."""
        elements = self._elements(shape)
        return self.of(shape) if elements is None else bool(elements) and elements[0]

    def independent_variables(self, variables: list[Any]) -> list[Any]:
        """Return those of `variables` that the graph changes in the same way for any samples.

        Args:
            variables: variables that the graph may change.
        """
        inside = {id(outer): inner for outer, inner in self.graph.captures}
        left = [variable for variable in variables if id(variable.handle) in inside]
        self._changed = set()
        while True:  # a variable may be changed by the value of another one
            self._known, self._called = {}, {}
            handles = {id(inside[id(variable.handle)]) for variable in left}
            left = [v for v in left if not any(self.written(inside[id(v.handle)]))]
            if len(left) == len(handles):
                return left
            self._changed |= handles - {id(inside[id(variable.handle)]) for variable in left}

    def written(self, handle: Any) -> Iterator[bool]:
        """Yield, for each operation that changes a variable, whether it depends on samples."""
        for op in handle.consumers():
            yield from self._written_by(op, handle)

    def is_written_by(self, op: Any, handle: Any) -> bool:
        """Say whether an operation changes a variable."""
        return any(True for _ in self._written_by(op, handle))

    def _written_by(self, op: Any, handle: Any) -> Iterator[bool]:
        if op.type in ASSIGNMENTS:
            yield self.of(op.inputs[1])
        elif op.type in _CALLS:
            called = self._call(op)
            if called is None or called.draws():
                yield True  # numbers that would be the same again
                return
            yield from called.written_as(handle, op.inputs)
        elif op.type in _BRANCHES:
            written = []
            for name in ("then_branch", "else_branch"):
                graph = function_graph(self.graph, op, name)
                branch = graph and Dependence(graph, self, op.inputs[1:])
                written += branch.written_as(handle, op.inputs[1:]) if branch else [True]
            if written:
                yield any(written) or self.of(op.inputs[0])  # whether it is taken
        elif op.type == "RngReadAndSkip":  # a `tf.random.Generator`
            yield self.of(op.inputs[2])
        elif op.type not in READS:
            yield True

    def written_as(self, handle: Any, arguments: Sequence[Any]) -> Iterator[bool]:
        """Yield what `written` does, for a variable that is an argument of this graph."""
        for inner, outer in zip(self.graph.inputs, arguments):
            if outer is handle:
                yield from self.written(inner)

    def draws(self) -> bool:
        """Say whether random numbers are drawn in this graph or in a function it calls."""
        for op in self.graph.get_operations():
            called = self._call(op) if op.type in _CALLS else None
            if op.type.startswith("Stateless") or (called is not None and called.draws()):
                return True
        return False

    def _at_once(self, tensor: Any) -> bool | None:
        """Return the answer if it can be given without that of all inputs."""
        op = tensor.op
        if op.type == "Placeholder":
            return self._enters(tensor)
        if op.type == "Rank":
            return False
        if op.type == "Size":
            return self._dimension(op.inputs[0], 0)
        if op.type in READS and self.is_changed(op.inputs[0]):
            return True
        if op.type in _DATA or (op.op_def.is_stateful and op.type.startswith(DRAWS_ANEW)):
            return True  # other values whenever it runs
        if op.type in _CALLS:
            called = self._call(op)
            if called is not None:
                return called.of(called.graph.outputs[tensor.value_index])
        elements = self._elements(tensor)
        return None if elements is None else any(elements)

    def _enters(self, tensor: Any) -> bool:
        """Say whether what enters the graph depends on samples."""
        # Variables first: there are many of them.
        if tensor.dtype == tf.resource or id(tensor) in self._constants:
            return False
        source = self._source(tensor)
        return source is None or (self._outer is not None and self._outer.of(source))

    def _source(self, tensor: Any) -> Any:
        """Return where a tensor that enters the graph comes from; `None` if it is given."""
        if id(tensor) in self._sources:
            return self._sources[id(tensor)]
        return next((outer for outer, inner in self.graph.captures if inner is tensor), None)

    def is_changed(self, handle: Any) -> bool:
        """Say whether a variable has a value that depends on samples."""
        if self._outer is None:
            return id(handle) in self._changed
        source = self._source(handle)
        return source is not None and self._outer.is_changed(source)

    def _call(self, op: Any) -> Dependence | None:
        """Return the answers for the graph of a function that is called."""
        if id(op) not in self._called:
            graph = function_graph(self.graph, op)
            self._called[id(op)] = graph and Dependence(graph, self, op.inputs)
        return self._called[id(op)]

    def _dimension(self, tensor: Any, axis: int) -> bool:
        """Say whether one dimension of a tensor follows the number of samples."""
        if tensor.shape.rank is not None and tensor.shape[axis] is not None:
            return False
        if tensor.op.type == "Transpose":
            order = tf.get_static_value(tensor.op.inputs[1])
            if order is not None:
                return self._dimension(tensor.op.inputs[0], int(order[axis]))
        # Samples come first, unless that dimension is known; others are the same everywhere.
        comes_first = tensor.shape.rank is None or tensor.shape[0] is None
        return (axis == 0 or not comes_first) and self.of(tensor)

    def _elements(self, tensor: Any) -> list[bool] | None:
        """Return the answer for each number of a short row of integers, or of one integer.

        `None` if it cannot be told apart. Shapes are such rows.
        """
        if getattr(tensor, "graph", None) is not self.graph or not tensor.dtype.is_integer:
            return None
        op = tensor.op
        if op.type == "Shape" and op.inputs[0].shape.rank is not None:
            of = op.inputs[0]
            return [self._dimension(of, axis) for axis in range(of.shape.rank)]
        if op.type in ("Identity", "Cast"):
            return self._elements(op.inputs[0])
        if op.type == "Pack" and tensor.shape.rank == 1:
            return [self.of(part) for part in op.inputs]
        if op.type == "ConcatV2" and tensor.shape.rank == 1:
            parts = [self._row(part) for part in op.inputs[:-1]]
            return None if None in parts else [one for part in parts for one in part or []]
        if op.type == "StridedSlice":
            return self._sliced(op)
        return None

    def _row(self, tensor: Any) -> list[bool] | None:
        elements = self._elements(tensor)
        if elements is None and tensor.shape.rank == 1 and tensor.shape[0] is not None:
            return [self.of(tensor)] * tensor.shape[0]
        return elements

    def _sliced(self, op: Any) -> list[bool] | None:
        """Return the answers for a part of a row, such as one number of a shape."""
        elements = self._row(op.inputs[0]) if op.inputs[0].shape.rank == 1 else None
        begin, end, stride = (tf.get_static_value(one) for one in op.inputs[1:])
        if elements is None or begin is None or end is None or stride is None:
            return None
        first = None if op.get_attr("begin_mask") else int(begin[0])
        last = None if op.get_attr("end_mask") else int(end[0])
        if op.get_attr("shrink_axis_mask"):
            return [elements[int(begin[0])]]
        return elements[slice(first, last, int(stride[0]))]


def effects_in(graph: Any) -> set[str]:
    """Return the types of operations, also in functions, whose effects cannot be undone."""
    found, pending, seen = set(), [graph], set()
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        for op in current.get_operations():
            if op.type in _EFFECTS:
                found.add(op.type)
            graphs = (function_graph(current, op, one) for one in _FUNCTIONS.get(op.type, ()))
            pending += [one for one in graphs if one is not None]
    return found


def changed_in(graph: Any) -> list[Any]:
    """Return the variables that a graph may change: does anything else than read."""
    inside = {id(outer): inner for outer, inner in graph.captures}
    return [
        variable
        for variable in graph.variables
        if id(variable.handle) in inside
        and any(op.type not in READS for op in inside[id(variable.handle)].consumers())
    ]
