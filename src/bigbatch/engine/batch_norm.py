"""Batch normalisation under accumulation: three of the four ways; pooling is the default."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Iterator

from bigbatch.backends.keras import backend_of, layers_of
from bigbatch.core.exact import exact_choice
from bigbatch.core.patching import replaced

MODES = ("pooled", "exact", "microbatch", "frozen")


def batch_norms_of(model: Any) -> list[Any]:
    """Return the layers of a model that normalise with the statistics of a micro-batch."""
    is_batch_norm = backend_of(model).is_batch_norm
    return [layer for layer in layers_of(model) if is_batch_norm(layer) and layer.trainable]


def is_pooled(layer: Any, mode: Any) -> bool:
    """Say whether a layer's moving statistics are those of the whole batch."""
    # With renorm a layer reads its moving statistics in training: it stays as it is.
    return mode == "pooled" and not getattr(layer, "renorm", False)


class BatchNorm:
    """The batch normalisation layers of a model.

    - "pooled": each micro-batch is normalised with its own statistics, and the moving
      statistics are moved once, by those of the whole batch;
    - "exact", or an `ExactBatchNorm`: the statistics of the whole batch normalise, and move the
      moving statistics, once;
    - "microbatch": as Keras has it, the moving statistics are moved by every micro-batch;
    - "frozen": the moving statistics normalise, and are not moved.

    Args:
        model: the model.
        mode: one of `MODES`, or an `ExactBatchNorm`.
    """

    def __init__(self, model: Any, mode: Any) -> None:
        self._model = model
        self._backend = backend_of(model)
        self.is_exact = exact_choice(mode) is not None
        """Whether micro-batches run in stages, with statistics of them all."""
        if self.is_exact:
            self._backend.refuse_exact(model, batch_norms_of(model))
        self._ops = self._backend.ops
        self._mode = mode
        self._called: list[Any] = []
        self._before: dict[int, list[Any]] = {}
        self.switch: Any = None
        """If given, what says whether moving statistics normalise: as long as it is true."""
        self.moved_by_each: list[Any] = []
        """The layers in a graph inside that of a micro-batch, from where moments cannot get."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[Any]]:
        """Return a block in which the layers see one micro-batch.

        The list it gives fills with what pooling needs, call by call; it adds up.
        """
        self._called = []
        moments: list[Any] = []
        here = self._backend.trace_now()
        with contextlib.ExitStack() as stack:
            for layer in batch_norms_of(self._model):
                if self._mode == "frozen":
                    call = functools.partial(_call_frozen, layer.call)
                    stack.enter_context(replaced(layer, call=call))
                    continue
                if self.is_exact:
                    stack.enter_context(self._backend.statistics_of_batch(layer))
                    continue
                # Replicas may have different numbers of micro-batches: they cannot meet.
                stack.enter_context(self._backend.alone(layer))
                if self.switch is not None and not self._backend.is_off(self.switch):
                    choose = functools.partial(self._chosen, layer)
                    choosing = self._backend.choosing_moments(layer, choose)
                    stack.enter_context(choosing or contextlib.nullcontext())
                if is_pooled(layer, self._mode):
                    call = functools.partial(self._call, moments, here, layer, layer.call)
                    stack.enter_context(replaced(layer, call=call))
            yield moments

    def _call(
        self, moments: list[Any], here: Any, layer: Any, call: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a layer; note the statistics of the micro-batch, put the moving ones back."""
        nested = self._backend.trace_now() is not here  # they could not get out
        if kwargs.get("training") is False or nested:
            if nested and layer not in self.moved_by_each:
                self.moved_by_each.append(layer)
            return call(*args, **kwargs)
        old = self._statistics(layer)
        # With a momentum of zero the moving statistics become those of the micro-batch.
        self._backend.clear_statistics(layer)
        self._before[id(layer)] = old
        with replaced(layer, momentum=0.0):
            outputs = call(*args, **kwargs)
        del self._before[id(layer)]
        mean, variance = map(self._ops.weight, self._statistics(layer))
        for variable, value in zip((layer.moving_mean, layer.moving_variance), old):
            variable.assign(value)
        inputs = args[0] if args else next(iter(kwargs.values()))
        mask = kwargs.get("mask") if self._backend.knows_mask(layer) else None
        count = self._count(inputs, mask, mean)
        variance *= self._backend.bias_of_variance(layer, count)
        # About the moving mean: about zero, the variance would be a small difference of large
        # numbers.
        shift = mean - self._ops.weight(old[0])
        sums = (count, count * shift, count * (variance + shift * shift))
        moments.append(tuple(map(self._ops.noted, sums)))
        self._called.append(layer)
        return outputs

    def can_be_switched(self) -> bool:
        """Say whether every layer can be made to normalise with moving statistics."""
        layers = [] if self._mode == "frozen" else batch_norms_of(self._model)
        return all(self._backend.choosing_moments(one, lambda *two: two) for one in layers)

    def _chosen(self, layer: Any, mean: Any, variance: Any) -> tuple[Any, Any]:
        """Return the moments to normalise with: small vectors, so that this costs nothing."""
        ops, is_on = self._ops, self._ops.tensor(self.switch)
        before = self._before.get(id(layer)) or self._statistics(layer)
        old = [ops.stop_gradient(ops.shaped_like(one, mean)) for one in before]
        return ops.where(is_on, old[0], mean), ops.where(is_on, old[1], variance)

    def update(self, sums: list[Any]) -> None:
        """Move the statistics of each layer once, by the pooled statistics of the batch.

        With n the elements of a micro-batch, μ and v its mean and (biased) variance, N = Σn:
        the pooled mean is Σnμ/N, the pooled variance Σn(v + (μ − pooled mean)²)/N. A layer
        that is called twice for a batch moves twice, as it does with the full batch.
        """
        before: dict[int, Any] = {}
        for layer, (count, first, second) in zip(self._called, sums):
            moving = list(map(self._ops.weight, self._statistics(layer)))
            old_mean = before.setdefault(id(layer), moving[0])
            shift = self._ops.divided(first, count)
            variance = self._ops.divided(second, count) - shift * shift
            variance /= self._backend.bias_of_variance(layer, count)
            pooled = old_mean + shift, variance
            # Not moved by nothing, if every element is masked.
            step = self._ops.where(count > 0, self._ops.weight(1 - layer.momentum), 0)
            variables = (layer.moving_mean, layer.moving_variance)
            for variable, value, target in zip(variables, moving, pooled):
                moved = self._ops.like(value + step * (target - value), variable)
                variable.assign(moved)

    def _statistics(self, layer: Any) -> list[Any]:
        return [self._ops.tensor(v) for v in (layer.moving_mean, layer.moving_variance)]

    def _count(self, inputs: Any, mask: Any, mean: Any) -> Any:
        """Return how many elements a mean is of."""
        if mask is not None:
            return self._ops.sum(self._ops.weight(mask))
        return self._ops.size(inputs) / self._ops.size(mean)


def _call_frozen(call: Any, *args: Any, **kwargs: Any) -> Any:
    return call(*args[:1], **{**kwargs, "training": False})
