"""The numbers that Python code of a model counts with: `self.n += 1` in `train_step`."""

from __future__ import annotations

from typing import Any

import numpy as np

from bigbatch.backends.keras import backend_of, layers_of


class PythonNumbers:
    """Attributes of a model and its layers that change once per batch, if at all.

    Every micro-batch that Python runs begins with the numbers that the batch began with.

    Args:
        model: a Keras model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._kept: list[tuple[Any, dict[str, Any]]] = []

    def keep(self) -> None:
        """Note the numbers with which a batch begins; a graph runs no Python code."""
        if not backend_of(self._model).runs_in_python(self._model):
            return
        owners = (self._model, *layers_of(self._model))
        kept = [(of, {k: v for k, v in vars(of).items() if _is_own(k, v)}) for of in owners]
        self._kept = [(of, numbers) for of, numbers in kept if numbers]

    def put_back(self) -> None:
        """Let a micro-batch begin with the numbers of the batch."""
        for of, numbers in self._kept:
            own = vars(of)
            own.update({k: v for k, v in numbers.items() if _is_own(k, own.get(k))})

    def values(self) -> dict[str, Any]:
        """Return the numbers that there are now of those noted, by name."""
        return {
            f"{of.name}.{name}": np.float64(vars(of)[name])
            for of, numbers in self._kept
            for name in numbers
            if _is_own(name, vars(of).get(name))
        }


def _is_own(name: str, value: Any) -> bool:
    """Say whether an attribute is a number of the user's: Keras' own have other names."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and not name.startswith("_")
