"""What a `train_step` computes with weights that it has updated before, and with samples.

There is no graph to look at. Instead a micro-batch is tried, and every operation of torch is
noted with the memory that it reads and writes, those of the backward pass included. Values that
Python or NumPy get to see may steer all that follows: it depends on them.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Sequence

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bigbatch.backends.torch.compat import address_of, schema_of, weak_reference_to
from bigbatch.backends.torch.ops import Rows, flatten, native
from bigbatch.core.passes import NONE, Order

_SEEN_BY_PYTHON = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
_SEEN_BY_OTHERS = ("numpy", "tolist", "__array__", "__dlpack__", "data_ptr")


class Operation(NamedTuple):
    """One operation, by the numbers that `Memory` has for what it reads and writes."""

    read: tuple[int, ...]
    written: tuple[int, ...]
    is_seen: bool = False
    """Whether something outside of torch gets to know what was read."""


class Memory:
    """Numbers for the memory of tensors; none is used again when memory is freed."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}

    def of(self, nest: Any) -> tuple[int, ...]:
        """Return the numbers for the tensors in a nest; views have that of what they show."""
        tensors = [one for leaf in flatten(nest) for one in _tensors_in(leaf)]
        return tuple(self._number(one.untyped_storage()) for one in tensors)

    def _number(self, storage: Any) -> int:
        number = address_of(storage)
        if number not in self._known:  # as long as a reference is there, no other has it
            self._known[number] = weak_reference_to(storage)
        return number


@dataclass(frozen=True)
class NotedApply:
    """One call of `optimizer.apply`."""

    place: int
    """How many operations came before it."""
    gradients: Sequence[Any]
    changed: Sequence[Any]
    """The variables that it changes."""


class Operations(TorchDispatchMode):
    """Notes the operations of a block.

    Args:
        variables: the tensors that keep values from one micro-batch to the next.
        same: returns those of them that are the same after any micro-batch.
    """

    def __init__(self, variables: list[Any], same: Callable[[Operations], list[Any]]) -> None:
        super().__init__()
        self.all: list[Operation] = []
        self.memory = Memory()
        """What the numbers in operations stand for."""
        self._variables, self._same = variables, same
        self.same: list[Any] = []
        """The tensors that are the same after any micro-batch, when it has run."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        # What is copied over is gone.
        is_copy = schema_of(func).name == "aten::copy_" and _is_all_of_its_memory(args[0])
        read = self.memory.of((args[is_copy:], kwargs))
        results = func(*args, **kwargs)
        changed = [
            args[index] if index < len(args) else kwargs.get(one.name)
            for index, one in enumerate(schema_of(func).arguments)
            if one.alias_info is not None and one.alias_info.is_write
        ]
        is_seen = schema_of(func).name in _SEEN_BY_PYTHON
        # A view is no new value: what it shows is not written.
        new = [number for number in self.memory.of(results) if number not in read]
        self.all.append(Operation(read, (*new, *self.memory.of(changed)), is_seen))
        return results

    def written(self, tensors: Iterable[Any]) -> list[Any]:
        """Return the tensors that have been changed, also by way of `.data`."""
        known = {number for one in self.all for number in one.written}
        return [one for one in tensors if known.intersection(self.memory.of(one))]

    def order(self, applies: Sequence[NotedApply], values: Any) -> Order:
        """Return what a micro-batch that has run computes with weights updated before.

        Args:
            applies: the updates, in their order.
            values: what it gives beside gradients.
        """
        sweep = _Sweep(self.memory)
        sweep.run(self.all, applies)  # before operations of our own are noted
        updated = {id(native(one)) for apply in applies for one in apply.changed}
        self.same = [one for one in self._same(self) if id(one) not in updated]
        known = {id(one) for one in self.same}
        late, state = sweep.of([values]), NONE
        for one in self._variables:
            numbers = [sweep.written.get(memory, NONE) for memory in self.memory.of(one)]
            number = max(numbers, default=NONE)
            if id(one) in known:
                state = max(state, number)
            else:
                late = max(late, number)
        changed = [list(one.changed) for one in applies]
        return Order(changed, sweep.gradients, late, state if state > late else NONE)


class _Leaving(TorchFunctionMode):
    """Notes which tensors are handed to NumPy and others."""

    def __init__(self, operations: Operations) -> None:
        super().__init__()
        self._operations = operations

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        if getattr(func, "__name__", "") in _SEEN_BY_OTHERS:
            read = self._operations.memory.of(args)
            self._operations.all.append(Operation(read, (), is_seen=True))
        return func(*args, **(kwargs or {}))


_local = threading.local()


@contextlib.contextmanager
def noting(operations: Operations) -> Iterator[None]:
    """Return a block whose operations are noted."""
    _local.noting = operations
    try:
        with _Leaving(operations), operations:
            yield
    finally:
        _local.noting = None


def noted_now() -> Operations | None:
    """Return the operations of the block that runs; `None` if nobody notes them."""
    return getattr(_local, "noting", None)


def _is_all_of_its_memory(tensor: Any) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _tensors_in(leaf: Any) -> list[Any]:
    if isinstance(leaf, Rows):
        return leaf.parts
    leaf = native(leaf)
    # Sparse tensors have their memory in others.
    return [leaf] if torch.is_tensor(leaf) and leaf.layout is torch.strided else []


def independent_of(data: Any, operations: Operations, tensors: Iterable[Any]) -> list[Any]:
    """Return the tensors that were not computed from a batch, as far as torch is concerned."""
    memory = operations.memory
    reached = set(memory.of(data))
    for one in operations.all:
        if reached.intersection(one.read):
            reached.update(one.written)
        else:
            reached.difference_update(one.written)  # by a copy of something else
    return [one for one in tensors if not reached.intersection(memory.of(one))]


@dataclass
class _Sweep:
    """Goes through operations once, in their order.

    It knows for the memory of each tensor the number of the last update on which it depends.
    """

    memory: Memory
    numbers: dict[int, int] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)
    """What operations have written since the first update."""
    updated: dict[int, int] = field(default_factory=dict)
    """The last update of the memory of each variable."""
    late: int = NONE
    """The last update on which everything depends from now on: Python has seen a result of it,
    or the `train_step` itself has changed one."""
    gradients: list[int] = field(default_factory=list)

    def run(self, operations: list[Operation], applies: Sequence[NotedApply]) -> None:
        left = list(applies)
        for place, one in enumerate(operations[left[0].place :], left[0].place):
            while left and left[0].place <= place:
                self._apply(left.pop(0))
            self._operation(one)
        for one in left:
            self._apply(one)

    def of(self, nest: Any) -> int:
        """Return the last update on which any tensor in a nest depends."""
        return max([self.late, *(self.numbers.get(one, NONE) for one in self.memory.of(nest))])

    def _apply(self, one: NotedApply) -> None:
        number = len(self.gradients)
        self.gradients.append(self.of(list(one.gradients)))
        for memory in self.memory.of(list(one.changed)):
            self.numbers[memory] = self.updated[memory] = number

    def _operation(self, one: Operation) -> None:
        number = max([self.late, *(self.numbers.get(read, NONE) for read in one.read)])
        if one.is_seen:
            self.late = number
        for memory in one.written:
            self.late = max(self.late, self.updated.get(memory, NONE))
            self.numbers[memory] = self.written[memory] = number
