"""Attributes of an object replaced for as long as a block of code is traced."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator

_MISSING = object()


@contextlib.contextmanager
def replaced(target: Any, **attributes: Any) -> Iterator[None]:
    """Give `target` other attributes inside the block; afterwards it is as it was.

    Only the instance is touched. What was not an attribute of the instance, such as a method
    of its class, is not one afterwards.
    """
    before = {name: vars(target).get(name, _MISSING) for name in attributes}
    for name, value in attributes.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:
                delattr(target, name)
            else:
                setattr(target, name, value)
