"""A few samples of a batch, to try a model with, on TensorFlow."""

from __future__ import annotations

import functools
from typing import Any, Callable, Iterable

import tensorflow as tf

from bigbatch.backends.base import Backend
from bigbatch.backends.sample import Sample, keys_of_rows
from bigbatch.backends.tensorflow.batch import sample_count
from bigbatch.backends.tensorflow.data import as_tensor, without_optionals
from bigbatch.backends.tensorflow.ops import take
from bigbatch.backends.tensorflow.rollback import unchanged, way_back
from bigbatch.core.trial_rows import rows_that_differ


class TensorFlowSample(Sample):
    """Samples of a batch, on one replica."""

    def undone(self) -> Any:
        local = functools.partial(self._backend.local_results, self._model)
        state = self._backend.state_of(self._model)
        return unchanged([part for variable in state for part in local(variable)])

    def _has_values(self) -> bool:
        # In a `tf.function` of the user's there are no values to look at.
        return tf.executing_eagerly()

    def _way_back(self, variables: Iterable[Any]) -> Callable[[], None]:
        return way_back(self._parts_of(variables))


def sample_of(backend: Backend, model: Any, data: Any, rows: int) -> TensorFlowSample:
    """Return a few samples of a batch as `fit` gets it, perhaps of several replicas."""
    local = functools.partial(backend.local_results, model)
    data = tf.nest.map_structure(
        lambda leaf: None if leaf is None else as_tensor(local(leaf)[0]),
        without_optionals(data),
    )
    count = int(sample_count(data))
    x, y, sample_weight = backend.unpacked(data)
    del x
    labels = tf.nest.flatten((y, sample_weight))
    arrays = [leaf.numpy() for leaf in labels if isinstance(leaf, tf.Tensor)]
    chosen = rows_that_differ(keys_of_rows(arrays, count), rows)
    # Copied: a slice would keep the whole batch in memory.
    few = tf.nest.map_structure(lambda leaf: None if leaf is None else take(leaf, chosen), data)
    return TensorFlowSample(backend, model, few)
