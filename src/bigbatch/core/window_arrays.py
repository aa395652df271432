"""A window as arrays, which is how it is kept in a checkpoint."""

from __future__ import annotations

from typing import Any, Callable, Mapping

import numpy as np

from bigbatch.errors import ArgumentError, explain

NOTHING, DENSE, ROWS = 0, 1, 2
"""What a gradient is, or what a window holds; `DENSE | ROWS` if micro-batches gave both."""


def arrays_of(sums: list[Any]) -> dict[str, Any]:
    """Return the sums of a window, one for each variable, and their kinds as arrays."""
    arrays: dict[str, Any] = {"kinds": np.full(len(sums), NOTHING, np.int32)}
    for index, value in enumerate(sums):
        if hasattr(value, "indices"):
            arrays["kinds"][index] = ROWS
            arrays[f"values_{index}"] = value.values.numpy()
            arrays[f"indices_{index}"] = value.indices.numpy()
        elif value is not None:
            arrays["kinds"][index] = DENSE
            arrays[f"sum_{index}"] = value.numpy()
    return arrays


def sums_of(
    arrays: Mapping[str, Any], variables: list[Any], to_tensor: Callable[[Any], Any]
) -> list[Any]:
    """Return the sums among `arrays`, or raise if they are not of these variables.

    A sum is a tensor, a pair of tensors (values and indices of rows), or `None`.
    """
    sums: list[Any] = []
    fits = len(arrays["kinds"]) == len(variables)
    for index, variable in enumerate(variables):
        shape = tuple(variable.shape)
        if f"sum_{index}" in arrays:
            value = arrays[f"sum_{index}"]
            fits = fits and value.shape == shape
            sums.append(to_tensor(value))
        elif f"values_{index}" in arrays:
            values, indices = arrays[f"values_{index}"], arrays[f"indices_{index}"]
            fits = fits and bool(shape) and values.shape[1:] == shape[1:]
            sums.append((to_tensor(values), to_tensor(indices)))
        else:
            sums.append(None)
    if not fits:
        raise ArgumentError(
            explain(
                received=f"a checkpoint of an accumulator for {len(arrays['kinds'])} "
                "variables, or for variables of other shapes",
                expected=f"one for these {len(variables)} variables",
                fix="build the accumulator with the variables it was saved with",
            )
        )
    return sums
