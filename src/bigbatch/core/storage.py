"""What the stages of a micro-batch store, and in which passes they run.

A pass runs some operations on every micro-batch. What one stage needs of another is stored for
every micro-batch, or computed again from what is stored: less memory for more time. Stored are
the tensors at the boundaries of every m-th stage of the forward pass. When the backward pass
reaches the stages between two of them, either one pass computes and stores their boundaries
again, or every stage computes again what it needs: less memory still, and more time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bigbatch.core.stages import Operation, Stages


@dataclass
class Pass:
    """One loop over the micro-batches of a batch."""

    level: int
    stores: set[str] = field(default_factory=set)
    """The tensors that are stored, for every micro-batch."""
    sums: list[Operation] = field(default_factory=list)
    """The sums that are known after it."""
    effects: list[Operation] = field(default_factory=list)
    """The operations that run although no other needs what they return."""
    results: list[int] = field(default_factory=list)
    """The results of a micro-batch that are added up, by position."""
    operations: list[Operation] = field(default_factory=list)
    """All operations that run on a micro-batch, in their order."""
    reads: set[str] = field(default_factory=set)
    """The stored tensors that it needs."""
    invariants: set[str] = field(default_factory=set)
    """The tensors it needs that are the same in all micro-batches."""
    frees: set[str] = field(default_factory=set)
    """The stored tensors that nobody needs after it."""

    def is_empty(self) -> bool:
        """Say whether it does nothing."""
        return not (self.stores or self.sums or self.effects or self.results)


def passes(stages: Stages, checkpoint_every: int, *, refills: bool = True) -> list[Pass]:
    """Return the passes of a batch, in their order.

    Args:
        stages: the stages of a micro-batch.
        checkpoint_every: how many stages of the forward pass lie between two whose boundaries
            are stored until the backward pass; 1 stores all.
        refills: whether the boundaries between two of those are stored again, all at once,
            when the backward pass comes to them.
    """
    plan = _Plan(stages)
    plan.forward()
    plan.backward(checkpoint_every, refills=refills)
    _set_lifetimes(plan.passes)
    return plan.passes


def times_run(stages: Stages, passes: list[Pass]) -> float:
    """Return how often convolutions and matrix products run on a micro-batch, on average."""
    costly = {one.name for one in stages.operations if one.is_costly}
    runs = [one.name for each in passes for one in each.operations if one.name in costly]
    return len(runs) / max(1, len(set(runs)))


class Boundaries:
    """The tensors that stages need of the stages before them."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._position = {one.name: i for i, one in enumerate(stages.operations)}
        self._from_samples = self._made_from_samples()
        known = (stages.level[one.name] + one.is_sum for one in stages.operations)
        last = max(stages.depth, *known)
        self.forward: list[set[str]] = [set() for _ in range(stages.depth + 1)]
        """For each level, what it and later ones of the forward pass need of earlier ones."""
        self.backward: list[set[str]] = [set() for _ in range(last + 2)]
        """For each level, what it and later ones need of earlier ones of the backward pass."""
        self.unrepeatable: dict[int, set[str]] = {}
        """By the level that makes them, the tensors that cannot be made again."""
        for one in stages.operations:
            if stages.is_local[one.name] and not one.is_sample:
                self._add(one)
        for boundary in (*self.forward, *self.backward):
            self._thin(boundary)

    def _made_from_samples(self) -> dict[str, bool]:
        """Find what is cheap to make from the samples themselves, which are always there."""
        stages, found = self._stages, {}
        for one in stages.operations:
            inputs = stages.input_operations(one)
            found[one.name] = one.is_sample or (
                not (one.is_costly or one.is_sum or stages.runs_once(one))
                and all(found[m.name] or not stages.is_local[m.name] for m in inputs)
            )
        return found

    def _add(self, operation: Operation) -> None:
        stages, name = self._stages, operation.name
        level, is_backward = stages.level[name], stages.is_backward[name]
        if stages.runs_once(operation):
            self.unrepeatable.setdefault(level, set()).update(operation.outputs)
        for output in operation.outputs:
            users = stages.consumers.get(output, ())
            levels = [
                stages.level[user.name]
                for user in users
                if is_backward or not stages.is_backward[user.name]
            ]
            if output in stages.results:
                levels.append(stages.level_of_result(output))
            last = max(levels, default=-1)
            if is_backward:
                for boundary in self.backward[level + 1 : last + 1]:
                    boundary.add(output)
            elif not self._from_samples[name]:
                for boundary in self.forward[level + 1 : min(last, stages.depth) + 1]:
                    boundary.add(output)

    def _thin(self, boundary: set[str]) -> None:
        """Leave out what is cheap to make from the rest; keep the narrow side of a cast."""
        stages = self._stages
        latest_first = sorted(boundary, key=lambda t: -self._position[stages.maker[t].name])
        for name in latest_first:
            one = stages.maker[name]
            if one.is_costly or stages.runs_once(one):
                continue
            sources = [
                tensor
                for tensor in one.inputs
                if stages.is_local[stages.maker[tensor].name]
                and not self._from_samples[stages.maker[tensor].name]
            ]
            if all(source in boundary for source in sources):
                boundary.discard(name)
            elif one.widens:
                boundary.discard(name)
                boundary.add(sources[0])


class _Plan:
    """Passes that are being put together."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._at = Boundaries(stages)
        self._position = {one.name: i for i, one in enumerate(stages.operations)}
        self._drawn: set[str] = set()
        self.passes: list[Pass] = []

    def forward(self) -> None:
        """Add the passes of the stages before that of the loss."""
        for level in range(self._stages.depth):
            here, following = self._at.forward[level], self._at.forward[level + 1]
            self._add(Pass(level, stores=following - here), here)

    def backward(self, every: int, *, refills: bool) -> None:
        """Add the pass of the loss and those of the backward pass."""
        stages, at = self._stages, self._at
        depth = stages.depth
        starts = list(range(0, depth + 1, every))
        checkpoints = set().union(*(at.forward[start] for start in starts))
        segment = set().union(*at.forward[starts[-1] if refills else depth :])
        for level in range(depth, len(at.backward) - 1):
            mirrored = max(0, 2 * depth - level)
            while mirrored < starts[-1]:
                end = starts.pop()
                inside = at.forward[starts[-1] + 1 : end] if refills else []
                segment = set().union(*inside) - checkpoints
                self._add(Pass(starts[-1], stores=set(segment)), checkpoints, is_again=True)
            here, following = at.backward[level], at.backward[level + 1]
            self._add(Pass(level, stores=following - here), checkpoints | segment | here)

    def _add(self, one: Pass, available: set[str], *, is_again: bool = False) -> None:
        """Complete a pass, given what is stored before it; add it if it does anything."""
        stages, level = self._stages, one.level
        if not is_again:
            named = [o for o in stages.operations if stages.level[o.name] == level]
            one.sums = [o for o in named if o.is_sum]
            one.effects = [o for o in named if stages.has_effect(o)]
            results = enumerate(stages.results)
            one.results = [i for i, name in results if stages.level_of_result(name) == level]
            one.stores |= self._at.unrepeatable.get(level, set())
        if one.is_empty():
            return
        roots = [*one.stores, *(stages.results[i] for i in one.results)]
        roots += [name for o in (*one.sums, *one.effects) for name in o.inputs]
        self._collect(one, roots, available | self._drawn)
        if not is_again:
            self._drawn |= self._at.unrepeatable.get(level, set())
        self.passes.append(one)

    def _collect(self, one: Pass, roots: list[str], available: set[str]) -> None:
        """Find the operations that lead from available values to `roots`."""
        stages = self._stages
        found = {operation.name: operation for operation in one.effects}
        seen: set[str] = set()
        while roots:
            name = roots.pop()
            if name in seen:
                continue
            seen.add(name)
            maker = stages.maker[name]
            if not stages.is_local[maker.name]:
                one.invariants.add(name)
            elif name in available:
                one.reads.add(name)
            else:
                found[maker.name] = maker
                roots.extend(maker.inputs)
        one.operations = sorted(found.values(), key=lambda o: self._position[o.name])


def _set_lifetimes(passes: list[Pass]) -> None:
    """Store nothing that is not read later, and free what is read for the last time."""
    needed: set[str] = set()
    for one in reversed(passes):
        one.stores &= needed
        needed -= one.stores
        one.frees = one.reads - needed
        needed |= one.reads
