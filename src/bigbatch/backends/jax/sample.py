"""A few samples of a batch, to try a model with, on JAX."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from bigbatch.backends.base import Backend
from bigbatch.backends.jax import data as batches
from bigbatch.backends.jax.processes import samples_of_all
from bigbatch.backends.jax.state import assign, scope_of, values_of, variables_of
from bigbatch.backends.sample import Sample, keys_of_rows
from bigbatch.core.trial_rows import rows_that_differ


class JaxSample(Sample):
    """Samples of a batch; what is assigned while they are tried stays in a scope."""

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        variables = [one for part in variables_of(self._model) for one in part]
        with scope_of(variables, values_of(variables)):
            yield

    def repeated(self, count: int) -> Any:
        rows = np.arange(count) % self.count
        return jax.tree.map(lambda leaf: np.asarray(leaf)[rows], self.data)

    def _undone(self, layer: Any) -> contextlib.AbstractContextManager[Any]:
        del layer
        return self.undone()

    def _way_back(self, variables: Iterable[Any]) -> Callable[[], None]:
        variables = list(variables)
        values = values_of(variables)
        return lambda: assign(variables, values)


def sample_of(backend: Backend, model: Any, data: Any, rows: int) -> JaxSample:
    """Return a few samples of a batch as `fit` gets it, from all processes."""
    few = _different(backend, samples_of_all(_different(backend, data, rows)), rows)
    return JaxSample(backend, model, jax.tree.map(jnp.asarray, few))


def _different(backend: Backend, data: Any, rows: int) -> Any:
    """Return samples that differ in labels and weights."""
    data = batches.as_tensors(data)
    count = batches.sample_count(data)
    _, y, sample_weight = backend.unpacked(data)
    labels = [np.asarray(leaf) for leaf in batches.leaves_of((y, sample_weight))]
    chosen = np.asarray(rows_that_differ(keys_of_rows(labels, count), rows))
    return jax.tree.map(lambda leaf: np.asarray(leaf)[chosen], data)
