"""Compare two results of the same samples: gradients, logs and assigned variables."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

GRADIENT, LOG, VARIABLE = "gradient", "logged value", "variable"

_TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 5e-2, "bfloat16": 5e-2}
_SMALL = 1e-2
"""Gradients this small, relative to those of all variables, may be nothing but rounding."""

_LOGGED = 1e-3
"""Logged values smaller than this are compared as if they were this large."""


class Item(NamedTuple):
    """Something that is compared."""

    kind: str
    name: str


@dataclass
class Outcome:
    """The results of a few samples, as arrays in the memory of the host."""

    gradients: list[list[tuple[str, Any]]]
    """For each update of an optimizer, names of variables and their gradients.

    A gradient is an array, a pair of rows and their indices, or `None`.
    """
    logs: dict[str, Any]
    variables: dict[str, tuple[Any, Any]]
    """Values that variables had before, and after."""


def tolerance_of(dtypes: set[str]) -> float:
    """Return what rounding is sure to stay below, given the types that are computed with."""
    known = [_TOLERANCES[dtype] for dtype in dtypes & _TOLERANCES.keys()]
    return max(known, default=_TOLERANCES["float32"])


def differences(one: Outcome, other: Outcome) -> dict[Item, float]:
    """Return how much two outcomes differ, item by item.

    A gradient relative to its norm, or to a hundredth of the norm of all gradients if that is
    larger: the true gradient of some variables is zero, such as that of the key bias of
    attention. A variable relative to how far it has moved. Values that are not finite in `one`
    are left out: they cannot be compared.
    """
    found: dict[Item, float] = {}
    for some, others in zip(one.gradients, other.gradients):
        floor = _SMALL * math.hypot(*(_norm(_rows(value)) for _, value in some))
        for (name, value), (_, its) in zip(some, others):
            item = Item(GRADIENT, name)
            found[item] = max(found.get(item, 0.0), _gradient(value, its, floor))
    for name, value in one.logs.items():
        value, its = np.asarray(value), np.asarray(other.logs.get(name, np.nan))
        if value.dtype.kind in "biuf":
            by = max(_norm(value), _LOGGED)
            found[Item(LOG, name)] = _relative(value, its, by)
    for name, (before, value) in one.variables.items():
        _, its = other.variables[name]
        found[Item(VARIABLE, name)] = _moved(before, value, its)
    return found


def sums_among(
    found: dict[Item, float],
    whole: Outcome,
    cut: Outcome,
    first: Outcome,
    share: float,
    tolerance: float,
) -> tuple[set[int], set[str]]:
    """Return the updates, by number, and the logs that are sums over samples, not means.

    Args:
        found: what differs between `whole` and `cut`.
        whole: what some samples gave in one part.
        cut: what they gave in two parts, taken for means: share·first + (1 - share)·second.
        first: what the first part gave by itself.
        share: of how many of the samples that is.
        tolerance: what rounding is sure to stay below.
    """

    def added(whole: Any, cut: Any, first: Any) -> Any:
        if whole is None or cut is None or first is None:
            return None
        if isinstance(whole, tuple):
            cut, first = (_summed(one, np.unique(whole[1])) for one in (cut, first))
        return first + (cut - share * first) / (1 - share)

    updates, logs = set(), set()
    for number, values in enumerate(zip(whole.gradients, cut.gradients, first.gradients)):
        names = [name for name, _ in values[0]]
        triples = list(zip(*([value for _, value in some] for some in values)))
        one = Outcome([list(zip(names, (_dense(value) for value, _, _ in triples)))], {}, {})
        other = Outcome([list(zip(names, (added(*values) for values in triples)))], {}, {})
        is_mean = not any(Item(GRADIENT, name) in found for name in names)
        if not is_mean and max(differences(one, other).values()) <= tolerance:
            updates.add(number)
    for item in found:
        if item.kind == LOG and item.name in first.logs:
            value, *parts = (np.asarray(one.logs[item.name]) for one in (whole, cut, first))
            by = max(_norm(value), _LOGGED)
            if _relative(value, added(value, *parts), by) <= tolerance:
                logs.add(item.name)
    return updates, logs


def _gradient(one: Any, other: Any, floor: float) -> float:
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    if isinstance(one, tuple):
        if not isinstance(other, tuple):
            return float("inf")
        # Some optimizers treat two rows of one index otherwise than their sum.
        indices, counts = np.unique(one[1], return_counts=True)
        its_indices, its_counts = np.unique(other[1], return_counts=True)
        if not np.array_equal(indices, its_indices) or not np.array_equal(counts, its_counts):
            return 1.0
        one, other = _summed(one, indices), _summed(other, indices)
    return _relative(one, other, max(_norm(one), floor))


def _summed(rows: tuple[Any, Any], indices: Any) -> Any:
    """Return the sum of the rows of each index."""
    values, where = rows
    sums = np.zeros((len(indices), *values.shape[1:]), values.dtype)
    np.add.at(sums, np.searchsorted(indices, where), values)
    return sums


def _relative(one: Any, other: Any, by: float) -> float:
    if not np.all(np.isfinite(one)):
        return 0.0
    if np.shape(one) != np.shape(other) or not np.all(np.isfinite(other)):
        return float("inf")
    difference = _norm(np.subtract(one, other, dtype=_wide(one)))
    return 0.0 if difference == 0 else difference / by if by > 0 else float("inf")


def _moved(before: Any, one: Any, other: Any) -> float:
    if np.shape(one) != np.shape(other):
        return 1.0
    if one.dtype.kind not in "biuf":
        return float(not np.array_equal(one, other))
    if not np.all(np.isfinite(one)):
        return 0.0
    wide = _wide(one)
    difference = _norm(np.subtract(one, other, dtype=wide))
    rounding = 0.0
    if one.dtype.kind == "f":  # a move is known no better than what was moved
        rounding = 8 * float(np.finfo(one.dtype).eps) * _norm(one)
    if difference <= rounding:
        return 0.0
    if np.shape(before) != np.shape(one):
        return 1.0
    moves = [_norm(np.subtract(value, before, dtype=wide)) for value in (one, other)]
    return difference / max(moves)


def _dense(value: Any) -> Any:
    """Return the sum of the rows of each index in place of rows."""
    return _summed(value, np.unique(value[1])) if isinstance(value, tuple) else value


def _rows(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def _norm(value: Any) -> float:
    if value is None:
        return 0.0
    flat = np.asarray(value, _wide(value)).ravel()
    with np.errstate(over="ignore", invalid="ignore"):
        norm = float(np.sqrt(np.dot(flat, flat)))
    return norm if np.isfinite(norm) else 0.0


def _wide(value: Any) -> Any:
    """Return the type to compute in: without a copy for most gradients."""
    dtype = np.asarray(value).dtype
    return dtype if dtype in (np.float32, np.float64) else np.float64


def of_parts(whole: Any, parts: list[Any], shares: list[float]) -> Any:
    """Return a value of all samples, put together from those of parts of them.

    Rows are joined, along the dimension that follows the number of samples; what has none is
    a mean, weighted by `shares`. `None` if the shapes fit neither.
    """
    whole, parts = np.asarray(whole), [np.asarray(part) for part in parts]
    if any(part.ndim != whole.ndim for part in parts):
        return None
    if all(part.shape == whole.shape for part in parts):
        return sum(part * share for part, share in zip(parts, shares))
    for axis in range(whole.ndim):
        lengths = [part.shape[axis] for part in parts]
        others = {part.shape[:axis] + part.shape[axis + 1 :] for part in parts}
        if others == {whole.shape[:axis] + whole.shape[axis + 1 :]}:
            is_all = sum(lengths) == whole.shape[axis]
            return np.concatenate(parts, axis) if is_all else None
    return None


def relative_norm(one: Any, other: Any) -> float:
    """Return the norm of a difference, relative to `one`; 1 if `other` is `None`."""
    if other is None:
        return 1.0
    return _relative(np.asarray(one), np.asarray(other), max(_norm(one), 1e-6))
