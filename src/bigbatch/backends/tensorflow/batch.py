"""A batch: a nest of tensors that share their first dimension, and its slices."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from bigbatch.errors import ArgumentError, explain


class Batch:
    """The leaves of a batch, checked, and the number of samples they agree on.

    A tuple or list is a sequence of arguments, anything else one argument. `None` leaves
    (no sample weights, say) are passed through.

    Args:
        nest: tensors, arrays or ragged tensors in any nest of tuples, lists and dicts.
        may_be_empty: whether zero samples are allowed, as they are on a replica.
    """

    def __init__(self, nest: Any, *, may_be_empty: bool) -> None:
        self._arguments = tuple(nest) if type(nest) in (tuple, list) else (nest,)
        self.may_be_empty = may_be_empty
        self.leaves = [_as_tensor(leaf) for leaf in tf.nest.flatten(self._arguments)]
        self.count: Any = self._checked_count()
        """The number of samples: an `int` if it is known now, else a scalar tensor."""

    def arguments(self, leaves: list[Any]) -> tuple[Any, ...]:
        """Return `leaves` (whole or sliced) in the structure the user's function expects."""
        return tf.nest.pack_sequence_as(self._arguments, leaves)

    def rows(self, start: Any, size: Any) -> list[Any]:
        """Return `size` samples of every leaf, beginning with sample `start`."""
        return [_rows(leaf, start, size) for leaf in self.leaves]

    def specs(self, size: int | None) -> list[Any]:
        """Return the type of every leaf of a micro-batch of `size` samples (`None`: any)."""
        return [_spec(leaf, size) for leaf in self.leaves]

    def specs_of_arguments(self) -> tuple[Any, ...]:
        """Return the types of a micro-batch as the user's function gets it."""
        return self.arguments(self.specs(None))

    def _checked_count(self) -> Any:
        leaves = [leaf for leaf in self.leaves if leaf is not None]
        known = {count for count in map(_static_count, leaves) if count is not None}
        if not leaves or len(known) > 1 or (known == {0} and not self.may_be_empty):
            shapes = ", ".join(str(leaf.shape) for leaf in leaves) or "no tensors"
            raise ArgumentError(
                explain(
                    received=f"a batch of {shapes}",
                    expected="tensors that all have the same, non-zero number of samples "
                    "(the first dimension)",
                    fix="slice or stack the tensors of the batch to one length",
                )
            )
        unknown = [leaf for leaf in leaves if _static_count(leaf) is None]
        if not unknown:
            return known.pop()
        # What tracing cannot know is asserted when the graph runs.
        count = tf.constant(known.pop()) if known else _dynamic_count(unknown.pop())
        checks = [
            tf.debugging.assert_equal(
                _dynamic_count(leaf),
                count,
                message="bigbatch: the tensors of a batch differ in their number of samples",
            )
            for leaf in unknown
        ]
        if not self.may_be_empty:
            checks.append(
                tf.debugging.assert_positive(count, message="bigbatch: the batch is empty")
            )
        with tf.control_dependencies(checks):
            return tf.identity(count)


def _as_tensor(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, tf.RaggedTensor):
        return leaf
    try:
        tensor = tf.convert_to_tensor(leaf)
    except (ValueError, TypeError) as error:
        raise ArgumentError(
            explain(
                received=f"a batch with a leaf of type {type(leaf).__name__}",
                expected="tensors, arrays or ragged tensors",
                fix="convert the leaf with tf.convert_to_tensor or np.asarray",
            )
        ) from error
    if tensor.shape.rank == 0:
        raise ArgumentError(
            explain(
                received=f"a batch with a scalar leaf, {leaf!r}",
                expected="tensors whose first dimension counts the samples",
                fix="close over the scalar in loss_fn, or repeat it once per sample",
            )
        )
    return tensor


def sample_count(nest: Any) -> Any:
    """Return the number of samples of checked tensors: an `int` if known, else a tensor."""
    leaf = next(leaf for leaf in tf.nest.flatten(nest) if leaf is not None)
    static = _static_count(leaf)
    return _dynamic_count(leaf) if static is None else static


def _static_count(leaf: Any) -> int | None:
    return None if leaf.shape.rank is None else leaf.shape[0]


def _dynamic_count(leaf: Any) -> Any:
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(out_type=tf.int32)
    return tf.shape(leaf)[0]


def _rows(leaf: Any, start: Any, size: Any) -> Any:
    if leaf is None:
        return None
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


def _spec(leaf: Any, size: int | None) -> Any:
    if leaf is None:
        return None
    if isinstance(leaf, tf.RaggedTensor):
        shape = [size, *leaf.shape[1:]]
        return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype)
    shape = leaf.shape if leaf.shape.rank is None else [size, *leaf.shape[1:]]
    return tf.TensorSpec(shape, leaf.dtype)


def includes(types: list[Any], others: list[Any]) -> bool:
    """Say whether everything of the types `others` is also of `types`: these may know less."""
    return len(types) == len(others) and all(map(_includes, types, others))


def _includes(one: Any, other: Any) -> bool:
    if not isinstance(one, tf.TensorSpec) or not isinstance(other, tf.TensorSpec):
        return one == other
    return one.dtype == other.dtype and (
        one.shape.most_specific_compatible_shape(other.shape) == one.shape
    )
