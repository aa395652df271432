"""Run a function on the micro-batches of a batch in stages, with sums over them in between."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator

import jax
import jax.numpy as jnp

from bigbatch.backends.jax import data as batches
from bigbatch.backends.jax.accumulation import Accumulation
from bigbatch.backends.jax.exact.graph import MicrobatchGraph
from bigbatch.backends.jax.exact.run import Programs, StagedBatch
from bigbatch.backends.jax.exact.sums import marking
from bigbatch.backends.jax.memory import noticing
from bigbatch.backends.jax.state import assign
from bigbatch.core.exact import Storage, Stored
from bigbatch.core.stages import Stages
from bigbatch.core.storage import Pass, passes, times_run
from bigbatch.errors import ContextError, explain

_OWN_CHANGES = explain(
    received='batch_norm="exact" and a train_step that changes weights beside the optimizer',
    expected="changes of weights by optimizer.stateless_apply",
    fix='make them there, or use batch_norm="pooled"',
)
_NO_MEASURE = explain(
    received='microbatch_size="auto", or plan, with batch_norm="exact" on JAX',
    expected="a number: the compiler tells what one program takes, and stages are many",
    fix="pass microbatch_size=32, or what fits",
)


class StagedAccumulation(Accumulation):
    """The sum of `compute` over the micro-batches of a batch, which run in stages.

    Args:
        storage: what is stored between stages.
        others: as for `Accumulation`.
    """

    def __init__(self, storage: Storage, *others: Any) -> None:
        self._storage = storage
        super().__init__(*others, is_eager=False)

    def forget(self) -> None:
        """Forget what was traced."""
        super().forget()
        self._types: Any = None
        self._graphs: dict[int, MicrobatchGraph] = {}
        self._stages: Any = None
        self._programs: dict[int, Programs] = {}
        self._loops: dict[Stored, list[Pass]] = {}
        self._compiled: Callable[..., Any] = functools.partial(jax.jit, donate_argnums=1)

    def pure(self, fixed: Any, changing: Any, context: Any, start: Any, data: Any) -> Any:
        with marking():
            return super().pure(fixed, changing, context, start, data)

    def _shard(self, jaxpr: Any, arguments: tuple[Any, ...]) -> None:
        del jaxpr, arguments  # sums between stages are those of one device

    def prepare(self, types: Any, size: int | None) -> None:
        """Trace `compute` for data of such types, and put what it does into stages."""
        super().prepare(types, size)
        if self._given or self._left:
            raise ContextError(_OWN_CHANGES)
        count = batches.sample_count(types)
        count = min(count, size) if size else count
        self._types = jax.tree.map(batches.type_of, types)
        self._graphs.clear()
        self._programs.clear()
        self._loops.clear()
        graph = self._graph(count)
        pairs = zip(self._names_of_state(), self._changing())
        kept = [place for place, one in pairs if id(one) not in self.once]
        operations = graph.operations(self._graph(count + 1))
        self._stages = Stages(operations, graph.results, kept)
        self.remarks = [f"bigbatch: {self}"] if self._stages.depth else []

    def __str__(self) -> str:
        loops, depth = self.passes(), self._stages.depth
        return (
            f"{depth} sums over the batch one after the other, {len(loops)} loops over its "
            f"micro-batches, {self._storage.choice(depth)}: convolutions and matrix "
            f"products run {times_run(self._stages, loops):.2f} times"
        )

    def _graph(self, count: int) -> MicrobatchGraph:
        """Return what a micro-batch of so many samples does."""
        if count not in self._graphs:
            traced = jax.make_jaxpr(self.pure)(*self._abstract_arguments(self._types, count))
            numbers, outputs = self._numbers_of_state(), self._changing_outputs(traced)
            samples = range(numbers.stop + 1, len(traced.jaxpr.invars))
            variables = dict(zip(numbers, outputs))
            results = [*range(outputs.start)]
            self._graphs[count] = MicrobatchGraph(traced, samples, variables, results)
        return self._graphs[count]

    def _numbers_of_state(self) -> range:
        """Return the numbers of the inputs that are variables which micro-batches change."""
        first = len(self._fixed()) + len(self._results())
        return range(first, first + len(self._changing()))

    def _names_of_state(self) -> list[str]:
        """Return the names of those inputs."""
        names = next(iter(self._graphs.values())).inputs
        return [names[number] for number in self._numbers_of_state()]

    def add(self, context: Any, data: Any, size: int | None = None) -> None:
        """Run the micro-batches of a batch, of `size` samples each, stage by stage."""
        count = batches.checked_count(data) if size else batches.sample_count(data)
        size = min(size or count, count)
        cuts = [(start, min(size, count - start)) for start in range(0, count, size)]
        fixed = [*self._fixed_values(), *self._first.values(), self._padded(context)]

        def entering(start: int, number: int) -> list[Any]:
            part = batches.rows(data, start, number)
            return [*fixed, jnp.uint32(self._samples + start), *jax.tree.leaves(part)]

        programs = [self._programs_of(number) for _, number in cuts]
        inputs = [entering(*cut) for cut in cuts]
        is_on_host = self._storage.is_on_host
        batch = StagedBatch(self._stages, programs, inputs, is_on_host=is_on_host)
        rows = self._is_rows.count(False)  # those that are listed come after what is added
        with noticing():
            batch.run(self.passes(), set(self._stages.results[rows:]))
        self._samples += count
        self._sums = [batch.sums[name] for name in self._stages.results[:rows]]
        names = self._stages.results[rows:]
        self._listed += [[listed[name] for name in names] for listed in batch.listed]
        values = [
            batch.shared.get(place, one.value)
            for place, one in zip(self._names_of_state(), self._changing())
        ]
        assign(self._changing(), values)

    def passes(self) -> list[Pass]:
        """Return the passes of a batch, with what is stored now."""
        stored = self._storage.choice(self._stages.depth)
        if stored not in self._loops:
            self._loops[stored] = passes(self._stages, stored.every, refills=stored.refills)
        return self._loops[stored]

    def _programs_of(self, count: int) -> Programs:
        if count not in self._programs:
            graph = self._graph(count)
            graph.check_like(self._graphs[min(self._graphs)])
            self._programs[count] = Programs(graph, self._stages, self._compiled)
        return self._programs[count]

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Return a block in which few samples run operation by operation."""
        before = self._programs, self._compiled
        self._programs, self._compiled = {}, lambda function: function
        try:
            yield
        finally:
            self._programs, self._compiled = before

    def change_once(self, context: Any, data: Any, size: int | None = None) -> None:
        """Raise: what a `train_step` itself does with weights is refused before."""
        del context, data, size
        raise ContextError(_OWN_CHANGES)

    def note_bytes(self, data: Any, size: int) -> bool:
        """Raise: how much many programs take together, the compiler does not say."""
        del data, size
        raise ContextError(_NO_MEASURE)
