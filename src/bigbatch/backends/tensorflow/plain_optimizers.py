"""Optimizers bigbatch knows nothing of; what it knows of others is one file per generation."""

from __future__ import annotations

from typing import Any, Iterable

from bigbatch.errors import ArgumentError, explain


class PlainOptimizer:
    """Any object with `apply_gradients(pairs)`, which is called as plain Python.

    Args:
        optimizer: the user's optimizer; it is not changed.
        variables: the variables it is to update. State it keeps for them is created now: a
            graph cannot create variables later on.
    """

    is_traced: bool = False
    """Whether an update outside `tf.function` may be traced into a graph of its own."""

    def __init__(self, optimizer: Any, variables: list[Any]) -> None:
        self._optimizer = optimizer
        self._variables = variables

    @property
    def name(self) -> str:
        """The name of the kind of optimizer."""
        return type(self._optimizer).__name__

    def settings(self) -> tuple[Any, ...]:
        """Return what is read while an update is traced: a trace serves as long as it is so."""
        return ()

    def apply(self, strategy: Any, gradients: list[Any]) -> None:
        """Make one update of gradients that have been reduced over the replicas.

        Called outside `strategy.run` and outside the scope of any strategy.
        """
        del strategy  # on several replicas, too, such an object is told once
        self._optimizer.apply_gradients(list(zip(gradients, self._variables)))


def settings_of(owner: Any, *objects: str) -> list[Any]:
    """Return the plain settings of an optimizer, and of some attributes which object it is."""
    found: list[Any] = []
    for name, value in sorted(vars(owner).items()):
        if value is None or isinstance(value, (bool, int, float, str)):
            found.append((name, value))
        elif name in objects:
            found.append((name, SameObject(value)))
    return found


class SameObject:
    """Equal to another if both hold the very same object, which lives as long as this."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def refuse_unknown(variables: Iterable[Any]) -> None:
    """Raise if there are any of these: variables that an optimizer was not built with."""
    unknown = [variable.name for variable in variables]
    if unknown:
        raise ArgumentError(
            explain(
                received=f"variables the optimizer was not built with: {', '.join(unknown)}",
                expected="variables of this optimizer",
                fix="pass a new optimizer, or call optimizer.build with all variables first",
            )
        )
