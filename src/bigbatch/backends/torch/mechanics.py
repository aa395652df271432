"""How the engine runs on torch: one replica, everything as it comes."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any, Callable, Iterable, Iterator

import keras
import torch

from bigbatch.backends.base import Backend
from bigbatch.backends.one_replica import OneReplica
from bigbatch.backends.torch import data, dependence, few_samples, ops, rollback
from bigbatch.backends.torch.accumulation import Accumulation, SameForAll
from bigbatch.backends.torch.memory import OUT_OF_MEMORY, Memory, naming_out_of_memory
from bigbatch.backends.torch.sample import TorchSample, sample_of
from bigbatch.backends.torch.step_trial import told_by_step
from bigbatch.backends.torch.sums import GradientSums
from bigbatch.backends.torch.table import Table
from bigbatch.backends.torch.two_passes import Passes
from bigbatch.core.passes import Order

_SHOWN = 5
"""How many layers are named."""


class Numbers:
    """A row of numbers that can be replaced."""

    def __init__(self) -> None:
        self._value = ops.stack([0, 0])

    def assign(self, value: Any) -> None:
        """Replace the numbers."""
        self._value = value

    def read_value(self) -> Any:
        """Return the numbers."""
        return self._value


class TorchBackend(OneReplica, Backend):
    """The part of a backend that knows torch."""

    ops = ops
    data = data
    few_samples = few_samples
    TELLS_ORDER = True
    OUT_OF_MEMORY = OUT_OF_MEMORY

    def compiled(
        self, model: Any, function: Callable[..., Any], *, is_optimised: bool = True
    ) -> Callable[..., Any]:
        del model, is_optimised

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with naming_out_of_memory():
                return function(*args, **kwargs)

        return call

    def is_traced(self, model: Any) -> bool:
        del model
        return False

    def is_first_worker(self, model: Any) -> bool:
        del model
        return True

    def gradient_sums(self, model: Any, *, apart: bool) -> GradientSums:
        return GradientSums(model, in_grad=not apart and not self.has_custom_train_step(model))

    def accumulation(
        self,
        model: Any,
        compute: Callable[[Any, Any], Any],
        kept: Callable[[], list[Any]],
        before: Callable[[Any], Any],
        exact: Any = None,
        made: Callable[[], list[Any]] = list,
    ) -> Accumulation:
        del kept, made
        assert exact is None  # which `refuse_exact` has refused
        if self.jit_compile(model):
            warnings.warn(
                "bigbatch: jit_compile=True has no effect on torch while a model accumulates: "
                "micro-batches run without torch.compile. The result is the same.",
                stacklevel=2,
            )
        return Accumulation(SameForAll(self, model), compute, before)

    def draws_by_total(self, accumulation: Accumulation) -> bool:
        return accumulation.draws_by_total

    def remarks(self, accumulation: Accumulation | Passes) -> list[str]:
        names = accumulation.with_other_draws()
        shown = ", ".join(names[:_SHOWN])
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        said = f"bigbatch: random draws differ from the full batch: {shown}{more}"
        return [said] if names else []

    def two_passes(self, model: Any, kept: Callable[[], list[Any]]) -> Any:
        del kept
        return Passes(SameForAll(self, model), lambda: self.state_of(model))

    def remarks_of_two_passes(self, passes: Passes) -> list[str]:
        return self.remarks(passes)

    def trying_two_passes(
        self, passes: Passes, count: int
    ) -> contextlib.AbstractContextManager[None]:
        return passes.same.few_samples(count)

    @contextlib.contextmanager
    def without_effects(self, model: Any) -> Iterator[None]:
        copies = rollback.Copies(self.state_of(model))
        try:
            with torch.no_grad():
                yield
        finally:
            copies.put_back()

    def replica_vector(self, model: Any) -> Numbers:
        del model
        return Numbers()

    def rollback(
        self, model: Any, others: Iterable[Any], weights: Iterable[Any] = ()
    ) -> rollback.Rollback:
        weights = map(self.native, weights)
        return rollback.Rollback([*self.state_of(model), *others], weights)

    def unchanged(self, variables: Iterable[Any]) -> Any:
        return rollback.unchanged(variables)

    @contextlib.contextmanager
    def updating(
        self, model: Any, captured: list[Any], results: Any
    ) -> Iterator[Callable[..., None]]:
        del model, results

        def apply(
            gradients: list[list[Any]], made: Callable[[int], None] = lambda _: None
        ) -> None:
            for one, mean in zip(captured, gradients):
                if one.is_in_pairs:
                    one.optimizer.apply_gradients(zip(mean, one.variables))
                else:
                    one.optimizer.apply(mean, one.variables)
                made(one.number)

        with torch.no_grad():
            yield apply

    def place_in_trace(self) -> int | None:
        operations = dependence.noted_now()
        return None if operations is None else len(operations.all)

    def try_step(
        self, model: Any, run: Callable[[Any], Any], data: Any, put_back: Callable[[], None]
    ) -> Any:
        return told_by_step(self, model, run, data, put_back)

    def order_of_updates(
        self,
        model: Any,
        captured: list[tuple[Any, list[Any]]],
        values: Any,
        apart: Any,
        same: Any,
    ) -> Order | None:
        del model, apart, same
        operations = dependence.noted_now()
        if operations is None or not captured:
            return None
        applies = [
            dependence.NotedApply(
                one.place, gradients, [*one.variables, *self.changed_by_apply(one.optimizer)]
            )
            for one, gradients in captured
        ]
        return operations.order(applies, values)

    def discarding(self, model: Any, updates: Iterable[Any]) -> Any:
        del model
        return rollback.discarding(updates)

    def update_results(
        self, model: Any, variables: Iterable[Any], before: Callable[[Any], Any]
    ) -> rollback.UpdateResults:
        del model
        return rollback.UpdateResults([self.native(one) for one in variables], before)

    def build_optimizers(self, model: Any, captured: list[Any]) -> list[Any]:
        del model
        for one in captured:
            if not one.optimizer.built:
                one.optimizer.build(one.variables)
        return [one.optimizer for one in captured]

    def out_of_memory(self, message: str) -> Exception:
        return OUT_OF_MEMORY(message)

    def table(self, *, rows: int, columns: int) -> Table:
        return Table(rows=rows, columns=columns)

    def memory(self, variables: Iterable[Any]) -> Memory:
        return Memory(variable.device for variable in variables)

    def sample(self, model: Any, data: Any, rows: int) -> TorchSample:
        return sample_of(self, model, data, rows)

    def switch(self, model: Any) -> Any:
        del model
        return keras.Variable(False, dtype="bool", trainable=False)

    def is_off(self, switch: Any) -> bool:
        return not bool(switch.value)

    def shaped(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        del variables
        return gradients
