"""The rows of sparse gradients over a batch: listed one after another, or summed.

A lookup whose indices depend on the samples gives one row per occurrence: the full batch has
the rows of all micro-batches. A lookup whose indices do not, as in a table of positions, gives
the same rows in every micro-batch: the full batch has them once, with the sum of their values.
Most optimizers of Keras do not add up repeated rows, so confusing the two changes the update.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Callable

import tensorflow as tf

from bigbatch.backends.tensorflow.dependence import Dependence
from bigbatch.backends.tensorflow.draws import running
from bigbatch.backends.tensorflow.values import ROWS, joined, kind_of, widened
from bigbatch.core.sparse_gradients import Table


@dataclass(frozen=True)
class _Part:
    """Some rows of a sparse gradient that come from one kind of lookup."""

    is_repeated: bool
    """Whether every micro-batch has the same rows."""
    count: int | None
    """How many rows there are, if that is known before they are looked up."""
    is_unique: bool = False
    """Whether the lookup is made once for equal indices, and so would be in the full batch."""


class SparseRows:
    """The sparse results of a function, in parts, by what their indices depend on.

    Args:
        compute: returns a nest of tensors, `IndexedSlices` and `None`.
    """

    def __init__(self, compute: Callable[..., Any]) -> None:
        self.compute = compute
        """The function."""
        self.parts: list[list[_Part]] = []
        """The parts of each sparse result, known when it has been traced."""
        self._structure: Any = None

    def told_by(self, traced: SparseRows | None) -> None:
        """Know of the results what a trace of the same function has told, or nothing."""
        self.parts = traced.parts if traced else []

    def parted(self, results: Any) -> Any:
        """Return results with a list of parts for each `IndexedSlices`."""
        leaves = tf.nest.flatten(results)
        self._structure = tf.nest.map_structure(kind_of, results)
        sparse = [leaf for leaf in leaves if isinstance(leaf, tf.IndexedSlices)]
        here = running()
        if here is not None and here.dependence is not None:
            dependence = here.dependence
            counts, self.parts = [], []
            for leaf in sparse:
                indices, parts = _parts_of(leaf.indices, dependence)
                counts.append([tf.shape(one)[0] for one in indices])
                self.parts.append(parts)
        else:
            if len(self.parts) != len(sparse):  # run eagerly, and no trace has told
                self.parts = [[_Part(False, None)] for _ in sparse]
            self.parts = [_apart(parts) for parts in self.parts]
            counts = [_counts(*pair) for pair in zip(sparse, self.parts)]
        each = iter(counts)
        cut = [
            _cut(leaf, next(each)) if isinstance(leaf, tf.IndexedSlices) else leaf
            for leaf in leaves
        ]
        return tf.nest.pack_sequence_as(results, cut)

    def together(self, sums: Any, microbatches: Any) -> Any:
        """Return the results of a batch, given those of its micro-batches in parts.

        Args:
            sums: what this returned, with rows one after another and the rest added up.
            microbatches: how many micro-batches have given rows.
        """
        left, told = iter(tf.nest.flatten(sums)), iter(self.parts)
        whole = []
        for kind in tf.nest.flatten(self._structure):
            if kind == ROWS:
                parts = next(told)
                slices = [next(left) for _ in parts]
                whole.append(_joined(slices, parts, microbatches))
            else:
                whole.append(next(left))
        return tf.nest.pack_sequence_as(self._structure, whole)


def has_rows(nest: Any) -> bool:
    """Say whether there are sparse gradients in a nest."""
    return any(isinstance(leaf, tf.IndexedSlices) for leaf in tf.nest.flatten(nest))


def _parts_of(indices: Any, dependence: Dependence) -> tuple[list[Any], list[_Part]]:
    """Return indices part by part, and what there is to know of each."""
    inside = dependence.inside_now() or dependence

    def kind(one: Any) -> tuple[bool, bool]:
        is_repeated = not inside.of(one)
        return is_repeated, not is_repeated and _is_unique(one)

    groups = [
        (kind, list(ones)) for kind, ones in itertools.groupby(_concatenated(indices), kind)
    ]
    if len(groups) == 1:
        (is_repeated, is_unique), _ = groups[0]
        return [indices], [_Part(is_repeated, None, is_unique)]
    counts = [[one.shape[0] for one in ones] for _, ones in groups]
    parts = [
        _Part(is_repeated, None if None in known else sum(known), is_unique)
        for ((is_repeated, is_unique), _), known in zip(groups, counts)
    ]
    return [ones[0] if len(ones) == 1 else tf.concat(ones, 0) for _, ones in groups], parts


def _apart(parts: list[_Part]) -> list[_Part]:
    """Return parts that eager code can tell apart: of one at most the count is unknown."""
    unknown = sum(part.count is None for part in parts)
    return parts if unknown <= 1 else [_Part(False, None)]


def _counts(slices: Any, parts: list[_Part]) -> list[Any]:
    """Return how many rows each part has of what was computed eagerly."""
    rows = tf.shape(slices.indices)[0]
    known = sum(part.count or 0 for part in parts)
    assert sum(part.count is None for part in parts) <= 1
    return [rows - known if part.count is None else part.count for part in parts]


def _concatenated(indices: Any) -> list[Any]:
    """Return the indices that were put one after another, as for a table with two lookups."""
    op = indices.op
    if op.type in ("Identity", "Cast"):
        return _concatenated(op.inputs[0])
    if op.type != "ConcatV2":
        return [indices]
    return [part for one in op.inputs[:-1] for part in _concatenated(one)]


def _is_unique(indices: Any) -> bool:
    """Say whether indices have been made unique, as for a lookup of sparse rows."""
    op = indices.op
    if op.type in ("Identity", "Cast", "Reshape"):
        return _is_unique(op.inputs[0])
    return op.type in ("Unique", "UniqueV2") and indices is op.outputs[0]


def _cut(slices: Any, counts: list[Any]) -> list[Any]:
    if len(counts) == 1:
        return [slices]
    values, indices = (
        tf.split(tensor, tf.stack(counts), num=len(counts))
        for tensor in (slices.values, slices.indices)
    )
    for part in values:
        part.set_shape([None, *slices.values.shape[1:]])
    return [tf.IndexedSlices(*pair) for pair in zip(values, indices)]


def _joined(slices: list[Any], parts: list[_Part], microbatches: Any) -> Any:

    def rows(one: Any, part: _Part) -> Any:
        if not isinstance(one, tf.IndexedSlices):
            return one  # dense: another micro-batch has a dense gradient of the same variable
        if part.is_unique:
            return _once_each(one)
        return _summed(one, microbatches) if part.is_repeated else one

    whole = list(map(rows, slices, parts))
    return whole[0] if len(whole) == 1 else joined(whole)


def _once_each(slices: Any) -> Any:
    """Return rows with those of equal indices added up, in the order of their first."""
    indices, places = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices)


def _summed(slices: Any, microbatches: Any) -> Any:
    """Return rows that stand one after another as often as there are micro-batches, once."""
    times = tf.maximum(tf.cast(microbatches, tf.int32), 1)
    rows = tf.shape(slices.indices)[0] // times
    shape = tf.concat([[times, rows], tf.shape(slices.values)[1:]], 0)
    values = tf.reduce_sum(tf.reshape(slices.values, shape), 0)
    values.set_shape([None, *slices.values.shape[1:]])
    return tf.IndexedSlices(values, slices.indices[:rows])


def has_repeated_rows(gradient: Any) -> bool:
    """Say whether, as far as a `tf.function` shows, every micro-batch has the same rows.

    Its arguments are taken for samples. If their number is known when it is traced, what
    follows that number does not show: then rows in a multiple of it are taken for theirs.
    """
    if not isinstance(gradient, tf.IndexedSlices) or tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    dependence = Dependence.of_graphs_around(graph)
    if any(dependence.of(part) for part in _concatenated(gradient.indices)):
        return False
    rows = gradient.indices.shape[0]
    return not any(
        count and (rows is None or rows % count == 0) for count in dependence.known_counts()
    )


def table_of(variable: Any, name: str, gradient: Any, optimizer: str) -> Table:
    """Return what there is to know of a variable with a sparse gradient."""
    shape: Any = tf.TensorShape(variable.shape)
    indices = gradient.indices
    is_shown = not tf.executing_eagerly()
    return Table(
        name,
        optimizer,
        rows=shape[0],
        row_bytes=shape[1:].num_elements() * widened(gradient.dtype).size,
        rows_per_sample=_rows_per_sample(indices) if is_shown else None,
        has_repeats=not is_shown or _may_repeat(indices),
    )


def _rows_per_sample(indices: Any) -> int | None:
    """Return how many rows each sample looks up, as far as a graph shows; else `None`."""
    total = 0
    for one in _concatenated(indices):
        shape = _looked_up(one).shape
        if shape.rank is None or not shape.rank or not shape[1:].is_fully_defined():
            return None
        if shape[0] is None:
            total += shape[1:].num_elements()
    return total


def _may_repeat(indices: Any) -> bool:
    """Say whether, as far as a graph shows, a row may be among these more than once."""
    looked_up = _looked_up(indices)
    if looked_up.op.type == "SelectV2":  # Keras counts negative numbers from the end
        looked_up = _looked_up(looked_up.op.inputs[2])
    known = tf.get_static_value(looked_up)
    if known is not None:
        return bool((known < 0).any()) or len(set(known.ravel().tolist())) < known.size
    return looked_up.op.type != "Range" and not _is_unique(indices)


def _looked_up(indices: Any) -> Any:
    """Return indices as a lookup has got them, before its gradient made a vector of them."""
    while indices.op.type in ("Identity", "Cast", "Reshape"):
        is_known = indices.shape.rank and indices.shape[1:].is_fully_defined()
        if indices.op.type == "Reshape" and indices.shape.rank != 1 and is_known:
            break
        indices = indices.op.inputs[0]
    return indices
