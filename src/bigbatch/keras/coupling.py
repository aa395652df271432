"""Whether the samples of a batch meet, in the loss or in a layer: found by trying."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any, Callable, Iterator

import numpy as np
import tensorflow as tf

from bigbatch.errors import ArgumentError, explain
from bigbatch.keras import compat
from bigbatch.keras.batch_norm import BatchNorm
from bigbatch.keras.data import without_optionals
from bigbatch.keras.patching import replaced
from bigbatch.tf.batch import sample_count
from bigbatch.tf.compat import outside_strategy_scope

_ROWS = 16


class FirstLook:
    """Looks at samples of the first batch there is, once.

    Args:
        model: a Keras model, built when it is looked at.
        look: called with a `Sample`.
    """

    def __init__(self, model: Any, look: Callable[[Sample], None]) -> None:
        self._model = model
        self._look = look
        # In an own `train_step` loss and forward pass cannot be told apart.
        self.is_done = compat.keras_of(model).has_own_train_step(model)
        self.sample: Sample | None = None
        """What has been looked at."""

    def at(self, data: Any, rows: int = _ROWS) -> None:
        """Look at a batch, or at the next one if this has too few samples."""
        if self.is_done:
            return
        sample = Sample(self._model, data, rows)
        if sample.is_enough:
            self.sample, self.is_done = sample, True
            self._look(sample)


def warn_of_coupled_loss(sample: Sample) -> None:
    """Warn if samples meet in the loss: no sum over micro-batches is right then."""
    name = None
    with contextlib.suppress(Exception):  # what cannot be tried is not worse than before
        name = sample.coupled_loss()
    if name:
        warnings.warn(
            f"bigbatch: in the loss {name} the samples of a batch meet: the gradient of one "
            "depends on the others, and micro-batches by themselves do not give the update "
            "of the full batch. bigbatch.accumulate(model, ..., coupled=True) does.",
            stacklevel=2,
        )


def refuse_mixing_layers(batch_norm: str, sample: Sample) -> None:
    """Raise if samples meet before the loss: two passes are not exact then."""
    layers: list[Any] = []
    with contextlib.suppress(Exception):
        layers = sample.mixing_layers(batch_norm)
    if layers:
        raise ArgumentError(rows_meet(layers[0]))


def rows_meet(layer: Any) -> str:
    """Say that samples meet in a layer, not only in the loss."""
    return explain(
        received=f"coupled=True and the layer {layer.name!r} ({type(layer).__name__}), in "
        "which the samples of a batch meet in the forward pass",
        expected="samples that meet in the loss only",
        fix='pass batch_norm="frozen" for BatchNormalization, or use LayerNormalization or '
        "GroupNormalization; move what mixes samples from call() to the loss",
    )


class Sample:
    """A few samples of the first batch of a model, to try things with.

    The first half of the samples stays as it is while others are put in the place of the
    second half: what then changes in the first half depends on other samples. Nothing of
    the model is different afterwards.

    Args:
        model: a built Keras model.
        data: a batch as `fit` gets it, perhaps of several replicas.
        rows: how many samples to take at most.
    """

    def __init__(self, model: Any, data: Any, rows: int = _ROWS) -> None:
        local = compat.strategy_of(model).experimental_local_results
        rows = min(rows, _ROWS)
        data = tf.nest.map_structure(
            lambda leaf: None if leaf is None else _first_rows(local(leaf)[0], max(rows, 2)),
            without_optionals(data),
        )
        self._model = model
        self._keras = compat.keras_of(model)
        self._data = data
        self._x, self._y, self._sample_weight = self._keras.unpacked(data)
        self._count = int(sample_count(self._x))
        self._half = self._count // 2

    def repeated(self, count: int) -> Any:
        """Return a batch of `count` samples, made of these."""
        rows = tf.range(count) % self._count
        return tf.nest.map_structure(
            lambda leaf: leaf if leaf is None else tf.gather(leaf, rows), self._data
        )

    @property
    def is_enough(self) -> bool:
        """Whether there are samples to put in the place of others."""
        return self._half > 0

    def coupled_loss(self) -> str | None:
        """Return the name of the loss, if the gradient of a sample depends on other samples."""
        with self._undone():
            outputs = self._keras.call(self._model, self._x, training=False)
            flat = tf.nest.flatten(outputs)
            before = self._gradients(outputs, flat)
            others = [self._with_others(output, 0.9, 0.01) for output in flat]
            for output, other in zip(flat, others):
                compat.set_mask(other, compat.mask_of(output))
            other_outputs = tf.nest.pack_sequence_as(outputs, others)
            after = self._gradients(other_outputs, others)
        if self._differ(before, after):
            return self._keras.name_of_loss(self._model)
        return None

    def mixing_layers(self, batch_norm: str) -> list[Any]:
        """Return the layers in which samples meet."""

        def mixes(layer: _Call) -> bool:
            # What is not even the same for the same samples is random, or changes with every
            # call: that says nothing.
            if self._differ(layer.outputs, layer.once_more()):
                return False
            return self._differ(layer.outputs, layer.once_more(self._with_others))

        return self._layers_where(mixes, batch_norm)

    def random_layers(self) -> list[Any]:
        """Return the layers that draw random numbers."""
        return self._layers_where(
            lambda layer: self._differ(layer.outputs, layer.again()), "microbatch"
        )

    def changing_layers(self) -> list[Any]:
        """Return the layers whose weights change when they are called, and matter then."""

        def changes(layer: _Call) -> bool:
            if self._differ(layer.outputs, layer.again()):
                return False
            return self._differ(layer.outputs, layer.once_more())

        return self._layers_where(changes, "microbatch")

    def _layers_where(self, test: Callable[[_Call], bool], batch_norm: str) -> list[Any]:
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

        norm = BatchNorm(self._model, batch_norm)
        with self._undone(), norm.watching(), contextlib.ExitStack() as stack:
            stack.callback(_put_back, self._values_of(self._model))
            for layer in (*compat.layers_of(self._model), self._model):
                watched = functools.partial(call, layer, layer.call)
                stack.enter_context(replaced(layer, call=watched))
            self._keras.call(self._model, self._x, training=True)
        inside = {id(one): {id(part) for part in compat.layers_of(one)} for one in found}
        ids = set(inside)
        return [layer for layer in found if not inside[id(layer)] & ids]

    def _values_of(self, layer: Any) -> list[tuple[Any, Any]]:
        local = tf.distribute.get_strategy().experimental_local_results
        weights = [self._keras.native(weight) for weight in layer.weights]
        return [(part, part.numpy()) for weight in weights for part in local(weight)]

    def _gradients(self, outputs: Any, flat: list[Any]) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch([one for one in flat if one.dtype.is_floating])
            loss = self._keras.compute_loss(
                self._model, self._x, self._y, outputs, self._sample_weight
            )
        return tape.gradient(loss, flat)

    def _with_others(self, leaf: Any, scale: float = 1, shift: float = 0) -> Any:
        """Return `leaf` with other rows in its second half."""
        if leaf is None or not _has_rows(leaf, self._count):
            return leaf
        others = tf.concat([leaf[: self._half]] * 2, 0)[: self._count - self._half]
        if leaf.dtype.is_floating:
            others = others * tf.cast(scale, leaf.dtype) + tf.cast(shift, leaf.dtype)
        return tf.concat([leaf[: self._half], others], 0)

    def _differ(self, some: list[Any], others: list[Any]) -> bool:
        """Say whether first halves of rows differ by more than rounding."""
        for one, other in zip(some, others):
            if not _has_rows(one, self._count) or not one.dtype.is_floating:
                continue
            one, other = one[: self._half], other[: self._half]
            rounding = 3 * np.finfo(one.dtype.as_numpy_dtype).eps ** 0.5
            size = tf.cast(tf.reduce_max(tf.abs(one)), tf.float64)
            if tf.cast(tf.reduce_max(tf.abs(one - other)), tf.float64) > rounding * size:
                return True
        return False

    @contextlib.contextmanager
    def _undone(self) -> Iterator[None]:
        """Return a block after which metrics, statistics and random state are as before."""
        local = compat.strategy_of(self._model).experimental_local_results
        with outside_strategy_scope():
            state = [
                (one, one.numpy())
                for variable in self._keras.state_of(self._model)
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


def _first_rows(leaf: Any, count: int) -> Any:
    # Gathered, which copies: a slice would keep the whole batch in memory.
    leaf = tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf
    return tf.gather(leaf, tf.range(min(count, int(sample_count(leaf)))))


def _has_rows(leaf: Any, count: int) -> bool:
    return isinstance(leaf, tf.Tensor) and bool(leaf.shape.rank) and leaf.shape[0] == count
