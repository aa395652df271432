"""Changes that a `train_step` makes to weights and optimizers, undone until the update.

While a micro-batch runs, an update leaves its variables as they are, or gives them the results
of the real update once that has been made. Either is marked in the trace, which so tells what
depends on which update. All other changes are the `train_step`'s own.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Iterator

from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import get_opaque_trace_state

from bigbatch.backends.jax.state import assign, values_of
from bigbatch.errors import ContextError, explain

_MARK = "bigbatch: update "
_INSIDE = explain(
    received="a train_step that updates weights inside jax.jit, jax.lax.cond, a loop of "
    "jax.lax, or a function that is differentiated",
    expected="calls of optimizer.stateless_apply that can be numbered: the same ones for every "
    "batch",
    fix="call stateless_apply in train_step itself, which Keras compiles, in a Python loop if "
    "there are several updates",
)
_local = threading.local()


class Step:
    """One run of a `train_step`, in which variables have other values."""

    def __init__(self, variables: list[Any]) -> None:
        self._expected = dict(zip(map(id, variables), values_of(variables)))
        self._variables = variables
        self._trace = get_opaque_trace_state(convention="flax")
        self.changed: list[list[Any]] = []
        """The variables that each update changes, in order."""
        self.given: list[tuple[int, Any, Any]] = []
        """What the `train_step` has made of a variable before an update, with its number."""
        self.left: list[tuple[Any, Any]] = []
        """What it has made of variables by its end."""

    def note_update(self, number: int, variables: list[Any], changed: list[Any]) -> None:
        """Note an update that is given variables, and changes some of them."""
        if get_opaque_trace_state(convention="flax") != self._trace:
            raise ContextError(_INSIDE)
        for one in variables:
            if one.value is not self._expected[id(one)]:
                self.given.append((number, one, one.value))
        for one in changed:
            one.assign(checkpoint_name(one.value, f"{_MARK}{number}"))
        self.expect(changed)
        self.changed.append(changed)

    def expect(self, variables: list[Any]) -> None:
        """Take the values that variables have now for those of an update."""
        self._expected.update(zip(map(id, variables), values_of(variables)))

    def has_any(self, values: list[Any]) -> bool:
        """Say whether any of these are values of variables that updates change."""
        known = {id(one) for one in self._expected.values()}
        return any(id(one) in known for one in values)

    def close(self) -> None:
        """Note what is left at the end."""
        pairs = zip(self._variables, values_of(self._variables))
        self.left = [pair for pair in pairs if pair[1] is not self._expected[id(pair[0])]]


@contextlib.contextmanager
def noting_step(variables: list[Any]) -> Iterator[Step]:
    """Return a block in which a `train_step` runs; variables have the values of now before."""
    before = current_step()
    _local.step = step = Step(variables)
    try:
        yield step
    finally:
        _local.step = before


def current_step() -> Step | None:
    """Return the `train_step` that runs in this thread, if one does."""
    return getattr(_local, "step", None)


def number_of_mark(equation: Any) -> int | None:
    """Return the update whose result an equation of a jaxpr is; `None` if of none."""
    name = str(equation.params.get("name", "")) if equation.primitive.name == "name" else ""
    return int(name[len(_MARK) :]) if name.startswith(_MARK) else None


class UpdateResults:
    """The values that one update has given variables, for micro-batches that run after it.

    Args:
        variables: variables that the update changes.
    """

    def __init__(self, variables: list[Any]) -> None:
        self.variables = variables
        """The variables that the update changes."""
        self.values = values_of(variables)
        """Those of the last update; while a micro-batch is traced, what stands for them."""

    def keep(self) -> None:
        """Keep the values that the variables have now: when the program that runs is done."""
        _local.kept.append((self, values_of(self.variables)))

    def assign(self) -> None:
        """Make the update once more."""
        assign(self.variables, self.values)
        step = current_step()
        if step is not None:
            step.expect(self.variables)

    def undo(self) -> None:
        """Do nothing: every micro-batch is given the values from before the batch."""


@contextlib.contextmanager
def keeping() -> Iterator[list[tuple[UpdateResults, list[Any]]]]:
    """Return a block for updates; it gives the results that are to be kept, and values."""
    _local.kept = []
    yield _local.kept


@contextlib.contextmanager
def given(results: list[UpdateResults], values: list[list[Any]]) -> Iterator[None]:
    """Return a block in which results have other values."""
    before = [one.values for one in results]
    for one, new in zip(results, values):
        one.values = new
    try:
        yield
    finally:
        for one, old in zip(results, before):
            one.values = old
