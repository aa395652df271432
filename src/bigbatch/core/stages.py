"""The stages of a micro-batch whose layers need sums over all micro-batches of the batch.

A micro-batch is a list of operations. Some of them are sums over micro-batches, such as the
statistics of batch normalisation and their gradients. What needs no sum has level 0, and what
needs the sums of level l has level l + 1: all micro-batches run the operations of one level
before any of them runs the next. With L levels of sums in the forward pass, the loss has level
L, and the gradient of a sum of level f has level 2L − 1 − f: the backward pass mirrors the
forward pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterable, Sequence


@dataclass(frozen=True)
class Operation:
    """One operation of a micro-batch, and what has to be known to run it in a stage."""

    name: str
    inputs: tuple[str, ...] = ()
    """The tensors it needs."""
    outputs: tuple[str, ...] = ()
    is_sample: bool = False
    """Whether its outputs are samples, or the same function of the count of samples."""
    is_sum: bool = False
    """Whether its output is the sum of its input over all micro-batches."""
    gradient_of: str | None = None
    """For the gradient of a sum, which is a sum again: the name of that sum."""
    is_seed: bool = False
    """Whether the backward pass begins here."""
    is_costly: bool = False
    """Whether it is better to store what it returns than to run it again."""
    is_unrepeatable: bool = False
    """Whether it returns something else when it runs again."""
    is_effect: bool = False
    """Whether it runs although nobody needs what it returns."""
    widens: bool = False
    """Whether its input is the same in fewer bytes."""
    reads: tuple[str, ...] = ()
    """The variables that it reads."""
    changes: tuple[str, ...] = ()
    """The variables that it changes."""


class Stages:
    """The level of every operation of a micro-batch.

    Args:
        operations: the operations, each after those whose outputs it needs.
        results: the tensors that a micro-batch returns, to be added up.
        kept: variables that every micro-batch changes, whatever their new value depends on.
    """

    def __init__(
        self, operations: Sequence[Operation], results: Sequence[str], kept: Iterable[str] = ()
    ) -> None:
        self.operations = list(operations)
        self.results = list(results)
        self.by_name = {one.name: one for one in self.operations}
        self.maker = {output: one for one in self.operations for output in one.outputs}
        """The operation that makes a tensor."""
        self.changed = set(kept)
        """The variables that every micro-batch changes; others change once per batch."""
        self.is_local = self._local()
        """For each operation, whether every micro-batch has its own outputs."""
        self.is_backward = self._backward()
        self.consumers = self._consumers()
        self.level = self._levels({})
        """For each operation, how many sums must be known before it, one after another."""
        self.depth = max(
            (self.level[o.name] + 1 for o in self.operations if self._is_forward_sum(o)),
            default=0,
        )
        """The levels of sums in the forward pass: the loss has this level."""
        earliest = self._mirrored()
        self.level = self._levels(earliest)
        earliest.update(self._latest())
        self.level = self._levels(earliest)
        self.level = self._levels({**earliest, **self._late_reads()})

    def input_operations(self, operation: Operation) -> list[Operation]:
        """Return the operations that make the inputs of one."""
        return [self.maker[name] for name in operation.inputs]

    def runs_once(self, operation: Operation) -> bool:
        """Say whether what an operation returns cannot be had again by running it again."""
        touched = {*operation.reads, *operation.changes}
        return operation.is_unrepeatable or not touched.isdisjoint(self.changed)

    def has_effect(self, operation: Operation) -> bool:
        """Say whether an operation runs in every micro-batch, whoever needs its outputs."""
        is_change = not self.changed.isdisjoint(operation.changes)
        return is_change or (operation.is_effect and self.is_local[operation.name])

    def level_of_result(self, name: str) -> int:
        """Return the level at which a result of a micro-batch is added up."""
        operation = self.maker[name]
        is_local = self.is_local[operation.name]
        return max(self.depth, self.level[operation.name]) if is_local else self.last_of(name)

    def last_of(self, name: str) -> int:
        """Return the level at which a tensor that is the same in all micro-batches is known."""
        operation = self.maker[name]
        return max(self.depth, self.level[operation.name] + operation.is_sum)

    def _local(self) -> dict[str, bool]:
        """Find what depends on samples, and which variables their micro-batch changes."""
        while True:
            local: dict[str, bool] = {}
            for one in self.operations:
                local[one.name] = not one.is_sum and (
                    one.is_sample
                    or any(local[maker.name] for maker in self.input_operations(one))
                    or not self.changed.isdisjoint((*one.reads, *one.changes))
                )
            changed = {v for one in self.operations if local[one.name] for v in one.changes}
            if changed <= self.changed:
                return local
            self.changed |= changed

    def _backward(self) -> dict[str, bool]:
        """Find what depends on where the backward pass begins."""
        has_seed = any(one.is_seed for one in self.operations)
        backward: dict[str, bool] = {}
        for one in self.operations:
            begins = one.is_seed if has_seed else one.gradient_of is not None
            inputs = self.input_operations(one)
            backward[one.name] = begins or any(backward[maker.name] for maker in inputs)
        return backward

    def _consumers(self) -> dict[str, list[Operation]]:
        found: dict[str, list[Operation]] = {}
        for one in self.operations:
            for name in one.inputs:
                found.setdefault(name, []).append(one)
        return found

    def _is_forward_sum(self, operation: Operation) -> bool:
        return operation.is_sum and not self.is_backward[operation.name]

    def _levels(self, earliest: dict[str, int]) -> dict[str, int]:
        """Return levels that are as low as can be, but not below `earliest`.

        What reads a variable comes after what has changed it before, and the other way round.
        """
        level: dict[str, int] = {}
        after: dict[str, int] = {}
        changed: dict[str, int] = {}
        touched: dict[str, int] = {}
        for one in self.operations:
            found = [after[maker.name] for maker in self.input_operations(one)]
            found += [changed.get(variable, 0) for variable in one.reads]
            found += [touched.get(variable, 0) for variable in one.changes]
            level[one.name] = max([*found, earliest.get(one.name, 0)], default=0)
            after[one.name] = level[one.name] + one.is_sum
            for variable in (*one.reads, *one.changes):
                touched[variable] = max(touched.get(variable, 0), level[one.name])
            for variable in one.changes:
                changed[variable] = level[one.name]
        return level

    def _mirrored(self) -> dict[str, int]:
        """Return the lowest levels of gradients of sums: the mirror image of the sums."""
        earliest = {one.name: self.depth for one in self.operations if one.is_seed}
        for one in self.operations:
            of = one.gradient_of
            if of is not None and self.is_backward[one.name] and not self.is_backward[of]:
                earliest[one.name] = 2 * self.depth - 1 - self.level[of]
        return earliest

    def _late_reads(self) -> dict[str, int]:
        """Return the levels of reads of variables that every micro-batch changes.

        A metric reads its variable, adds and assigns. These belong into one pass: read in an
        earlier one, the variable would not show the micro-batches before.
        """
        derived: set[str] = set()
        for one in self.operations:
            is_read = not self.changed.isdisjoint(one.reads)
            inputs = self.input_operations(one)
            if is_read or (not one.is_sum and any(m.name in derived for m in inputs)):
                derived.add(one.name)
        found: dict[str, int] = {}
        for one in reversed(self.operations):
            users = [user for name in one.outputs for user in self.consumers.get(name, ())]
            if one.name in derived and users:
                found[one.name] = min(found.get(u.name, self.level[u.name]) for u in users)
        return found

    def _latest(self) -> dict[str, int]:
        """Return the highest levels of what leads from the loss to the gradients of sums.

        Run earlier, a short branch would need activations of a stage that is far away.
        """
        need: dict[str, float] = {}
        for one in reversed(self.operations):
            users = [user for name in one.outputs for user in self.consumers.get(name, ())]
            least = min((need[user.name] for user in users), default=math.inf)
            need[one.name] = self.level[one.name] if one.is_sum else least
        return {
            name: self.depth if math.isinf(level) else int(level)
            for name, level in need.items()
            if self.is_backward[name] and not self.by_name[name].is_sum
        }
