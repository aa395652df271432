"""A few samples of a batch, to try on a model what they do."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator

import numpy as np
import tensorflow as tf

from bigbatch.backends.base import Backend
from bigbatch.backends.keras import layers_of
from bigbatch.backends.sample import Sample, keys_of_rows
from bigbatch.backends.tensorflow.batch import sample_count
from bigbatch.backends.tensorflow.compat import outside_strategy_scope
from bigbatch.backends.tensorflow.data import as_tensor, joined, without_optionals
from bigbatch.core.patching import replaced
from bigbatch.core.trial_rows import rows_that_differ


class TensorFlowSample(Sample):
    """Samples of a batch, to try layers with, too.

    The first half of the samples stays as it is while others are put in the place of the
    second half: what then changes in the first half depends on other samples. Nothing of
    the model is different afterwards.
    """

    @property
    def _half(self) -> int:
        return self.count // 2

    def with_others(self, others: list[TensorFlowSample]) -> TensorFlowSample:
        """Return these samples and others together."""
        if not others:
            return self
        together = joined(self.data, *(other.data for other in others))
        return TensorFlowSample(self._backend, self._model, together)

    def repeated(self, count: int) -> Any:
        """Return a batch of `count` samples, made of these."""
        rows = tf.range(count) % self.count
        return tf.nest.map_structure(
            lambda leaf: leaf if leaf is None else _gathered(leaf, rows), self.data
        )

    def mixing_layers(self, running: Any) -> list[Any]:
        """Return the layers that mix samples, in a block in which the model runs."""

        def mixes(layer: _Call) -> bool:
            # What is not even the same for the same samples is random, or changes with every
            # call: that says nothing.
            if self._differ(layer.outputs, layer.once_more()):
                return False
            return self._differ(layer.outputs, layer.once_more(self._with_others))

        return self._layers_where(mixes, running)

    def random_layers(self) -> list[Any]:
        """Return the layers that draw random numbers."""
        return self._layers_where(
            lambda layer: self._differ(layer.outputs, layer.again()), contextlib.nullcontext()
        )

    def changing_layers(self) -> list[Any]:
        """Return the layers whose weights change when they are called, and matter then."""

        def changes(layer: _Call) -> bool:
            if self._differ(layer.outputs, layer.again()):
                return False
            return self._differ(layer.outputs, layer.once_more())

        return self._layers_where(changes, contextlib.nullcontext())

    def _layers_where(self, test: Callable[[_Call], bool], running: Any) -> list[Any]:
        """Return the layers that pass a test of a call, not those around them."""
        found: list[Any] = []
        is_test = False

        def call(layer: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_test
            # In a `tf.function` of the user's there are no values to look at.
            if is_test or layer in found or not tf.executing_eagerly():
                return original(*args, **kwargs)
            this = _Call(original, args, kwargs, self._values_of(layer))
            is_test = True
            try:
                if test(this):
                    found.append(layer)
            finally:
                is_test = False
                this.put_back()
            return original(*args, **kwargs)

        with self.undone(), running, contextlib.ExitStack() as stack:
            stack.callback(_put_back, self._values_of(self._model))
            for layer in (*layers_of(self._model), self._model):
                watched = functools.partial(call, layer, layer.call)
                stack.enter_context(replaced(layer, call=watched))
            self._backend.call(self._model, self.x, training=True)
        inside = {id(one): {id(part) for part in layers_of(one)} for one in found}
        ids = set(inside)
        return [layer for layer in found if not inside[id(layer)] & ids]

    def _values_of(self, layer: Any) -> list[tuple[Any, Any]]:
        local = tf.distribute.get_strategy().experimental_local_results
        weights = [self._backend.native(weight) for weight in layer.weights]
        return [(part, part.numpy()) for weight in weights for part in local(weight)]

    def _with_others(self, leaf: Any) -> Any:
        """Return `leaf` with other rows in its second half."""
        if leaf is None or not _has_rows(leaf, self.count):
            return leaf
        others = tf.concat([leaf[: self._half]] * 2, 0)[: self.count - self._half]
        return tf.concat([leaf[: self._half], others], 0)

    def _differ(self, some: list[Any], others: list[Any]) -> bool:
        """Say whether first halves of rows differ by more than rounding."""
        for one, other in zip(some, others):
            if not _has_rows(one, self.count) or not one.dtype.is_floating:
                continue
            one, other = one[: self._half], other[: self._half]
            rounding = 3 * np.finfo(one.dtype.as_numpy_dtype).eps ** 0.5
            size = tf.cast(tf.reduce_max(tf.abs(one)), tf.float64)
            if tf.cast(tf.reduce_max(tf.abs(one - other)), tf.float64) > rounding * size:
                return True
        return False

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Return a block after which metrics, statistics and random state are as before."""
        local = functools.partial(self._backend.local_results, self._model)
        with outside_strategy_scope():
            state = [
                (one, one.numpy())
                for variable in self._backend.state_of(self._model)
                for one in local(variable)
            ]
            try:
                yield
            finally:
                _put_back(state)


class _Call:
    """The call of a layer, to be made more than once."""

    def __init__(
        self,
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
        weights: list[tuple[Any, Any]],
    ) -> None:
        self._call, self._args, self._kwargs = call, args, kwargs
        self._weights = weights
        self.outputs = self.once_more()

    def once_more(self, change: Callable[[Any], Any] = lambda leaf: leaf) -> list[Any]:
        """Return the outputs of another call, perhaps with other inputs."""
        args, kwargs = tf.nest.map_structure(change, (self._args, self._kwargs))
        return tf.nest.flatten(self._call(*args, **kwargs))

    def again(self) -> list[Any]:
        """Return the outputs of another call, with the weights of the first."""
        self.put_back()
        return self.once_more()

    def put_back(self) -> None:
        """Give the layer the weights it had before."""
        _put_back(self._weights)


def _put_back(values: list[tuple[Any, Any]]) -> None:
    with outside_strategy_scope():
        for variable, value in values:
            variable.assign(value)


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
    # Gathered, which copies: a slice would keep the whole batch in memory.
    few = tf.nest.map_structure(
        lambda leaf: None if leaf is None else _gathered(leaf, chosen), data
    )
    return TensorFlowSample(backend, model, few)


def _gathered(leaf: Any, rows: Any) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        return tf.sparse.from_dense(
            tf.gather(tf.sparse.to_dense(tf.sparse.reorder(leaf)), rows)
        )
    return tf.gather(leaf, rows)


def _has_rows(leaf: Any, count: int) -> bool:
    return isinstance(leaf, tf.Tensor) and bool(leaf.shape.rank) and leaf.shape[0] == count
