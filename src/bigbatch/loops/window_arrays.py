"""A window as arrays, which is how it is kept in a checkpoint."""

from __future__ import annotations

from typing import Any, Mapping

import numpy as np
import tensorflow as tf

from bigbatch.errors import ArgumentError, explain


def arrays_of(sums: list[Any]) -> dict[str, Any]:
    """Return the sums of a window, one for each variable, as arrays."""
    arrays = {}
    for index, value in enumerate(sums):
        if isinstance(value, tf.IndexedSlices):
            arrays[f"values_{index}"] = value.values.numpy()
            arrays[f"indices_{index}"] = value.indices.numpy()
        elif value is not None:
            arrays[f"sum_{index}"] = value.numpy()
    return arrays


def sums_of(arrays: Mapping[str, np.ndarray], variables: list[Any]) -> list[Any]:
    """Return the sums among `arrays`, or raise if they are not of these variables."""
    sums: list[Any] = []
    for index in range(len(variables)):
        if f"sum_{index}" in arrays:
            sums.append(tf.constant(arrays[f"sum_{index}"]))
        elif f"values_{index}" in arrays:
            values, indices = arrays[f"values_{index}"], arrays[f"indices_{index}"]
            sums.append(tf.IndexedSlices(tf.constant(values), tf.constant(indices)))
        else:
            sums.append(None)
    if len(arrays["kinds"]) != len(variables) or not all(map(_fits, sums, variables)):
        raise ArgumentError(
            explain(
                received=f"a checkpoint of an accumulator for {len(arrays['kinds'])} "
                "variables, or for variables of other shapes",
                expected=f"one for these {len(variables)} variables",
                fix="build the accumulator with the variables it was saved with",
            )
        )
    return sums


def _fits(value: Any, variable: Any) -> bool:
    shape = tf.TensorShape(variable.shape)
    if isinstance(value, tf.IndexedSlices):
        return bool(shape.rank) and value.values.shape[1:] == shape[1:]
    return value is None or value.shape == shape
