"""A few samples of a batch, to try a model with, on torch."""

from __future__ import annotations

from typing import Any, Callable, Iterable

import torch

from bigbatch.backends.base import Backend
from bigbatch.backends.sample import Sample, keys_of_rows
from bigbatch.backends.torch import data as batches
from bigbatch.backends.torch.ops import flatten, map_structure, numpy, take
from bigbatch.backends.torch.rollback import Copies
from bigbatch.core.trial_rows import rows_that_differ


class TorchSample(Sample):
    """Samples of a batch."""

    @torch.no_grad()
    def layers_where(self, test: Any, running: Any) -> list[Any]:
        return super().layers_where(test, running)

    def _way_back(self, variables: Iterable[Any]) -> Callable[[], None]:
        copies = Copies(self._parts_of(variables))

        def put_back() -> None:  # but not the generators that draws come from
            for tensor, value in copies.of.values():
                tensor.copy_(value)

        return put_back


def sample_of(backend: Backend, model: Any, data: Any, rows: int) -> TorchSample:
    """Return a few samples of a batch as `fit` gets it."""
    data = batches.as_tensors(data)
    _, *labels = backend.unpacked(data)
    arrays = [numpy(leaf) for leaf in flatten(labels) if leaf is not None]
    chosen = rows_that_differ(keys_of_rows(arrays, batches.sample_count(data)), rows)
    # Copied: a slice would keep the whole batch in memory.
    few = map_structure(lambda leaf: None if leaf is None else take(leaf, chosen), data)
    return TorchSample(backend, model, few)
