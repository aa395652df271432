"""A few samples of a batch, to try on a model what they do."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from keras import tree

from bigbatch.backends.base import Backend
from bigbatch.backends.jax import data as batches
from bigbatch.backends.jax.state import assign, scope_of, values_of, variables_of
from bigbatch.backends.keras import layers_of
from bigbatch.backends.sample import Sample, keys_of_rows
from bigbatch.core.patching import replaced
from bigbatch.core.trial_rows import rows_that_differ


class JaxSample(Sample):
    """Samples of a batch, to try layers with, too.

    The first half of the samples stays as it is while others are put in the place of the
    second half: what then changes in the first half depends on other samples.
    """

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Return a block after which everything of the model is as before."""
        variables = [one for part in variables_of(self._model) for one in part]
        with scope_of(variables, values_of(variables)):
            yield

    def with_others(self, others: list[JaxSample]) -> JaxSample:
        """Return these samples and others together."""
        if not others:
            return self
        together = batches.joined(self.data, *(other.data for other in others))
        return JaxSample(self._backend, self._model, together)

    def repeated(self, count: int) -> Any:
        """Return a batch of `count` samples, made of these."""
        rows = np.arange(count) % self.count
        return jax.tree.map(lambda leaf: np.asarray(leaf)[rows], self.data)

    def mixing_layers(self, running: Any) -> list[Any]:
        """Return the layers that mix samples, in a block in which the model runs."""
        return self._layers_where(self._mixes, running)

    def random_layers(self) -> list[Any]:
        """Return the layers that draw random numbers."""
        return self._layers_where(self._draws, contextlib.nullcontext())

    def changing_layers(self) -> list[Any]:
        """Return the layers whose weights change when they are called, and matter then."""
        return self._layers_where(self._changes, contextlib.nullcontext())

    def _layers_where(self, test: Callable[..., bool], running: Any) -> list[Any]:
        """Return the layers that pass a test of a call, not those around them."""
        found: list[Any] = []
        is_test = False

        def watched(layer: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_test
            if not is_test and layer not in found:
                is_test = True
                try:
                    if test(layer, functools.partial(_called, call, args, kwargs)):
                        found.append(layer)
                finally:
                    is_test = False
            return call(*args, **kwargs)

        with self.undone(), running, contextlib.ExitStack() as stack:
            for layer in (*layers_of(self._model), self._model):
                instead = functools.partial(watched, layer, layer.call)
                stack.enter_context(replaced(layer, call=instead))
            self._backend.call(self._model, self.x, training=True)
        inside = {id(one): {id(part) for part in layers_of(one)} for one in found}
        return [layer for layer in found if not inside[id(layer)] & set(inside)]

    def _mixes(self, layer: Any, call: Callable[..., list[Any]]) -> bool:
        """Say whether the outputs of a call for some samples depend on the others."""
        del layer

        def outputs(change: Callable[[Any], Any]) -> list[Any]:
            with self.undone():
                return call(change)

        return self._differ(outputs(lambda leaf: leaf), outputs(self._with_others))

    def _draws(self, layer: Any, call: Callable[..., list[Any]]) -> bool:
        """Say whether a call gives something else the next time, from the same weights."""
        with self.undone():
            before = values_of(layer.weights)  # without the state of random layers
            outputs = call()
            assign(layer.weights, before)
            return self._differ(outputs, call())

    def _changes(self, layer: Any, call: Callable[..., list[Any]]) -> bool:
        """Say whether a call that draws nothing gives something else the next time."""
        if self._draws(layer, call):
            return False
        with self.undone():
            return self._differ(call(), call())

    def _with_others(self, leaf: Any) -> Any:
        """Return `leaf` with other rows in its second half."""
        if not self.has_rows(leaf):
            return leaf
        half = self.count // 2
        others = jnp.concatenate([leaf[:half]] * 2)[: self.count - half]
        return jnp.concatenate([leaf[:half], others])

    def _differ(self, some: list[Any], others: list[Any]) -> bool:
        """Say whether first halves of rows differ by more than rounding."""
        half = self.count // 2
        for one, other in zip(some, others):
            if not self.has_rows(one) or not jnp.issubdtype(one.dtype, jnp.floating):
                continue
            rounding = 3 * float(jnp.finfo(one.dtype).eps) ** 0.5
            one, other = (np.asarray(part[:half].astype("float32")) for part in (one, other))
            if np.max(np.abs(one - other)) > rounding * np.max(np.abs(one)):
                return True
        return False


def _called(
    call: Callable[..., Any],
    args: Any,
    kwargs: Any,
    change: Callable[[Any], Any] = lambda leaf: leaf,
) -> list[Any]:
    """Return the outputs of a call, perhaps with other inputs."""
    changed: Any = tree.map_structure(change, (args, kwargs))
    return tree.flatten(call(*changed[0], **changed[1]))


def sample_of(backend: Backend, model: Any, data: Any, rows: int) -> JaxSample:
    """Return a few samples of a batch as `fit` gets it."""
    data = batches.as_tensors(data)
    count = batches.sample_count(data)
    _, y, sample_weight = backend.unpacked(data)
    labels = [np.asarray(leaf) for leaf in batches.leaves_of((y, sample_weight))]
    chosen = np.asarray(rows_that_differ(keys_of_rows(labels, count), rows))
    few = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[chosen]), data)
    return JaxSample(backend, model, few)
