"""The passes of a batch in stages: a program for each pass and size of micro-batch."""

from __future__ import annotations

from typing import Any, Callable

import jax
import jax.numpy as jnp

from bigbatch.backends.jax.exact.graph import MicrobatchGraph
from bigbatch.backends.jax.ops import widened
from bigbatch.core.stages import Operation, Stages
from bigbatch.core.storage import Pass


class Programs:
    """What runs passes on micro-batches of one number of samples.

    Args:
        graph: what such a micro-batch does.
        stages: its stages.
        compiled: makes a program of a function that may overwrite its second argument.
    """

    def __init__(
        self, graph: MicrobatchGraph, stages: Stages, compiled: Callable[..., Any]
    ) -> None:
        self._graph, self._stages, self._compiled = graph, stages, compiled
        self._made: dict[int, Any] = {}

    def entering(self, values: list[Any]) -> dict[str, Any]:
        """Return what enters a micro-batch, by name."""
        return dict(zip(self._graph.inputs, values))

    def run(self, one: Pass, values: dict[str, Any], so_far: dict[str, Any]) -> Any:
        """Run a pass on a micro-batch.

        Args:
            one: the pass; only as long as it is kept are its programs.
            values: what enters the graph, sums that are known, and what was stored, by name.
            so_far: the sums and results of this pass over the micro-batches before.

        Returns:
            The new `so_far`, what is to be stored, what is listed, and new values of variables.
        """
        if id(one) not in self._made:
            self._made[id(one)] = self._program(one)
        names, program = self._made[id(one)]
        return program({name: values[name] for name in names if name in values}, so_far)

    def types_of_sums(self, one: Pass) -> dict[str, Any]:
        """Return the types of what a pass adds up."""
        names = [name for operation in one.sums for name in operation.inputs]
        names += [self._stages.results[position] for position in one.results]
        return {name: self._graph.types[name] for name in names}

    def final(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the new values of variables that change once per batch."""
        stages = self._stages
        changes = [
            one for one in stages.operations if one.changes and not stages.is_local[one.name]
        ]
        roots = [name for one in changes for name in one.inputs]
        equations, entering = self._equations(set(roots), [])

        def compute(values: dict[str, Any], _: Any) -> dict[str, Any]:
            known = {**self._graph.constants, **values}
            self._graph.run(equations, known)
            return {one.changes[0]: known[one.inputs[0]] for one in changes}

        given = {name: values[name] for name in entering if name in values}
        return self._compiled(compute)(given, {}) if changes else {}

    def _program(self, one: Pass) -> tuple[list[str], Any]:
        equations, entering = self._equations(one.invariants, one.operations)
        changes = [operation for operation in one.operations if operation.changes]
        stored, summed = sorted(one.stores), self.types_of_sums(one)

        def compute(values: dict[str, Any], so_far: dict[str, Any]) -> Any:
            known = {**self._graph.constants, **values}
            self._graph.run(equations, known)
            added = {
                name: value + known[name].astype(value.dtype) for name, value in so_far.items()
            }
            listed = {name: known[name] for name in summed if name not in so_far}
            new = {operation.changes[0]: known[operation.inputs[0]] for operation in changes}
            return added, {name: known[name] for name in stored}, listed, new

        return sorted({*entering, *one.reads}), self._compiled(compute)

    def _equations(
        self, invariants: set[str], operations: list[Operation]
    ) -> tuple[list[str], set[str]]:
        """Return the equations that a pass runs, in order, and what enters it."""
        found = {one.name for one in operations}
        entering = {name for one in operations for name in one.outputs}
        pending = [*invariants]
        while pending:
            name = pending.pop()
            maker = self._stages.maker[name]
            if maker.is_sum or maker.name not in self._graph.equations:
                entering.add(name)
            elif maker.name not in found:
                found.add(maker.name)
                pending += maker.inputs
        ordered = [name for name in self._graph.equations if name in found]
        return ordered, entering


class StagedBatch:
    """One batch, which runs pass by pass.

    Args:
        stages: the stages of a micro-batch.
        programs: for each micro-batch, its programs.
        inputs: for each micro-batch, what enters it, in the order of the graph's inputs.
        is_on_host: whether what is stored between passes is in the memory of the host.
    """

    def __init__(
        self,
        stages: Stages,
        programs: list[Programs],
        inputs: list[list[Any]],
        *,
        is_on_host: bool,
    ) -> None:
        self._is_on_host = is_on_host
        self._stages, self._programs = stages, programs
        self._inputs = [one.entering(values) for one, values in zip(programs, inputs)]
        self._stored: list[dict[str, Any]] = [{} for _ in inputs]
        self.shared: dict[str, Any] = {}
        """Sums over micro-batches, and the values that variables have got, by name."""
        self.sums: dict[str, Any] = {}
        """What micro-batches return, added up, by name."""
        self.listed: list[dict[str, Any]] = [{} for _ in inputs]
        """For each micro-batch, what it returns and is not added up."""

    def run(self, passes: list[Pass], listed: set[str]) -> None:
        """Run all passes; the results with the names `listed` are not added up."""
        for one in passes:
            self._run(one, listed)
        values = {**self._inputs[0], **self.shared}
        self.shared.update(self._programs[0].final(values))

    def _run(self, one: Pass, listed: set[str]) -> None:
        types = self._programs[0].types_of_sums(one)
        so_far = {
            name: jnp.zeros(each.shape, widened(each.dtype))
            for name, each in types.items()
            if name not in listed
        }
        for number, program in enumerate(self._programs):
            stored = self._stored[number]
            values = {**self._inputs[number], **self.shared, **stored}
            so_far, new, rows, changed = program.run(one, values, so_far)
            for name in one.frees:
                del stored[name]
            stored.update(jax.device_get(new) if self._is_on_host else new)
            self.listed[number].update(rows)
            self.shared.update(changed)
        for operation in one.sums:
            (name,) = operation.inputs
            self.shared[operation.outputs[0]] = so_far[name].astype(types[name].dtype)
        results = {self._stages.results[position] for position in one.results}
        self.sums.update((name, so_far[name]) for name in results - listed)
