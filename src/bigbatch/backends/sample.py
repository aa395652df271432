"""A few samples of a batch, to try on a model what they do."""

from __future__ import annotations

from contextlib import AbstractContextManager as Block
from typing import Any, Iterable, Sequence

import numpy as np

from bigbatch.backends.base import Backend
from bigbatch.backends.keras import logits_of, mask_of, set_logits, set_mask

_NOISE = (0.05, 0.9)
"""By how much of their size outputs are varied, from the first sample to the last."""


class Sample:
    """A few samples of a batch, chosen to differ in their labels and weights.

    Args:
        backend: the backend of the model.
        model: a Keras model.
        data: samples of a batch, on one device.
    """

    def __init__(self, backend: Backend, model: Any, data: Any) -> None:
        self._backend, self._model, self.data = backend, model, data
        self.x, self.y, self.sample_weight = backend.unpacked(data)
        self.count = int(backend.data.sample_count(data))
        """How many samples there are."""

    @property
    def is_enough(self) -> bool:
        """Whether there are samples to put in the place of others."""
        return self.count > 1

    def first(self, count: int) -> Sample:
        """Return the first `count` of these samples, by themselves."""
        return type(self)(self._backend, self._model, self.rows(self.data, range(count)))

    def undone(self) -> Block[Any]:
        """Return a block after which metrics, statistics and random state are as before."""
        return self._backend.unchanged(self._backend.state_of(self._model))

    def rows(self, nest: Any, positions: Sequence[int]) -> Any:
        """Return some rows of all that has one for each sample, with their masks."""

        def taken(leaf: Any) -> Any:
            if not self.has_rows(leaf):
                return leaf
            part = self._backend.ops.take(leaf, positions)
            if mask_of(leaf) is not None:
                set_mask(part, taken(mask_of(leaf)))
            if logits_of(leaf) is not None:
                set_logits(part, taken(logits_of(leaf)))
            return part

        return self._backend.ops.map_structure(taken, nest)

    def has_rows(self, leaf: Any) -> bool:
        """Say whether a tensor has one row for each sample."""
        shape = getattr(leaf, "shape", None)
        return shape is not None and len(shape) > 0 and shape[0] == self.count

    def mask_of(self, nest: Any) -> Any:
        """Return the mask of the first tensor of a nest, or `None`."""
        return mask_of(self._backend.ops.flatten(nest)[0])

    def varied(self, outputs: Any) -> Any:
        """Return outputs with numbers that differ from sample to sample.

        A new model may say the same of all samples, or be wrong by the same, which hides what
        a loss does. What looks like a probability stays between zero and one.
        """
        random = np.random.default_rng(0)

        def other(leaf: Any) -> Any:
            values = self._backend.ops.numpy(leaf)
            if values.dtype.kind in "iub":
                return leaf
            values = values.astype(np.float64)
            noise = np.linspace(*_NOISE, len(values)) if values.ndim else np.array(_NOISE[0])
            noise = noise.reshape(-1, *[1] * (values.ndim - 1)) if values.ndim else noise
            if values.min(initial=0) >= 0 and values.max(initial=0) <= 1:
                values = values + noise * (random.uniform(size=values.shape) - values)
            else:
                size = max(1.0, np.abs(values).max(initial=0))
                values = values + noise * size * random.normal(size=values.shape)
            return self._backend.ops.as_type(values, leaf)

        def with_mask(leaf: Any) -> Any:
            varied = other(leaf)
            if varied is not leaf and mask_of(leaf) is not None:
                set_mask(varied, mask_of(leaf))
            if varied is not leaf and logits_of(leaf) is not None:
                set_logits(varied, other(logits_of(leaf)))
            return varied

        return self._backend.ops.map_structure(with_mask, outputs)


def keys_of_rows(leaves: Iterable[Any], count: int) -> list[bytes]:
    """Return for each row of a batch what tells it apart, given arrays with a row for each."""
    keys = [b""] * count
    for leaf in leaves:
        rows = np.ascontiguousarray(leaf)
        if rows.ndim and len(rows) == count:
            keys = [key + row.tobytes() for key, row in zip(keys, rows)]
    return keys
