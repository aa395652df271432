"""The errors bigbatch raises, and the one shape of their text."""

from __future__ import annotations


class BigbatchError(Exception):
    """Base class of every error bigbatch raises itself."""

    # AutoGraph re-raises an error from traced code as itself only if it finds this very
    # constructor; any other error becomes its own StagingError.
    __init__ = Exception.__init__


class ArgumentError(BigbatchError, ValueError, TypeError):
    """An argument is wrong.

    It is a `ValueError` and a `TypeError`: whether `accumulation_steps="4"` has the wrong
    value or the wrong type is a matter of taste, and callers may catch either.
    """


class ContextError(BigbatchError, RuntimeError):
    """A call was made in the wrong place, for example inside `strategy.run`."""


class DifferenceError(BigbatchError, AssertionError):
    """Accumulation does not give the update of the full batch."""


class MissingFrameworkError(BigbatchError, ImportError):
    """TensorFlow is needed and is not installed."""


class UnsupportedVersionError(BigbatchError, ImportError):
    """The installed version of TensorFlow or Keras is not supported."""


class NotEqualWarning(UserWarning):
    """Training will differ from the full batch: the check of the first batch found it."""


def explain(*, received: str, expected: str, fix: str) -> str:
    """Return an error text in the three parts that every bigbatch error has."""
    return f"Received: {received}\nExpected: {expected}\nFix: {fix}"
