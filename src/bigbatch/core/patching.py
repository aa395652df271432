"""Attributes of objects, and what they hold, replaced or put back."""

from __future__ import annotations

import collections
import contextlib
from typing import Any, Iterable, Iterator

_MISSING = object()
_CONTAINERS = (list, dict, set, collections.deque)
_LIBRARIES = {"bigbatch", "jax", "jaxlib", "keras", "numpy", "tensorflow", "tf_keras", "torch"}


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
    """Return a block in which code may set attributes of objects, and which undoes that."""
    before = [(vars(one), dict(vars(one))) for one in owners]
    try:
        yield
    finally:
        for own, kept in before:
            own.clear()
            own.update(kept)


@contextlib.contextmanager
def contents_kept(owners: Iterable[Any]) -> Iterator[None]:
    """Return a block after which objects hold what they held, such as a list of losses.

    Looks into lists, dicts, sets, deques and objects of the user's classes that are attributes
    of `owners` with a public name, and into those that they hold. Layers that are built in the
    block stay where they are.
    """
    noted = _contents(owners)
    try:
        yield
    finally:
        for value, kept in noted:
            held = _held(value)
            if not _are_same(held, kept) and not any(map(_is_of_keras, _values(held))):
                own = value if isinstance(value, _CONTAINERS) else vars(value)
                own.clear()
                (own.update if hasattr(own, "update") else own.extend)(kept)


def _contents(owners: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return what holds something, and what it holds."""
    noted: dict[int, tuple[Any, Any]] = {}
    left = [v for one in owners for name, v in vars(one).items() if not name.startswith("_")]
    while left:
        value = left.pop()
        if id(value) not in noted and (isinstance(value, _CONTAINERS) or _is_plain(value)):
            kept = _held(value)
            noted[id(value)] = value, kept
            left.extend(_values(kept))
    return list(noted.values())


def _is_plain(value: Any) -> bool:
    """Say whether a value is an object of a class that is built on no framework."""
    if not hasattr(value, "__dict__") or isinstance(value, type) or callable(value):
        return False
    return _LIBRARIES.isdisjoint(_packages(value))


def _is_of_keras(value: Any) -> bool:
    return not {"keras", "tf_keras"}.isdisjoint(_packages(value))


def _packages(value: Any) -> set[str]:
    """Return the packages that the class of a value is built on."""
    return {one.__module__.split(".")[0] for one in type(value).__mro__}


def _held(value: Any) -> Any:
    """Return what a container or an object holds, as a dict or a list."""
    if not isinstance(value, _CONTAINERS):
        return dict(vars(value))
    return dict(value) if isinstance(value, dict) else list(value)


def _values(held: Any) -> Any:
    return held.values() if isinstance(held, dict) else held


def _are_same(held: Any, kept: Any) -> bool:
    if len(held) != len(kept):
        return False
    if isinstance(kept, dict):
        return all(name in held and held[name] is value for name, value in kept.items())
    return all(one is other for one, other in zip(held, kept))


@contextlib.contextmanager
def suppressed_except(kept: Any) -> Iterator[None]:
    """Return a block that may fail, except with errors of the kinds that are kept."""
    try:
        yield
    except kept:
        raise
    except Exception:
        pass
