"""What a traced `train_step` computes with weights that it has updated before.

The operations of a graph are listed in the order in which the `train_step` made them. So a
variable that is read after an update stands behind it in the list, and what depends on such a
read would see the result of the update in the full batch.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import Any, Iterable, Iterator, Sequence

import tensorflow as tf

from bigbatch.backends.tensorflow.compat import noted_reads, watcher_of_reads
from bigbatch.backends.tensorflow.dependence import ASSIGNMENTS, READS, Dependence
from bigbatch.core.passes import NONE, Order


@dataclass(frozen=True)
class TracedApply:
    """One call of `optimizer.apply` in a graph."""

    place: int
    """How many operations the graph had; run eagerly, how many reads were noted."""
    gradients: Sequence[Any]
    handles: dict[int, Any]
    """The handles of the variables that it changes, by `id`, with the variables."""


_local = threading.local()  # replicas run in threads


@contextlib.contextmanager
def noting_reads() -> Iterator[None]:
    """Return a block in which, run eagerly, reads of variables are noted in their order."""
    _local.reads, _local.watcher = [], watcher_of_reads()
    _local.watcher.__enter__()
    try:
        with noted_reads(_note):
            yield
    finally:
        _local.watcher.__exit__(None, None, None)
        _local.reads = None


def _note(variable: Any) -> None:
    reads = getattr(_local, "reads", None)
    if reads is not None:
        reads.append(id(variable.handle))


def _reads_so_far() -> list[int] | None:
    """Return the handles of the variables that were read, by `id`; `None` if nobody notes."""
    if getattr(_local, "reads", None) is None:
        return None
    _local.watcher.__exit__(None, None, None)
    for variable in _local.watcher.watched_variables():
        _note(variable)
    _local.watcher = watcher_of_reads()
    _local.watcher.__enter__()
    return _local.reads


def place_now() -> int | None:
    """Return how many operations have been traced; run eagerly, how many reads were noted."""
    if not tf.executing_eagerly():
        return len(tf.compat.v1.get_default_graph().get_operations())
    reads = _reads_so_far()
    return None if reads is None else len(reads)


def order_of_reads(applies: list[TracedApply]) -> Order | None:
    """Return what may depend on weights updated before, run eagerly, if reads were noted.

    Whatever happens after a read may depend on it.
    """
    reads = _reads_so_far()
    if reads is None:
        return None

    def last_read(stop: int, count: int) -> int:
        for number in reversed(range(count)):
            if applies[number].handles.keys() & set(reads[applies[number].place : stop]):
                return number
        return NONE

    changed = [list(one.handles.values()) for one in applies]
    gradients = [last_read(one.place, number) for number, one in enumerate(applies)]
    return Order(changed, gradients, last_read(len(reads), len(applies)), NONE)


def discarding() -> Any:
    """Return a block in which, in a graph, nothing is kept of the operations that are made."""
    return tf.__internal__.FuncGraph("discarded").as_default()


@dataclass
class _Sweep:
    """Goes through the operations of a graph once, in their order.

    It knows for each tensor, and for the value that each variable has at the time, the number
    of the last update on which it depends.
    """

    dependence: Dependence
    applies: list[TracedApply]
    tensors: dict[int, int] = field(default_factory=dict)
    variables: dict[int, int] = field(default_factory=dict)
    """By the `id` of the handle."""
    written: dict[int, int] = field(default_factory=dict)
    """What has been assigned to variables, by the `id` of the handle."""
    updated: dict[int, int] = field(default_factory=dict)
    """The last update of each variable, by the `id` of the handle."""
    rewritten: int = NONE
    """The last update whose result the `train_step` itself has changed."""
    gradients: list[int] = field(default_factory=list)

    def run(self) -> None:
        start = self.applies[0].place
        left = list(self.applies)
        operations = self.dependence.graph.get_operations()
        for place, op in enumerate(operations[start:], start):
            while left and left[0].place <= place:
                self._apply(left.pop(0))
            self._operation(op)
        for one in left:
            self._apply(one)

    def of(self, tensors: Iterable[Any]) -> int:
        """Return the last update on which any of these depends."""
        numbers = [self.tensors.get(id(one), NONE) for one in flat_tensors(tensors)]
        return max([self.rewritten, *numbers])

    def _apply(self, one: TracedApply) -> None:
        number = len(self.gradients)
        self.gradients.append(self.of(one.gradients))
        for outer, inner in self.dependence.graph.captures:
            if id(outer) in one.handles:
                self.variables[id(inner)] = self.updated[id(inner)] = number

    def _operation(self, op: Any) -> None:
        inputs = list(op.inputs)
        read = inputs[1:] if op.type in ASSIGNMENTS else inputs
        numbers = [self.tensors.get(id(one), NONE) for one in read]
        numbers += [self.variables.get(id(one), NONE) for one in read]
        number = max(numbers, default=NONE)
        if number != NONE:
            self.tensors.update((id(one), number) for one in op.outputs)
        if op.type in READS:
            return
        for one in inputs:
            if one.dtype == tf.resource and self.dependence.is_written_by(op, one):
                self.rewritten = max(self.rewritten, self.updated.get(id(one), NONE))
                self.written[id(one)] = max(self.written.get(id(one), NONE), number)
                self.variables[id(one)] = max(self.variables.get(id(one), NONE), number)


def order_of(
    graph: Any,
    applies: list[TracedApply],
    values: Any,
    apart: Iterable[Any],
    constants: list[Any] | None,
) -> Order:
    """Return what the graph of a micro-batch computes with weights updated before.

    Args:
        graph: the graph, which is still being traced.
        applies: the updates, in their order.
        values: what the micro-batch returns beside gradients.
        apart: variables in which gradients are added up.
        constants: tensors that enter the graph and are the same for every micro-batch; `None`
            if the graph does not show what depends on samples.
    """
    sweep = _Sweep(Dependence(graph, constants=constants or ()), applies)
    sweep.run()
    inside = {id(outer): inner for outer, inner in graph.captures}
    changed = [
        [variable for handle, variable in one.handles.items() if handle in inside]
        for one in applies
    ]
    late, state = sweep.of([values]), NONE
    apart = {id(one.handle) for one in apart}
    # Variables that are not known by name yet, as the graph is still being traced.
    others = [
        _Handle(outer)
        for outer, inner in graph.captures
        if inner.dtype == tf.resource and id(outer) not in apart
    ]
    numbers = {id(one): sweep.written.get(id(inside[id(one.handle)]), NONE) for one in others}
    if max(numbers.values(), default=NONE) > late:
        shown = [] if constants is None else sweep.dependence.independent_variables(others)
        same = {id(one) for one in shown}
        state = max([n for one, n in numbers.items() if one in same], default=NONE)
        late = max([late, *(n for one, n in numbers.items() if one not in same)])
    return Order(changed, sweep.gradients, late, state)


@dataclass(frozen=True)
class _Handle:
    handle: Any


def flat_tensors(nest: Any) -> list[Any]:
    """Return the tensors in a nest, those of sparse values one by one."""
    leaves = tf.nest.flatten(nest, expand_composites=True)
    return [leaf for leaf in leaves if tf.is_tensor(leaf)]
