"""A few samples of a batch, to try on a model what they do."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable

import torch

from bigbatch.backends.base import Backend
from bigbatch.backends.keras import layers_of
from bigbatch.backends.sample import Sample, keys_of_rows
from bigbatch.backends.torch import data as batches
from bigbatch.backends.torch.ops import flatten, map_structure, numpy, take
from bigbatch.backends.torch.rollback import Copies
from bigbatch.core.patching import replaced
from bigbatch.core.trial_rows import rows_that_differ


class TorchSample(Sample):
    """Samples of a batch, to try layers with, too.

    The first half of the samples stays as it is while others are put in the place of the
    second half: what then changes in the first half depends on other samples. Nothing of
    the model is different afterwards.
    """

    @property
    def _half(self) -> int:
        return self.count // 2

    def with_others(self, others: list[TorchSample]) -> TorchSample:
        """Return these samples and others together."""
        if not others:
            return self
        together = batches.joined(self.data, *(other.data for other in others))
        return TorchSample(self._backend, self._model, together)

    def repeated(self, count: int) -> Any:
        """Return a batch of `count` samples, made of these."""
        positions = [row % self.count for row in range(count)]
        return map_structure(
            lambda leaf: None if leaf is None else take(leaf, positions), self.data
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
            if is_test or layer in found:
                return original(*args, **kwargs)
            this = _Call(original, args, kwargs, self._weights_of(layer))
            is_test = True
            try:
                if test(this):
                    found.append(layer)
            finally:
                is_test = False
                this.put_back()
            return original(*args, **kwargs)

        with self.undone(), running, torch.no_grad(), contextlib.ExitStack() as stack:
            stack.callback(Copies(self._weights_of(self._model)).put_back)
            for layer in (*layers_of(self._model), self._model):
                watched = functools.partial(call, layer, layer.call)
                stack.enter_context(replaced(layer, call=watched))
            self._backend.call(self._model, self.x, training=True)
        inside = {id(one): {id(part) for part in layers_of(one)} for one in found}
        ids = set(inside)
        return [layer for layer in found if not inside[id(layer)] & ids]

    def _weights_of(self, layer: Any) -> list[Any]:
        return [self._backend.native(weight) for weight in layer.weights]

    def _with_others(self, leaf: Any) -> Any:
        """Return `leaf` with other rows in its second half."""
        if not torch.is_tensor(leaf) or not self.has_rows(leaf):
            return leaf
        others = torch.cat([leaf[: self._half]] * 2)[: self.count - self._half]
        return torch.cat([leaf[: self._half], others])

    def _differ(self, some: list[Any], others: list[Any]) -> bool:
        """Say whether first halves of rows differ by more than rounding."""
        for one, other in zip(some, others):
            if not self.has_rows(one) or not one.is_floating_point():
                continue
            rounding = 3 * torch.finfo(one.dtype).eps ** 0.5
            one, other = one[: self._half].double(), other[: self._half].double()
            if (one - other).abs().max() > rounding * one.abs().max():
                return True
        return False


class _Call:
    """The call of a layer, to be made more than once."""

    def __init__(
        self, call: Callable[..., Any], args: Any, kwargs: Any, weights: list[Any]
    ) -> None:
        self._call, self._args, self._kwargs = call, args, kwargs
        self._weights = Copies(weights)
        self.outputs = self.once_more()

    def once_more(self, change: Callable[[Any], Any] = lambda leaf: leaf) -> list[Any]:
        """Return the outputs of another call, perhaps with other inputs."""
        args = map_structure(change, self._args)
        kwargs = map_structure(change, self._kwargs)
        return flatten(self._call(*args, **kwargs))

    def again(self) -> list[Any]:
        """Return the outputs of another call, with the weights of the first."""
        for tensor, value in self._weights.of.values():
            tensor.copy_(value)
        return self.once_more()

    def put_back(self) -> None:
        """Give the layer the weights it had before, and torch its random numbers."""
        self._weights.put_back()


def sample_of(backend: Backend, model: Any, data: Any, rows: int) -> TorchSample:
    """Return a few samples of a batch as `fit` gets it."""
    data = batches.as_tensors(data)
    _, *labels = backend.unpacked(data)
    arrays = [numpy(leaf) for leaf in flatten(labels) if leaf is not None]
    chosen = rows_that_differ(keys_of_rows(arrays, batches.sample_count(data)), rows)
    # Copied: a slice would keep the whole batch in memory.
    few = map_structure(lambda leaf: None if leaf is None else take(leaf, chosen), data)
    return TorchSample(backend, model, few)
