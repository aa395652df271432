"""Checks of the arguments that users pass, shared by every entry point."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import operator
from typing import Any, Callable, TypeVar

from bigbatch.errors import ArgumentError, explain

Function = TypeVar("Function", bound=Callable[..., Any])


def positive_integer(value: Any, name: str, *, or_auto: bool = False) -> int:
    """Return `value` as an `int`, or raise an `ArgumentError` that names the argument.

    NumPy integers are accepted; `True`, 2.5 and "4" are not, although Python could be
    talked into treating them as numbers.

    Args:
        value: what the user has passed.
        name: the name of the argument, in messages.
        or_auto: whether "auto" could have been passed as well, in messages.
    """
    number = None
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            number = operator.index(value)
    if number is None or number < 1:
        raise ArgumentError(
            explain(
                received=f"{name}={value!r} ({type(value).__name__})",
                expected="a positive integer" + (' or "auto"' if or_auto else ""),
                fix=_spelled(value, name, or_auto)
                or f"pass {name}=1 or more, for example {name}=4",
            )
        )
    return number


def not_among(name: str, value: Any, choices: tuple[Any, ...]) -> str:
    """Say that the value of an argument is none of those there are."""
    return explain(
        received=f"{name}={value!r}",
        expected=f"one of {', '.join(map(repr, choices))}",
        fix="leave it out, or choose one of these",
    )


def _spelled(value: Any, name: str, or_auto: bool) -> str | None:
    """Return how to write what was meant, if that can be guessed."""
    if isinstance(value, str) and value.strip().lower() == "auto" and or_auto:
        return f'write {name}="auto"'
    if isinstance(value, (str, float)):
        with contextlib.suppress(ValueError, OverflowError):
            if float(value) == int(float(value)) >= 1:
                return f"write {name}={int(float(value))}"
    return None


def keywords_explained(**meant: str) -> Callable[[Function], Function]:
    """Return a decorator: a call with wrong names raises an error that has the right ones.

    Args:
        meant: the argument that is meant by a name that others have for it.
    """

    def decorated(function: Function) -> Function:
        signature = inspect.signature(function)
        first, *others = signature.parameters

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            unknown = [name for name in kwargs if name not in signature.parameters]
            if unknown or len(args) > 1:
                name = unknown[0] if unknown else None
                text = _call_text(function.__name__, first, args, kwargs)
                close = difflib.get_close_matches(str(name), others, 1, 0.5)
                right = [meant[name]] if name in meant else close if name else others[:2]
                value = repr(kwargs[name] if name else args[1])
                written = [f"{function.__name__}({first}, {one}={value})" for one in right]
                raise ArgumentError(
                    explain(
                        received=text,
                        expected=f"{first}, and one of these by name: {', '.join(others)}",
                        fix=f"call {' or '.join(written)}" if right else f"leave {name} out",
                    )
                )
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorated


def _call_text(name: str, first: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    given = [first, *map(repr, args[1:])] if args else []
    return f"{name}({', '.join([*given, *(f'{n}={v!r}' for n, v in kwargs.items())])})"
