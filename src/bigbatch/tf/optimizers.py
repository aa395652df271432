"""What bigbatch needs to know of an optimizer."""

from __future__ import annotations

from typing import Any

from bigbatch.errors import ArgumentError, explain
from bigbatch.tf.compat import variables_of


def is_keras(optimizer: Any) -> bool:
    """Say whether this is a Keras 3 optimizer, whose `apply` may be traced into a graph."""
    return all(hasattr(optimizer, name) for name in ("apply", "build", "built"))


def prepare(optimizer: Any, variables: list[Any]) -> None:
    """Check that `optimizer` can update `variables`; create its state as `apply` would.

    State must exist before an update is traced: a graph cannot create variables later on.
    """
    if not callable(getattr(optimizer, "apply_gradients", None)):
        raise ArgumentError(
            explain(
                received=f"optimizer={optimizer!r} ({type(optimizer).__name__})",
                expected="an object with a method apply_gradients(pairs)",
                fix="pass a Keras optimizer, for example keras.optimizers.Adam()",
            )
        )
    if not is_keras(optimizer):
        return
    if not optimizer.built:
        optimizer.build(variables)
    known = {id(_native(variable)) for variable in variables_of(optimizer)}
    unknown = [v.name for v in variables if id(_native(v)) not in known]
    if unknown:
        raise ArgumentError(
            explain(
                received=f"variables the optimizer was not built with: {', '.join(unknown)}",
                expected="variables of this optimizer",
                fix="pass a new optimizer, or call optimizer.build with all variables first",
            )
        )


def settings(optimizer: Any) -> tuple[Any, ...]:
    """Return the plain settings of a Keras optimizer, such as `clipnorm`.

    Keras reads them while it traces an update; a trace serves as long as they are the same.
    """
    found = []
    for owner in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        for name, value in sorted(vars(owner).items()) if owner is not None else ():
            if value is None or isinstance(value, (bool, int, float, str)):
                found.append((name, value))
            elif name == "_learning_rate":
                found.append((name, _Same(value)))  # a schedule, or a variable that can change
    return tuple(found)


class _Same:
    """Equal to another if both hold the very same object, which lives as long as this."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _native(variable: Any) -> Any:
    """Return the `tf.Variable` inside a Keras variable, and any other variable as it is."""
    value = getattr(variable, "value", variable)
    return variable if callable(value) else value
