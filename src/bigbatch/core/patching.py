"""Attributes of an object replaced, past what Keras does when an attribute is set."""

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
