"""A few samples of a batch, to try a model with."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager as Block
from typing import Any, Callable, Iterable, Iterator, Sequence

import numpy as np

from bigbatch.backends.base import Backend
from bigbatch.backends.keras import layers_of, logits_of, mask_of, set_logits, set_mask
from bigbatch.core.patching import replaced

_NOISE = (0.05, 0.9)
"""By how much of their size outputs are varied, from the first sample to the last."""

_PRECISIONS = {"bfloat16": 2**-7, "float16": 2**-10, "float32": 2**-23, "float64": 2**-52}


class Sample:
    """A few samples of a batch, chosen to differ in their labels and weights.

    To find layers that mix samples, the first half stays as it is while others are put in the
    place of the second half: what then changes in the first half depends on other samples.
    Nothing of the model is different after anything that is tried.

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

    def with_others(self, others: Sequence[Sample]) -> Sample:
        """Return these samples and others together."""
        if not others:
            return self
        together = self._backend.data.joined(self.data, *(other.data for other in others))
        return type(self)(self._backend, self._model, together)

    def repeated(self, count: int) -> Any:
        """Return a batch of `count` samples, made of these."""
        return self.rows(self.data, [row % self.count for row in range(count)])

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

    def mixing_layers(self, running: Block[Any]) -> list[Any]:
        """Return the layers that mix samples, in a block in which the model runs."""
        return self.layers_where(self._mixes, running)

    def random_layers(self) -> list[Any]:
        """Return the layers that draw random numbers."""
        return self.layers_where(self._draws, contextlib.nullcontext())

    def changing_layers(self) -> list[Any]:
        """Return the layers whose weights change when they are called, and matter then."""
        return self.layers_where(self._changes, contextlib.nullcontext())

    def layers_where(
        self, test: Callable[[Any, Callable[..., list[Any]]], bool], running: Block[Any]
    ) -> list[Any]:
        """Return the layers that pass a test of a call, not those around them."""
        found: list[Any] = []
        is_test = False

        def watched(layer: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_test
            if not is_test and layer not in found and self._has_values():
                is_test = True
                try:
                    with self._undone(layer):
                        if test(layer, functools.partial(self._outputs, call, args, kwargs)):
                            found.append(layer)
                finally:
                    is_test = False
            return call(*args, **kwargs)

        with self.undone(), running, contextlib.ExitStack() as stack:
            stack.enter_context(self._undone(self._model))
            for layer in (*layers_of(self._model), self._model):
                instead = functools.partial(watched, layer, layer.call)
                stack.enter_context(replaced(layer, call=instead))
            self._backend.call(self._model, self.x, training=True)
        inside = {id(one): {id(part) for part in layers_of(one)} for one in found}
        return [layer for layer in found if not inside[id(layer)] & set(inside)]

    def _outputs(
        self,
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
        change: Callable[[Any], Any] = lambda leaf: leaf,
    ) -> list[Any]:
        """Return the outputs of a call, perhaps with other inputs."""
        ops = self._backend.ops
        changed = ops.map_structure(change, [list(args), kwargs])
        return ops.flatten(call(*changed[0], **changed[1]))

    def _mixes(self, layer: Any, call: Callable[..., list[Any]]) -> bool:
        """Say whether the outputs of a call for some samples depend on the others."""

        def outputs(*change: Callable[[Any], Any]) -> list[Any]:
            with self._undone(layer):
                return call(*change)

        first = outputs()
        # What is not even the same for the same samples says nothing.
        return not self._differ(first, outputs()) and self._differ(
            first, outputs(self._with_others)
        )

    def _draws(self, layer: Any, call: Callable[..., list[Any]]) -> bool:
        """Say whether a call gives something else the next time, from the same weights."""
        with self._undone(layer):
            put_back = self._way_back(layer.weights)  # without the state of random layers
            outputs = call()
            put_back()
            return self._differ(outputs, call())

    def _changes(self, layer: Any, call: Callable[..., list[Any]]) -> bool:
        """Say whether a call that draws nothing gives something else the next time."""
        if self._draws(layer, call):
            return False
        with self._undone(layer):
            return self._differ(call(), call())

    def _has_values(self) -> bool:
        """Say whether layers are called with tensors that have values."""
        return True

    def _undone(self, layer: Any) -> Block[Any]:
        """Return a block after which the variables of a layer are as before."""
        return self._backend.unchanged(self._parts_of(layer.variables))

    def _way_back(self, variables: Iterable[Any]) -> Callable[[], None]:
        """Return a function that gives variables, and nothing else, the values of now."""
        raise NotImplementedError

    def _parts_of(self, variables: Iterable[Any]) -> list[Any]:
        """Return the variables of the framework inside those of Keras, of all replicas."""
        backend = self._backend
        natives = map(backend.native, variables)
        return [part for one in natives for part in backend.local_results(self._model, one)]

    def _with_others(self, leaf: Any) -> Any:
        """Return a tensor with other rows in its second half."""
        ops = self._backend.ops
        if not ops.is_tensor(leaf) or not self.has_rows(leaf):
            return leaf
        return ops.take(leaf, [row % (self.count // 2) for row in range(self.count)])

    def _differ(self, some: list[Any], others: list[Any]) -> bool:
        """Say whether first halves of rows differ by more than rounding."""
        for one, other in zip(some, others):
            name = str(getattr(one, "dtype", ""))
            precision = next((_PRECISIONS[kind] for kind in _PRECISIONS if kind in name), 0.0)
            if not precision or not self.has_rows(one):
                continue
            one, other = (
                self._backend.ops.numpy(leaf)[: self.count // 2].astype(np.float64)
                for leaf in (one, other)
            )
            rounding = 3 * precision**0.5
            if np.abs(one - other).max(initial=0) > rounding * np.abs(one).max(initial=0):
                return True
        return False

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
    """Return for each row of a batch what tells its kind, given arrays with a row for each.

    Labels tell kinds; targets and weights that are different in all rows do not. So an array
    counts only if rows of one kind are left.
    """
    keys = [b""] * count
    for column in sorted(_columns(leaves, count), key=lambda parts: len(set(parts))):
        joined = [key + part for key, part in zip(keys, column)]
        if len(set(joined)) < count or len(set(keys)) == 1:
            keys = joined
    return keys


def _columns(leaves: Iterable[Any], count: int) -> Iterator[list[bytes]]:
    """Return for each array the bytes of its rows."""
    for leaf in leaves:
        rows = np.ascontiguousarray(leaf)
        if rows.ndim and len(rows) == count:
            is_text = rows.dtype.hasobject  # whose bytes are addresses
            texts = rows.tolist() if is_text else ()
            yield [repr(text).encode() for text in texts] or [row.tobytes() for row in rows]
