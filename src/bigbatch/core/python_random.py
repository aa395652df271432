"""The random numbers of Python and NumPy that programs draw from without a generator.

The generators behind them belong to the process: other threads, which load data, may draw from
them at any time. So what a model draws is kept apart, and theirs is never drawn again.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import random
import threading
from typing import Any, Callable, Iterator, Tuple

import numpy as np

from bigbatch.core.patching import replaced

_States = Tuple[Any, Any]

_LEFT: list[_States] = []
"""The states in which `PythonDraws` has left the global generators last."""


def _names_in(module: Any, kind: type) -> dict[str, str]:
    """Return the functions of a module that are methods of its global generator."""
    functions = vars(module).items()
    return {name: name for name, one in functions if isinstance(_owner(one), kind)}


def _owner(function: Any) -> Any:
    return getattr(function, "__self__", None)


_OF_RANDOM = _names_in(random, random.Random)
_OF_NUMPY = {
    **_names_in(np.random, np.random.RandomState),
    "seed": "seed",
    "ranf": "random_sample",
    "sample": "random_sample",
}


def python_states() -> _States:
    """Return the states of the global generators of `random` and `numpy.random`."""
    return random.getstate(), np.random.get_state(legacy=False)


def put_back_python_states(states: _States) -> None:
    """Undo what `PythonDraws` have drawn since `python_states`, if nobody else has drawn."""
    if _LEFT and are_same_states(python_states(), _LEFT[0]):
        _set_python_states(states)


def are_same_states(some: _States, others: _States) -> bool:
    """Say whether the next numbers would be the same."""
    return pickle.dumps(some) == pickle.dumps(others)


class PythonDraws:
    """Generators that this thread draws from, in a block, in place of the global ones.

    Args:
        states: where they begin; where the global ones are now if not given.
    """

    def __init__(self, states: _States | None = None) -> None:
        self._start = python_states() if states is None else states
        bits = getattr(np.random, self._start[1]["bit_generator"])
        self._random, self._numpy = random.Random(), np.random.RandomState(bits())
        self.start_again()

    def start_again(self) -> None:
        """Draw the same numbers once more."""
        self._random.setstate(self._start[0])
        self._numpy.set_state(self._start[1])

    @property
    def _states(self) -> _States:
        return self._random.getstate(), self._numpy.get_state(legacy=False)

    @property
    def has_drawn(self) -> bool:
        """Whether numbers have been drawn."""
        return not are_same_states(self._start, self._states)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Return a block in which functions of the modules draw from these generators."""
        here = threading.get_ident()

        def apart(own: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            draw = own if threading.get_ident() == here else function
            return draw(*args, **kwargs)

        def instead(module: Any, generator: Any, names: dict[str, str]) -> Any:
            found = {name: method for name, method in names.items() if hasattr(module, name)}
            return {
                name: functools.partial(
                    apart, getattr(generator, method), getattr(module, name)
                )
                for name, method in found.items()
            }

        in_random = replaced(random, **instead(random, self._random, _OF_RANDOM))
        with in_random, replaced(np.random, **instead(np.random, self._numpy, _OF_NUMPY)):
            yield

    def go_on(self) -> None:
        """Let the global generators go on from here, unless others have drawn from them."""
        if self.has_drawn and are_same_states(python_states(), self._start):
            _LEFT[:] = [self._states]
            _set_python_states(self._states)


def _set_python_states(states: _States) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
