"""Attributes of an object replaced, past what Keras does when an attribute is set."""

from __future__ import annotations

import contextlib
from typing import Any, Iterable, Iterator

_MISSING = object()


@contextlib.contextmanager
def replaced(target: Any, **attributes: Any) -> Iterator[None]:
    """Give `target` other attributes inside the block; afterwards it is as it was.

    Only the instance is touched. What was not an attribute of the instance, such as a method
    of its class, is not one afterwards.
    """
    own = vars(target)
    before = {name: own.get(name, _MISSING) for name in attributes}
    own.update(attributes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:
                own.pop(name, None)
            else:
                own[name] = value


@contextlib.contextmanager
def attributes_kept(owners: Iterable[Any]) -> Iterator[None]:
    """Return a block in which code may set attributes of objects, and which undoes that.

    What it adds to lists, dicts and sets that are attributes with a public name goes to copies.
    """
    before = [(vars(one), dict(vars(one))) for one in owners]
    for own, kept in before:
        own.update((name, _copy(value)) for name, value in kept.items() if name[0] != "_")
    try:
        yield
    finally:
        for own, kept in before:
            own.clear()
            own.update(kept)


def _copy(value: Any) -> Any:
    for kind in (list, dict, set):
        if isinstance(value, kind):
            return kind(value)
    return value
