"""The data that `fit` passes to a train function on JAX: batches of NumPy or JAX arrays."""

from __future__ import annotations

import functools
import itertools
from typing import Any, Iterator

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import sparse

from bigbatch.backends.jax.processes import largest
from bigbatch.backends.longest import ROWS, longest_of
from bigbatch.errors import ArgumentError, explain

END_OF_DATA = (StopIteration,)
"""How an iterator says that it has no more batches."""


def integer(value: int) -> int:
    """Return a number as an argument: as it is."""
    return value


def is_iterator(data: Any) -> bool:
    """Say whether batches can be taken from `data` inside a graph: never on JAX."""
    del data
    return False


def next_batches(iterator: Any, count: int) -> Iterator[Any]:
    """Return the next batches, `count` of them or fewer if there are no more.

    If there is none at all, it raises what the iterator does.
    """
    iterator = iter(iterator)
    return itertools.islice(itertools.chain([next(iterator)], iterator), count)


def without_optionals(data: Any) -> Any:
    """Return data as it is: nothing is missing in another way than as `None`."""
    return data


def leaves_of(data: Any) -> list[Any]:
    """Return the arrays of a batch, without `None`."""
    return jax.tree.leaves(data, is_leaf=_is_sparse)


def _is_sparse(leaf: Any) -> bool:
    return isinstance(leaf, sparse.JAXSparse)


def as_tensors(data: Any) -> Any:
    """Return a batch of arrays; NumPy arrays stay where they are until they are used."""

    def as_array(leaf: Any) -> Any:
        if _is_sparse(leaf):
            raise ArgumentError(
                explain(
                    received=f"a batch with a sparse array ({type(leaf).__name__})",
                    expected="arrays that can be cut into micro-batches",
                    fix="make the inputs dense",
                )
            )
        is_array = isinstance(leaf, (jax.Array, np.ndarray)) or hasattr(leaf, "aval")
        return leaf if is_array else np.asarray(leaf)

    return jax.tree.map(as_array, data, is_leaf=_is_sparse)


def as_fit_has_them(data: Any) -> Any:
    """Return a batch of arrays as `fit` gives it to a model."""

    def convert(leaf: Any) -> Any:
        leaf = np.asarray(leaf)
        is_float = np.issubdtype(leaf.dtype, np.floating)
        return leaf.astype(keras.config.floatx()) if is_float else leaf

    return jax.tree.map(convert, data)


def type_of(leaf: Any) -> Any:
    """Return the type of an array, and a type as it is."""
    if leaf is None or isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    return jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.canonicalize_dtype(leaf.dtype))


def types_of_any_count(data: Any) -> Any:
    """Return the types of a batch; `includes` leaves the number of samples out."""
    return jax.tree.map(type_of, as_tensors(data))


def includes(types: list[Any], others: list[Any]) -> bool:
    """Say whether types are the same, but for the number of samples."""

    def key(one: Any) -> Any:
        return None if one is None else (one.shape[1:], one.dtype)

    return [*map(key, types)] == [*map(key, others)]


def sample_count(data: Any) -> int:
    """Return the number of samples of a batch."""
    return leaves_of(data)[0].shape[0]


def checked_count(data: Any) -> int:
    """Return the number of samples on which all arrays of a batch agree."""
    leaves = leaves_of(data)
    counts = {leaf.shape[0] if leaf.shape else None for leaf in leaves}
    if len(counts) != 1 or counts & {0, None}:
        shapes = ", ".join(str(leaf.shape) for leaf in leaves) or "no arrays"
        raise ArgumentError(
            explain(
                received=f"a batch of {shapes}",
                expected="arrays that all have the same, non-zero number of samples "
                "(the first dimension)",
                fix="slice or stack the arrays of the batch to one length",
            )
        )
    return sample_count(data)


def rows(data: Any, start: int, count: int) -> Any:
    """Return `count` samples of a batch, beginning with sample `start`."""

    def cut(leaf: Any) -> Any:
        if start == 0 and leaf.shape[0] == count:
            return leaf
        # Of an array on a device a slice would be compiled for every start.
        return _cut(leaf, start, count) if is_on_device(leaf) else leaf[start : start + count]

    return jax.tree.map(cut, data)


def is_on_device(leaf: Any) -> bool:
    """Say whether an array is one of JAX."""
    return isinstance(leaf, jax.Array)


@functools.partial(jax.jit, static_argnums=2)
def _cut(leaf: Any, start: Any, count: int) -> Any:
    return jax.lax.dynamic_slice_in_dim(leaf, start, count)


def own_rows(data: Any) -> Any:
    """Return the part of a batch that this process has handed to Keras."""

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            return leaf
        parts = sorted(leaf.addressable_shards, key=lambda one: one.index[0].start or 0)
        return np.concatenate([np.asarray(one.data) for one in parts])

    return jax.tree.map(own, data)


def first_batch(data: Any) -> Any:
    """Return the first batch of a data set; `None` if this is none."""
    if isinstance(data, keras.utils.PyDataset):
        return data[0]
    is_data_set = hasattr(data, "as_numpy_iterator")  # `tf.data`, which is not imported here
    return next(iter(data.as_numpy_iterator())) if is_data_set else None


def longest(x: Any, y: Any, sample_weight: Any) -> Any:
    """Return a batch whose samples are as large as they get in the data."""
    found: Any = None
    if isinstance(x, keras.utils.PyDataset):
        found = map(x.__getitem__, range(x.num_batches or 0))
    elif hasattr(x, "as_numpy_iterator"):  # `tf.data`: its cardinality is negative without end
        found = x.as_numpy_iterator() if int(x.cardinality()) != -1 else ()

    def some(data: Any) -> Any:
        return as_fit_has_them(jax.tree.map(lambda leaf: leaf[:ROWS], data))

    return longest_of(
        (x, y, sample_weight), found, some, lambda rows: bytes_of(rows) / sample_count(rows)
    )


def first_rows(data: Any, count: int) -> Any:
    """Return the first `count` samples of a batch."""
    return rows(data, 0, min(count, sample_count(data)))


def joined(*batches: Any) -> Any:
    """Return several batches as one."""

    def join(*leaves: Any) -> Any:
        is_device = any(map(is_on_device, leaves))
        return (jnp if is_device else np).concatenate(leaves)

    return jax.tree.map(join, *batches)


def largest_count(model: Any, data: Any) -> int:
    """Return how many samples a batch has, in the process where it has most."""
    del model
    return largest(max(1, sample_count(data)))


def can_be_cut(model: Any, data: Any) -> bool:
    """Say whether all arrays of a batch have the same number of samples."""
    del model
    return len({np.shape(leaf)[:1] for leaf in jax.tree.leaves(data)}) == 1


def check_can_be_cut(model: Any, data: Any) -> None:
    """Raise if the arrays of a batch differ in their number of samples."""
    if not can_be_cut(model, data):
        shapes = ", ".join(str(np.shape(leaf)) for leaf in jax.tree.leaves(data))
        raise ArgumentError(
            explain(
                received=f"a batch of {shapes}",
                expected="arrays of the same number of samples (the first dimension)",
                fix="slice or stack the arrays of the batch to one length",
            )
        )


def bytes_of(values: Any) -> int:
    """Return how many bytes variables and arrays have."""
    count = 0
    for leaf in jax.tree.leaves(values):
        count += jnp.dtype(leaf.dtype).itemsize * int(np.prod(leaf.shape, dtype=np.int64))
    return count


def on_every_replica(model: Any, data: Any) -> Any:
    """Return a batch as `fit` has it."""
    del model
    return data
