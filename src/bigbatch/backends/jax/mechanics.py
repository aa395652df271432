"""How the engine runs on JAX: calls of compiled programs, sums between them, values kept."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Callable, Iterable, Iterator

import jax

from bigbatch.backends.base import Backend
from bigbatch.backends.jax import data, few_samples, ops, state, steps
from bigbatch.backends.jax.accumulation import Accumulation
from bigbatch.backends.jax.compat import weights_of
from bigbatch.backends.jax.devices import current_shards
from bigbatch.backends.jax.exact.accumulation import StagedAccumulation
from bigbatch.backends.jax.memory import Memory, OutOfMemoryError, noticing
from bigbatch.backends.jax.processes import largest, number_of_processes
from bigbatch.backends.jax.sample import JaxSample, sample_of
from bigbatch.backends.jax.table import Table
from bigbatch.backends.jax.two_passes import TwoPasses
from bigbatch.backends.one_replica import OneReplica
from bigbatch.core.passes import Order
from bigbatch.errors import ArgumentError, explain

_SWITCHES: weakref.WeakKeyDictionary[Any, state.Cell] = weakref.WeakKeyDictionary()

_DRAWN_BY_PYTHON = (
    "bigbatch: random draws differ from the full batch: Python's random or numpy.random, which "
    "is drawn from once, when JAX traces a micro-batch"
)


class JaxBackend(OneReplica, Backend):
    """The part of a backend that knows JAX."""

    ops = ops
    data = data
    few_samples = few_samples
    OUT_OF_MEMORY = OutOfMemoryError

    def compiled(
        self, model: Any, function: Callable[..., Any], *, is_optimised: bool = True
    ) -> Callable[..., Any]:
        """Return a function of the engine as it is: what it calls is compiled."""
        del model, is_optimised
        return function

    def is_traced(self, model: Any) -> bool:
        return not self.runs_eagerly(model)

    def runs_eagerly(self, model: Any) -> bool:
        """Say whether nothing of a model is compiled."""
        return bool(model.run_eagerly or not model.jit_compile)

    def processes(self, model: Any) -> int:
        del model
        shards = current_shards()
        return 1 if shards is None else shards.processes

    def shares_batches(self, model: Any) -> bool:
        del model
        return number_of_processes() > 1

    def is_multi_worker(self, model: Any) -> bool:
        return self.processes(model) > 1

    def is_first_worker(self, model: Any) -> bool:
        del model
        return number_of_processes() == 1 or jax.process_index() == 0

    def largest_of_all(self, model: Any, value: int) -> int:
        del model
        return largest(value)

    def on_own_devices(self, model: Any) -> contextlib.AbstractContextManager[None]:
        return state.on_own_devices(model)

    def gradient_sums(self, model: Any, *, apart: bool) -> None:
        del model, apart  # micro-batches return their gradients

    def accumulation(
        self,
        model: Any,
        compute: Callable[[Any, Any], Any],
        kept: Callable[[], list[Any]],
        before: Callable[[Any], Any],
        exact: Any = None,
        made: Callable[[], list[Any]] = list,
    ) -> Accumulation:
        del kept
        if exact is not None:
            return StagedAccumulation(exact, model, compute, before, made)
        return Accumulation(model, compute, before, made, is_eager=self.runs_eagerly(model))

    def two_passes(self, model: Any, kept: Callable[[], list[Any]]) -> Any:
        raise NotImplementedError("see `loss_of_whole_batch`")

    def loss_of_whole_batch(self, model: Any, running: Callable[..., Any]) -> TwoPasses:
        if number_of_processes() > 1:
            raise ArgumentError(
                explain(
                    received="coupled=True for a model that several processes train",
                    expected="a process that has the whole batch",
                    fix="train in one process with all its devices",
                )
            )
        return TwoPasses(self, model, running, is_eager=self.runs_eagerly(model))

    def trying_two_passes(
        self, passes: TwoPasses, count: int
    ) -> contextlib.AbstractContextManager[None]:
        del count
        return passes.trying()

    def replica_vector(self, model: Any) -> state.Cell:
        del model
        return state.Cell(None)

    def rollback(
        self, model: Any, others: Iterable[Any], weights: Iterable[Any] = ()
    ) -> state.Rollback:
        del others
        everything = state.of_updates(model) if list(weights) else []
        return state.Rollback(self.state_of(model), everything)

    def unchanged(
        self, variables: Iterable[Any]
    ) -> contextlib.AbstractContextManager[Callable[[], None]]:
        return state.unchanged(variables)

    @contextlib.contextmanager
    def updating(
        self, model: Any, captured: list[Any], results: Any
    ) -> Iterator[Callable[..., None]]:
        del model, results

        def apply(
            gradients: list[list[Any]], made: Callable[[int], None] = lambda _: None
        ) -> None:
            for one, mean in zip(captured, gradients):
                self._apply(one, mean)
                made(one.number)

        yield apply

    def _apply(self, one: Any, gradients: list[Any]) -> None:
        weights, slots = one.variables, one.optimizer.variables
        if [*map(id, weights)] != [*map(id, weights_of(one.optimizer))]:
            one.optimizer.apply(gradients, weights)  # some of them, in a scope of the user's
            return
        new_slots: Any
        new, new_slots = one.optimizer.stateless_apply(
            state.values_of(slots), gradients, state.values_of(weights)
        )
        state.assign([*weights, *slots], [*new, *new_slots])

    def note_update(self, captured: Any) -> None:
        step = steps.current_step()
        if step is not None:
            variables = [*captured.variables, *captured.optimizer.variables]
            changed = [*captured.variables, *self.changed_by_apply(captured.optimizer)]
            step.note_update(captured.number, variables, changed)

    def shows_order_later(self, model: Any, same: Any) -> bool:
        del model
        return isinstance(same, jax.core.Tracer)

    def order_of_trace(self, accumulation: Accumulation) -> Order | None:
        return accumulation.order

    def update_results(
        self, model: Any, variables: Iterable[Any], before: Callable[[Any], Any]
    ) -> steps.UpdateResults:
        del model, before
        return steps.UpdateResults(list(variables))

    def build_optimizers(self, model: Any, captured: list[Any]) -> list[Any]:
        del model
        return [one.optimizer for one in captured]

    def update_function(
        self,
        model: Any,
        update: Callable[[Any], Any],
        others: list[Any],
        *,
        overwrites: bool = True,
    ) -> Callable[[Any], Any]:
        """Return one program that updates a model; it overwrites weights and optimizer."""
        results: list[steps.UpdateResults] = []

        def pure(own: Any, more: Any, noted: Any, totals: Any) -> Any:
            before = state.values_of(others)
            state.assign(others, noted)
            try:
                variables = [*state.of_updates(model), *state.of_microbatches(model)]
                with state.scope_of(variables, [*own, *more]) as current:
                    with steps.keeping() as kept:
                        logs = update(totals)
                    values = current()
                results[:] = [one for one, _ in kept]
                return logs, values, state.values_of(others), [value for _, value in kept]
            finally:
                state.assign(others, before)

        overwritten = 0 if overwrites else ()
        program = (
            pure if self.runs_eagerly(model) else jax.jit(pure, donate_argnums=overwritten)
        )

        def call(totals: Any) -> Any:
            variables = state.of_updates(model), state.of_microbatches(model)
            own, more, noted = map(state.values_of, (*variables, others))
            own = state.without_repetitions(own)
            with noticing():
                logs, new, noted, kept = program(own, more, noted, totals)
            state.assign([one for part in variables for one in part], new)
            state.assign(others, noted)
            for one, values in zip(results, kept):
                one.values = values
            return logs

        return call

    def reading_function(self, model: Any, read: Callable[..., Any]) -> Callable[..., Any]:
        """Return one program: by themselves, its operations would wait for micro-batches."""

        def pure(values: Any, given: Any) -> Any:
            with state.scope_of(self.metrics_variables(model), values):
                return read(*given)

        program = jax.jit(pure)

        def call(*given: Any) -> Any:
            is_simple = all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(given))
            if not is_simple or self.runs_eagerly(model):
                return read(*given)
            return program(state.values_of(self.metrics_variables(model)), given)

        return call

    def train_function(
        self, model: Any, train: Callable[[Any], dict[str, Any]]
    ) -> Callable[..., Any]:
        return state.train_function(model, train)

    def out_of_memory(self, message: str) -> Exception:
        return OutOfMemoryError(message)

    def table(self, *, rows: int, columns: int) -> Table:
        return Table(rows=rows, columns=columns)

    def memory(self, variables: Iterable[Any]) -> Memory:
        return Memory(variables)

    def knows_bytes(self, accumulation: Accumulation, data: Any, size: int) -> bool:
        return accumulation.note_bytes(data, size)

    def totals_so_far(self, accumulation: Accumulation) -> Any:
        return accumulation.so_far()

    def remarks(self, accumulation: Accumulation) -> list[str]:
        by_python = [_DRAWN_BY_PYTHON] if accumulation.draws_by_python else []
        return [*accumulation.remarks, *by_python]

    def switch(self, model: Any) -> state.Cell:
        if model not in _SWITCHES:
            _SWITCHES[model] = state.Cell(False)
        return _SWITCHES[model]

    def sample(self, model: Any, data: Any, rows: int) -> JaxSample:
        return sample_of(self, model, data, rows)

    def shaped(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        del variables
        return gradients
