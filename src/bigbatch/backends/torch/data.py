"""The data that `fit` passes to a train function: a list with one batch."""

from __future__ import annotations

import itertools
from typing import Any, Iterator, NamedTuple

import keras
import numpy as np
import torch

from bigbatch.backends.torch.ops import flatten, map_structure, native
from bigbatch.errors import ArgumentError, explain

END_OF_DATA = (StopIteration,)
"""How an iterator says that it has no more batches."""


class TensorType(NamedTuple):
    """The type of a tensor with any number of samples."""

    dtype: torch.dtype
    shape_of_sample: tuple[int, ...]


class _Type:
    """Holds a `TensorType`, so that it is one leaf of a nest."""

    def __init__(self, of: TensorType) -> None:
        self.of = of


def is_iterator(data: Any) -> bool:
    """Say whether batches can be taken from `data` inside a graph: there is no graph."""
    del data
    return False


def next_batches(iterator: Any, count: int) -> Iterator[Any]:
    """Return the next batches, `count` of them or fewer if there are no more."""
    iterator = iter(iterator)
    return itertools.islice(itertools.chain([next(iterator)], iterator), count)


def without_optionals(data: Any) -> Any:
    """Return data as it is: what is missing is `None`."""
    return data


def as_tensor(leaf: Any) -> Any:
    """Return a leaf of a batch as a tensor on the device of Keras."""
    return leaf if leaf is None or isinstance(leaf, _Type) else _converted(leaf)


def _converted(leaf: Any) -> Any:
    if not torch.is_tensor(leaf):
        leaf = np.asarray(leaf)  # of any framework
    return keras.ops.convert_to_tensor(leaf)


def as_tensors(data: Any) -> Any:
    """Return a batch of arrays as one of tensors."""
    return map_structure(as_tensor, data)


def as_fit_has_it(leaf: Any) -> Any:
    """Return an array as a tensor of the type that `fit` gives it."""
    if leaf is None or torch.is_tensor(leaf):
        return leaf
    leaf = np.asarray(leaf)
    is_float = np.issubdtype(leaf.dtype, np.floating)
    return _converted(leaf.astype(keras.config.floatx()) if is_float else leaf)


def as_fit_has_them(data: Any) -> Any:
    """Return a batch of arrays as `fit` gives it to a model."""
    return map_structure(as_fit_has_it, data)


def type_of(leaf: Any) -> Any:
    """Return the type of a tensor, and a type as it is."""
    if leaf is None or isinstance(leaf, _Type):
        return leaf
    leaf = as_tensor(leaf)
    return _Type(TensorType(leaf.dtype, tuple(leaf.shape[1:])))


def types_of_any_count(data: Any) -> Any:
    """Return the types of a batch of any number of samples."""
    return map_structure(type_of, data)


def includes(types: list[Any], others: list[Any]) -> bool:
    """Say whether everything of the types `others` is also of `types`."""
    return [one and one.of for one in types] == [one and one.of for one in others]


def samples_of(types: Any, count: int, fill: int) -> Any:
    """Return samples of such types that are all the same number."""

    def of(leaf: Any) -> Any:
        if leaf is None:
            return None
        dtype, shape = leaf.of
        return keras.ops.convert_to_tensor(torch.full((count, *shape), fill, dtype=dtype))

    return map_structure(of, types)


def with_samples(data: Any) -> Any:
    """Return a batch as it is, with samples that are zero where there are only types."""
    leaves = flatten(data)
    has_types = any(isinstance(leaf, _Type) for leaf in leaves)
    return samples_of(types_of_any_count(data), 2, 0) if has_types else data


def sample_count(data: Any) -> int:
    """Return the number of samples of a batch."""
    leaf = next(leaf for leaf in flatten(data) if leaf is not None)
    return int(leaf.shape[0])


def checked_count(data: Any) -> int:
    """Return the number of samples of a batch, on which all its tensors agree."""
    shapes = [tuple(leaf.shape) for leaf in flatten(data) if leaf is not None]
    counts = {shape[:1] for shape in shapes}
    if len(counts) != 1 or counts <= {(), (0,)}:
        raise ArgumentError(
            explain(
                received=f"a batch of {', '.join(map(str, shapes)) or 'no tensors'}",
                expected="tensors that all have the same, non-zero number of samples (the "
                "first dimension)",
                fix="slice or stack the tensors of the batch to one length",
            )
        )
    return shapes[0][0]


def largest_count(model: Any, data: Any) -> int:
    """Return the number of samples of a batch, on the only replica there is."""
    del model
    return sample_count(data)


def check_can_be_cut(model: Any, data: Any) -> None:
    """Raise if the tensors of a batch differ in their number of samples."""
    del model
    checked_count(data)


def can_be_cut(model: Any, data: Any) -> bool:
    """Say whether all tensors of a batch have the same number of samples."""
    del model
    counts = {tuple(leaf.shape[:1]) for leaf in flatten(data) if leaf is not None}
    return len(counts) == 1


def rows(data: Any, start: int, count: int) -> Any:
    """Return `count` samples of a batch, beginning with sample `start`."""
    return map_structure(
        lambda leaf: None if leaf is None else leaf[start : start + count], data
    )


def with_own_weights(data: Any) -> Any:
    """Return a micro-batch with copies of its sample weights, which Keras changes in place."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
    if weight is None:
        return data
    weight = map_structure(lambda leaf: None if leaf is None else leaf.clone(), weight)
    return keras.utils.pack_x_y_sample_weight(x, y, weight)


def first_batch(data: Any) -> Any:
    """Return the first batch of a data set; `None` if this is none."""
    if isinstance(data, torch.utils.data.DataLoader):
        return as_tensors(next(iter(data)))
    return as_tensors(data[0]) if isinstance(data, keras.utils.PyDataset) else None


def first_rows(data: Any, count: int) -> Any:
    """Return the first `count` samples of a batch."""
    return rows(data, 0, count)


def joined(*batches: Any) -> Any:
    """Return several batches as one."""
    return map_structure(
        lambda *leaves: None if leaves[0] is None else torch.cat(leaves), *batches
    )


def bytes_of(values: Any) -> int:
    """Return how many bytes variables and tensors have."""
    tensors = (native(leaf) for leaf in flatten(values) if leaf is not None)
    return sum(one.element_size() * one.numel() for one in tensors)


def on_every_replica(model: Any, data: Any) -> Any:
    """Return a batch as it is: there is one replica."""
    del model
    return data
