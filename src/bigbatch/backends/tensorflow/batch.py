"""A batch: a nest of tensors, and its slices if they share their first dimension."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Iterator

import tensorflow as tf

from bigbatch.errors import ArgumentError, explain


class Batch:
    """The leaves of a batch, checked, and the number of samples they agree on.

    A tuple or list is a sequence of arguments, anything else one argument. `None` leaves
    (no sample weights, say) are passed through.

    Args:
        nest: tensors, arrays, ragged or sparse tensors in any nest of tuples, lists and dicts.
        may_be_empty: whether zero samples are allowed, as they are on a replica.
        is_whole: whether it is never cut: then tensors may differ in their first dimension,
            as those of atoms and molecules do, and numbers are allowed.
    """

    def __init__(self, nest: Any, *, may_be_empty: bool, is_whole: bool = False) -> None:
        self._arguments = tuple(nest) if type(nest) in (tuple, list) else (nest,)
        self.may_be_empty = may_be_empty
        self.leaves = [_as_tensor(leaf) for leaf in tf.nest.flatten(self._arguments)]
        if not is_whole:
            _refuse_numbers(self.leaves)
        has_count = any(leaf is not None and leaf.shape.rank != 0 for leaf in self.leaves)
        is_free = is_whole and has_count
        self.count: Any = sample_count(self.leaves) if is_free else self._checked_count()
        """The number of samples: an `int` if it is known now, else a scalar tensor."""

    def arguments(self, leaves: list[Any]) -> tuple[Any, ...]:
        """Return `leaves` (whole or sliced) in the structure the user's function expects."""
        return tf.nest.pack_sequence_as(self._arguments, leaves)

    def rows(self, start: Any, size: Any) -> list[Any]:
        """Return `size` samples of every leaf, beginning with sample `start`."""
        if self._is_all(size):
            return self.leaves
        return [rows_of(leaf, start, size) for leaf in self.leaves]

    def specs(self, size: int | None) -> list[Any]:
        """Return the type of every leaf of a micro-batch of `size` samples (`None`: any)."""
        types = [
            None if leaf is None else tf.type_spec_from_value(leaf) for leaf in self.leaves
        ]
        if self._is_all(size):
            return types
        return [None if one is None else with_count(one, size) for one in types]

    def _is_all(self, size: Any) -> bool:
        return isinstance(size, int) and isinstance(self.count, int) and size == self.count

    def specs_of_arguments(self) -> tuple[Any, ...]:
        """Return the types of a micro-batch as the user's function gets it."""
        return self.arguments(self.specs(None))

    def _checked_count(self) -> Any:
        # A single argument, as of `train_step`, needs no number to be told from others.
        single = len(self._arguments) == 1
        names = list(_names(self._arguments[0] if single else self._arguments, "batch"))
        leaves = {n: leaf for n, leaf in zip(names, self.leaves) if leaf is not None}
        static = {name: _static_count(leaf) for name, leaf in leaves.items()}
        known = Counter(count for count in static.values() if count is not None)
        count = known.most_common(1)[0][0] if known else None
        odd = [name for name, one in static.items() if one not in (None, count)]
        if not leaves or (count == 0 and not self.may_be_empty):
            shapes = ", ".join(str(leaf.shape) for leaf in leaves.values()) or "no tensors"
            raise ArgumentError(_explained(f"a batch of {shapes}"))
        if odd:
            raise ArgumentError(
                _explained(f"{odd[0]} with {static[odd[0]]} samples in a batch of {count}")
            )
        unknown = {name: leaf for name, leaf in leaves.items() if static[name] is None}
        if not unknown:
            return count
        # What tracing cannot know is asserted when the graph runs.
        if count is None:
            name = next(reversed(unknown))
            count = _dynamic_count(unknown.pop(name))
        count = tf.convert_to_tensor(count)
        checks = [
            tf.debugging.assert_equal(
                _dynamic_count(leaf), count, message=f"bigbatch: {name} {DIFFERS}"
            )
            for name, leaf in unknown.items()
        ]
        if not self.may_be_empty:
            checks.append(
                tf.debugging.assert_positive(count, message="bigbatch: the batch is empty")
            )
        with tf.control_dependencies(checks):
            return tf.identity(count)


DIFFERS = "differs from other tensors of the batch in its number of samples"
"""What is said of a tensor when a graph runs that cannot cut a batch."""


def _explained(received: str) -> str:
    return explain(
        received=received,
        expected="tensors that all have the same, non-zero number of samples (the first "
        "dimension), to be cut into micro-batches",
        fix="slice or stack the tensors of the batch to one length; or pass accumulation_steps "
        "in place of microbatch_size: each batch of the data set is a micro-batch, and not cut",
    )


def cannot_be_cut(message: str) -> str | None:
    """Return an error text for what a running graph said of a batch, if it is about that."""
    if DIFFERS not in message:
        return None
    name = message.split(f" {DIFFERS}")[0].split("bigbatch: ")[-1]
    counts = [int(found) for found in re.findall(r"\[(\d+)\]", message.split(DIFFERS)[1])[:2]]
    sizes = f" with {counts[0]} samples in a batch of {counts[1]}" if len(counts) == 2 else ""
    return _explained(f"{name}{sizes}")


def _names(nest: Any, name: str) -> Iterator[str]:
    """Yield how to reach each leaf of a nest, in the order in which it is flattened."""
    if isinstance(nest, dict):
        for key in sorted(nest):
            yield from _names(nest[key], f"{name}[{key!r}]")
    elif isinstance(nest, (tuple, list)):
        for index, one in enumerate(nest):
            yield from _names(one, f"{name}[{index}]")
    else:
        yield name


def _refuse_numbers(leaves: list[Any]) -> None:
    for leaf in leaves:
        if leaf is not None and leaf.shape.rank == 0:
            value = tf.get_static_value(leaf)
            raise ArgumentError(
                explain(
                    received=f"a batch with a scalar leaf, {leaf if value is None else value}",
                    expected="tensors whose first dimension counts the samples",
                    fix="close over the scalar in loss_fn, or repeat it once per sample",
                )
            )


def _as_tensor(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        return leaf
    try:
        return tf.convert_to_tensor(leaf)
    except (ValueError, TypeError) as error:
        raise ArgumentError(
            explain(
                received=f"a batch with a leaf of type {type(leaf).__name__}",
                expected="tensors, arrays, ragged or sparse tensors",
                fix="convert the leaf with tf.convert_to_tensor or np.asarray",
            )
        ) from error


def sample_count(nest: Any) -> Any:
    """Return the number of samples of tensors: an `int` if known, else a tensor.

    That of the last tensor, should they differ: targets come after what they are of.
    """
    leaves = [leaf for leaf in tf.nest.flatten(nest) if leaf is not None]
    leaf = next(leaf for leaf in reversed(leaves) if leaf.shape.rank != 0)
    static = _static_count(leaf)
    return _dynamic_count(leaf) if static is None else static


def _static_count(leaf: Any) -> int | None:
    return None if leaf.shape.rank is None else leaf.shape[0]


def _dynamic_count(leaf: Any) -> Any:
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(out_type=tf.int32)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    return tf.shape(leaf)[0]


def rows_of(leaf: Any, start: Any, size: Any) -> Any:
    """Return `size` samples of a leaf of a batch, beginning with sample `start`."""
    if leaf is None:
        return None
    if isinstance(leaf, tf.SparseTensor):
        inner = leaf.dense_shape[1:]
        first, count = ([tf.cast(number, tf.int64)] for number in (start, size))
        # Those of SciPy come column by column.
        leaf = tf.sparse.reorder(leaf)
        return tf.sparse.slice(
            leaf, tf.concat([first, tf.zeros_like(inner)], 0), tf.concat([count, inner], 0)
        )
    if isinstance(leaf, tf.RaggedTensor):
        return leaf[start : start + size]
    if isinstance(start, int) and isinstance(size, int):
        return leaf[start : start + size]
    # `tf.slice`, because XLA cannot compile a strided slice whose start is a loop variable.
    inner = tf.shape(leaf)[1:]
    rows = tf.slice(
        leaf, tf.concat([[start], tf.zeros_like(inner)], 0), tf.concat([[size], inner], 0)
    )
    if leaf.shape.rank is not None:
        # A slice loses its static shape; models and XLA want it back.
        rows.set_shape([size if isinstance(size, int) else None, *leaf.shape[1:]])
    return rows


def with_count(spec: Any, size: int | None) -> Any:
    """Return the type of a leaf of a batch, for another number of samples (`None`: any)."""
    if not spec.shape.rank:
        return spec
    shape = [size, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(shape, spec.dtype)
    return tf.TensorSpec(shape, spec.dtype)


def includes(types: list[Any], others: list[Any]) -> bool:
    """Say whether everything of the types `others` is also of `types`: these may know less."""
    return len(types) == len(others) and all(map(_includes, types, others))


def _includes(one: Any, other: Any) -> bool:
    if not isinstance(one, tf.TensorSpec) or not isinstance(other, tf.TensorSpec):
        return one == other
    return one.dtype == other.dtype and (
        one.shape.most_specific_compatible_shape(other.shape) == one.shape
    )
