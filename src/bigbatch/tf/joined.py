"""The small results of a function as few tensors."""

from __future__ import annotations

from typing import Any, Callable

import tensorflow as tf

from bigbatch.tf.values import DENSE, LARGE, kind_of, widen


class Joined:
    """A function whose numbers of one type come as one row, and so do short rows, in a graph.

    What is added up over micro-batches takes a few operations per tensor and micro-batch,
    however small the tensor is.

    Args:
        compute: returns a nest of tensors, `IndexedSlices` and `None`.
    """

    def __init__(self, compute: Callable[..., Any]) -> None:
        self._compute = compute
        # What the results have turned out to be, known when they have been traced: the places
        # of leaves among those that are joined, and the lengths of these (0: a number).
        self._places: Any = None
        self._lengths: list[list[int]] = []

    def __call__(self, *arguments: Any) -> dict[str, Any]:
        """Return what `compute` does: "rows", and "rest", with `None` for what is in rows."""
        results = self._compute(*arguments)
        leaves = tf.nest.flatten(results)
        groups: dict[Any, list[int]] = {}
        for index, leaf in enumerate(leaves):
            if _is_small(leaf) and not tf.executing_eagerly():
                leaves[index] = leaf = widen(leaf)
                groups.setdefault((leaf.dtype, leaf.shape.rank), []).append(index)
        places: list[Any] = [None] * len(leaves)
        rows, self._lengths, joined = [], [], 0
        for (_, rank), indices in groups.items():
            if len(indices) == 1:
                continue
            parts = [leaves[index] for index in indices]
            rows.append(tf.concat(parts, 0) if rank else tf.stack(parts))
            self._lengths.append([part.shape[0] if rank else 0 for part in parts])
            for index in indices:
                places[index], leaves[index] = joined, None
                joined += 1
        self._places = tf.nest.pack_sequence_as(results, places)
        return {"rows": rows, "rest": tf.nest.pack_sequence_as(results, leaves)}

    def parted(self, sums: dict[str, Any], *names: str) -> Any:
        """Return results as `compute` does, or some of them by name, given what this does."""
        parts: list[Any] = []
        for row, lengths in zip(sums["rows"], self._lengths):
            parts += tf.split(row, lengths) if any(lengths) else tf.unstack(row, len(lengths))
        places, rest = self._places, sums["rest"]
        if names:
            places, rest = ({name: nest[name] for name in names} for nest in (places, rest))
        return tf.nest.map_structure(
            lambda place, leaf: leaf if place is None else parts[place], places, rest
        )


def _is_small(leaf: Any) -> bool:
    if kind_of(leaf) != DENSE or leaf.shape.rank not in (0, 1):
        return False
    return (leaf.shape.num_elements() or LARGE) < LARGE
