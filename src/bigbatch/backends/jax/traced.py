"""A function of a micro-batch, and facts about it from its trace on JAX."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, Callable, Iterable

import jax
import jax.numpy as jnp

from bigbatch.backends.jax import data as batches
from bigbatch.backends.jax.compat import number_of_terms
from bigbatch.backends.jax.dependence import independent_outputs, last_updates
from bigbatch.backends.jax.draws import MicrobatchRows, drawing, places_of
from bigbatch.backends.jax.ops import Rows, weight_dtype
from bigbatch.backends.jax.state import of_microbatches, of_updates, scope_of, values_of
from bigbatch.backends.jax.steps import UpdateResults, given, noting_step
from bigbatch.core.passes import NONE, Order
from bigbatch.core.python_random import PythonDraws
from bigbatch.errors import ContextError, explain

CHANGES_ITSELF = explain(
    received="a train_step that computes weights, or variables of an optimizer, from samples "
    "without the optimizer",
    expected="updates by optimizer.stateless_apply; other changes may depend on weights alone",
    fix="return the trainable and optimizer variables that stateless_apply returned; keep "
    "other values that change in variables that are not trainable",
)


class TracedMicrobatch:
    """A function of a micro-batch, and what is known of it when it has been traced.

    Args:
        model: a built and compiled Keras model.
        compute: called with a vector of numbers that are the same for the whole batch, and the
            data of a micro-batch; returns a nest of arrays, and may assign variables.
        made: returns the results of updates that micro-batches make again.
    """

    def __init__(
        self,
        model: Any,
        compute: Callable[[Any, Any], Any],
        made: Callable[[], list[UpdateResults]],
    ) -> None:
        self._model = model
        self._compute = compute
        self._made = made
        self.once: dict[int, Any] = {}
        """The variables that change once per batch: the same for any samples. By `id`."""
        self.changed: dict[int, Any] = {}
        """Those, and others, if updates are to be undone: never here."""
        self.forget()

    def forget(self) -> None:
        """Forget what was traced."""
        self.order: Order | None = None
        """What depends on updates that are made before; known when traced."""
        self._variables: tuple[list[Any], list[Any]] | None = None
        self._changed: list[list[Any]] = []
        self._given: list[tuple[int, Any]] = []
        self._left: list[Any] = []
        self._drawn: list[Any] = []
        self._effects: set[str] = set()
        self.draws_by_python = False
        """Whether Python draws without a generator when a micro-batch is traced."""
        self._is_rows: list[bool] = []
        self._structure: Any = None
        self._shapes: Any = None
        self.start_anew(None)

    def start_anew(self, places: list[str | None] | None) -> None:
        """Make a program that has not been traced yet, for draws in such places."""
        self._places = places
        # Methods, not closures of this call: of a lambda there would be a second trace.
        self._program: Any = jax.jit(self._pure_again())

    def _pure_again(self) -> Callable[..., Any]:
        """Return `pure` as a function that nothing has been traced of."""
        return lambda *arguments: self.pure(*arguments)

    def _look_at(self, types: Any, size: int | None) -> tuple[Any, tuple[Any, ...]]:
        """Trace a micro-batch; return its jaxpr, and the types of its arguments."""
        model = self._model
        self._variables = of_updates(model), of_microbatches(model)
        count = batches.sample_count(types)
        count = min(count, size) if size else count
        arguments = self._abstract_arguments(types, count)
        own = PythonDraws()
        with own.drawing():
            traced = self._program.trace(*arguments)
        self.draws_by_python |= own.has_drawn
        own.go_on()
        drawn = self._drawn
        if drawn:
            other = self._abstract_arguments(types, count + 1)
            # A model may be made for one size only: then a draw of as many rows is theirs.
            with contextlib.suppress(Exception):
                jax.eval_shape(self.pure, *other)
            places = places_of(drawn, self._drawn, count)
            if places != self._places:
                self.start_anew(places)
                traced = self._program.trace(*arguments)
        self._shapes = traced.out_info[0]
        self._effects |= {type(one).__name__ for one in traced.jaxpr.effects}
        self._find_once(traced.jaxpr, arguments)
        self._find_order(traced.jaxpr)
        return traced.jaxpr, arguments

    def _find_once(self, jaxpr: Any, arguments: tuple[Any, ...]) -> None:
        """Note which variables get a value that does not depend on samples."""
        sizes = [len(jax.tree.leaves(one)) for one in arguments]
        state_inputs = range(sizes[0], sizes[0] + sizes[1])
        sample_inputs = range(sum(sizes[:-1]), sum(sizes))
        outputs = self._changing_outputs(jaxpr)
        same = independent_outputs(jaxpr.jaxpr, sample_inputs, dict(zip(outputs, state_inputs)))
        for variable, output in zip(self._changing(), outputs):
            if output in same and not self._is_metric(variable):
                self.once[id(variable)] = variable
            else:
                self.once.pop(id(variable), None)

        for output in range(outputs.stop, len(jaxpr.jaxpr.outvars)):
            if output not in same:
                raise ContextError(CHANGES_ITSELF)

    def _changing_outputs(self, jaxpr: Any) -> range:
        """Return the numbers of the outputs that variables get which micro-batches change."""
        stop = len(jaxpr.jaxpr.outvars) - len(self._given) - len(self._left)
        return range(stop - len(self._changing()), stop)

    def _find_order(self, jaxpr: Any) -> None:
        """Note what depends on updates that the `train_step` has made before."""
        outputs = self._changing_outputs(jaxpr)
        totals = jax.tree.unflatten(self._structure, self._numbers_of_leaves())
        if not hasattr(totals, "gradients"):
            return
        last = last_updates(jaxpr.jaxpr)
        of_gradients = [[*jax.tree.leaves(one)] for one in totals.gradients]
        for output, (number, _) in enumerate(self._given, outputs.stop):
            of_gradients[number - len(self._made())].append(output)
        of_state = [n for n, one in zip(outputs, self._changing()) if id(one) in self.once]
        others = set(range(outputs.stop)) - {n for some in of_gradients for n in some}

        def last_of(numbers: Iterable[int]) -> int:
            return max((last[number] for number in numbers), default=NONE)

        state = last_of(of_state)
        has_own_changes = bool(self._given or self._left)
        if has_own_changes:  # to be made once, after all updates
            state = len(of_gradients) - 1
        needed = [last_of(some) for some in of_gradients]
        for number, _ in self._given:  # just before an update: after the one before it
            place = number - len(self._made())
            needed[place] = max(needed[place], number - 1)
        values = last_of(others.difference(of_state))
        self.order = Order(self._changed, needed, values, state, has_own_changes)

    def _numbers_of_leaves(self) -> list[int]:
        """Return for each leaf of what `compute` returns the number of its output."""
        added = itertools.count()
        listed = itertools.count(self._is_rows.count(False))
        return [next(listed if is_rows else added) for is_rows in self._is_rows]

    def _is_metric(self, variable: Any) -> bool:
        return any(variable is one for one in self._model.metrics_variables)

    def _abstract_arguments(self, types: Any, count: int) -> tuple[Any, ...]:
        def micro(leaf: Any) -> Any:
            return jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype)

        numbers = 2 + number_of_terms(self._model)
        fixed = [*values_of(self._fixed()), *self._results()]
        changing = values_of(self._changing())
        context = jax.ShapeDtypeStruct((numbers,), weight_dtype())
        start = jax.ShapeDtypeStruct((), jnp.uint32)
        return fixed, changing, context, start, jax.tree.map(micro, types)

    def _fixed(self) -> list[Any]:
        """Return the variables that micro-batches read: weights, and those of optimizers."""
        return self._variables[0] if self._variables else of_updates(self._model)

    def _changing(self) -> list[Any]:
        """Return the variables that micro-batches may change."""
        return self._variables[1] if self._variables else of_microbatches(self._model)

    def _results(self) -> list[Any]:
        """Return the values that micro-batches are given of updates that have been made."""
        return [value for one in self._made() for value in one.values]

    def pure(self, fixed: Any, changing: Any, context: Any, start: Any, data: Any) -> Any:
        """Return what is added up, rows that are listed, and values of what may change.

        And those that a `train_step` itself gives weights and optimizers.
        """
        weights, variables, made = self._fixed(), self._changing(), self._made()
        rows = MicrobatchRows(start, batches.sample_count(data), self._places)
        of_weights, results = fixed[: len(weights)], iter(fixed[len(weights) :])
        mapping = [*weights, *variables], [*of_weights, *changing]
        with scope_of(*mapping) as current, drawing(rows), noting_step(weights) as step:
            with given(made, [[next(results) for _ in one.values] for one in made]):
                result = self._compute(context, data)
            step.close()
            values = current()
        self._drawn, self._changed = rows.drawn, step.changed
        self._given = [(number, one) for number, one, _ in step.given]
        self._left = [one for one, _ in step.left]
        leaves, self._structure = jax.tree.flatten(result, is_leaf=_is_rows)
        self._is_rows = [_is_rows(leaf) for leaf in leaves]
        added = [leaf for leaf in leaves if not _is_rows(leaf)]
        listed = [leaf.values for leaf in leaves if _is_rows(leaf)]
        own = [value for *_, value in step.given], [value for _, value in step.left]
        return (added, listed, values[len(weights) :], *own)

    def can_run(self, types: Any) -> bool:
        """Say whether `compute` takes data of such types."""
        types = jax.tree.map(batches.type_of, types)
        with contextlib.suppress(Exception):
            count = batches.sample_count(types)
            jax.eval_shape(self.pure, *self._abstract_arguments(types, count))
            return True
        return False

    @property
    def is_any_size(self) -> bool:
        """Whether micro-batches may have any number of samples, as far as is declared."""
        inputs = getattr(self._model, "inputs", None) or ()
        return all(one.shape[:1] in ((), (None,)) for one in inputs)

    @property
    def draws_by_sample(self) -> bool:
        """Whether each sample has random numbers of its own, by its place in the batch."""
        return any(self._drawn if self._places is None else self._places)

    def assigned(self) -> list[Any]:
        """Return the variables that a micro-batch may change, metrics left out."""
        return [one for one in self._changing() if not self._is_metric(one)]

    def effects(self) -> set[str]:
        """Return what a micro-batch does outside of its program."""
        return self._effects

    def run_eagerly(self, context: Any, data: Any, start: int) -> Any:
        """Return what `compute` does for one micro-batch, run by Python, to be looked at."""
        variables = [*self._fixed(), *self._changing()]
        rows = MicrobatchRows(jnp.uint32(start), batches.sample_count(data), self._places)
        with contextlib.ExitStack() as stack:
            stack.enter_context(scope_of(variables, values_of(variables)))
            stack.enter_context(drawing(rows))
            stack.enter_context(noting_step(self._fixed()))
            return self._compute(context, data)


def _is_rows(leaf: Any) -> bool:
    return isinstance(leaf, Rows)
