"""Checks of what users pass in, shared by every entry point."""

from __future__ import annotations

import contextlib
import operator
from typing import Any

from bigbatch.errors import ArgumentError, explain


def positive_integer(value: Any, name: str) -> int:
    """Return `value` as an `int`, or raise an `ArgumentError` that names the argument.

    NumPy integers are accepted; `True`, 2.5 and "4" are not, although Python could be
    talked into treating them as numbers.
    """
    number = None
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            number = operator.index(value)
    if number is None or number < 1:
        raise ArgumentError(
            explain(
                received=f"{name}={value!r} ({type(value).__name__})",
                expected="a positive integer",
                fix=f"pass {name}=1 or more, for example {name}=4",
            )
        )
    return number
