"""Random draws of the full batch, row by row, in each micro-batch.

On a CPU torch draws one number after the other. So a micro-batch has its rows of a draw of the
full batch if its draw goes on where that of the micro-batch before has ended:

- a layer with a seed has a generator of its own for every draw: it is kept for the batch;
- a Dropout layer without one draws from the generator of torch, as all others do, and modules
  of torch, too. There the first micro-batch passes over the numbers of the samples after it, so
  that the next layer finds what it finds in the full batch. In window mode the number of
  samples is not known, and micro-batches draw their own.

Normal draws come in blocks of 16, and have a stream of their own. On other devices a draw is
not in the order of its rows: micro-batches draw numbers of their own, from the same
distribution.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any, Callable, Iterator, NamedTuple

import torch

from bigbatch.backends.torch.compat import (
    BY_SHAPE,
    WITH_GLOBAL_SEED,
    drawn_seed,
    follows_torch,
    random_module,
)
from bigbatch.backends.torch.normals import NormalStream
from bigbatch.core.patching import replaced


class Drawn(NamedTuple):
    """One draw that has been seen."""

    shape: tuple[int, ...]
    kind: str = ""
    """The function of `keras.random`, or `UNSEEDED`."""
    seed: Any = None
    dtype: Any = None


UNSEEDED = "torch.nn.functional.dropout"
"""The draws that come from the generator of torch."""


class Draws:
    """The random draws of one batch, micro-batch by micro-batch."""

    def __init__(self) -> None:
        self.places: list[bool] | None = None
        """For each draw in turn, whether it is one for each sample, if that is known."""
        self._generators: dict[int, Any] = {}
        self._states: dict[int, Any] = {}
        self._streams: dict[int, NormalStream] = {}
        self._number = 0
        self._rows: tuple[int, int, int | None] = (0, 0, None)

    def begin(self) -> None:
        """Begin a batch."""
        self._generators.clear()
        self._states.clear()
        self._streams.clear()

    @contextlib.contextmanager
    def rows(self, start: int, count: int, total: int | None) -> Iterator[None]:
        """Return a block in which a micro-batch draws its rows of the draws of the batch.

        Args:
            start: the samples of the batch before this micro-batch.
            count: the samples of this micro-batch.
            total: the samples of the batch, if they are known.
        """
        self._rows, self._number = (start, count, total), 0
        module = random_module()
        instead = {
            name: functools.partial(self._draw, getattr(module, name)) for name in BY_SHAPE
        }
        for name in WITH_GLOBAL_SEED:
            instead[name] = functools.partial(self._draw_globally, getattr(module, name))
        instead["normal"] = functools.partial(self._normal, module.normal)
        instead["dropout"] = functools.partial(self._dropout, module.dropout)
        instead["categorical"] = functools.partial(self._draw, module.categorical)
        unseeded = functools.partial(self._unseeded, torch.nn.functional.dropout)
        with replaced(module, **instead), replaced(torch.nn.functional, dropout=unseeded):
            yield

    def _is_of_samples(self, shape: Any) -> bool:
        """Say whether the next draw is one for each sample, given its shape."""
        number, self._number = self._number, self._number + 1
        if self.places is not None and number < len(self.places):
            return self.places[number]
        return bool(len(shape)) and shape[0] == self._rows[1]

    def _draw(self, draw: Callable[..., Any], shape: Any, *args: Any, **kwargs: Any) -> Any:
        """Draw as usual, with the generator that the micro-batch before has used."""
        # A categorical draw has one row for each row of its logits.
        if not self._is_of_samples(shape.shape if torch.is_tensor(shape) else shape):
            return draw(shape, *args, **kwargs)
        return self._with_generator(functools.partial(draw, shape, *args, **kwargs))

    def _with_generator(self, draw: Callable[[], Any]) -> Any:
        module, number = random_module(), self._number
        make = module.torch_seed_generator

        def kept(seed: Any) -> Any:
            generator = make(seed)  # which advances the seed
            return self._generators.setdefault(number, generator)

        with replaced(module, torch_seed_generator=kept):
            return draw()

    def _draw_globally(
        self, draw: Callable[..., Any], shape: Any, *args: Any, seed: Any = None, **kwargs: Any
    ) -> Any:
        """Draw numbers of its own in each micro-batch: how many it takes is not known."""
        if self._is_of_samples(shape) and self._rows[0]:
            seed = drawn_seed(seed) + self._rows[0]
        return draw(shape, *args, seed=seed, **kwargs)

    def _normal(
        self, draw: Callable[..., Any], shape: Any, *args: Any, seed: Any = None, **kwargs: Any
    ) -> Any:
        """Draw from the stream that the micro-batch before has drawn from."""
        if not self._is_of_samples(shape):
            return draw(shape, *args, seed=seed, **kwargs)
        module, (_, _, total) = random_module(), self._rows
        generator = module.torch_seed_generator(seed)  # which advances the seed
        per_sample = math.prod(shape[1:])
        numbers = None if total is None else total * per_sample
        stream = self._streams.setdefault(self._number, NormalStream(generator, numbers))
        with replaced(module, torch_seed_generator=lambda _: stream.generator):
            values = stream.next(
                math.prod(shape), lambda count: draw((count,), *args, seed=seed, **kwargs)
            )
        return values.reshape(tuple(shape))

    def _dropout(
        self,
        dropout: Callable[..., Any],
        inputs: Any,
        rate: float,
        noise_shape: Any = None,
        seed: Any = None,
    ) -> Any:
        """Drop out with a seed; without one, Keras calls what is `_unseeded` here."""
        draw = functools.partial(dropout, inputs, rate, noise_shape, seed)
        if rate in (0.0, 1.0) or follows_torch(noise_shape, seed):
            return draw()
        is_of_samples = self._is_of_samples(shape_of_noise(inputs, noise_shape))
        return self._with_generator(draw) if is_of_samples else draw()

    def _unseeded(
        self,
        dropout: Callable[..., Any],
        input: Any,  # noqa: A002 (torch's name)
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Any:
        draw = functools.partial(dropout, input, p, training, inplace)
        if not training or p in (0.0, 1.0):
            return draw()
        is_of_samples = self._is_of_samples(input.shape)
        _, count, total = self._rows
        if not is_of_samples or total is None or input.device.type != "cpu":
            return draw()
        number, here = self._number, torch.get_rng_state()
        is_first = number not in self._states
        if not is_first:
            torch.set_rng_state(self._states[number])
        result = draw()
        self._states[number] = torch.get_rng_state()
        if is_first:
            self._pass_over(input, p, (total - count) * math.prod(input.shape[1:]))
        else:
            torch.set_rng_state(here)
        return result

    def _pass_over(self, inputs: Any, rate: float, count: int) -> None:
        """Draw the numbers of the samples that are not here, a micro-batch's at a time."""
        chunk = torch.empty(inputs.numel(), dtype=inputs.dtype)
        while count:
            count -= chunk[:count].bernoulli_(1 - rate).numel()


@contextlib.contextmanager
def watching_draws(see: Callable[[Drawn], None]) -> Iterator[None]:
    """Return a block in which `see` is called with each draw."""
    module, of_torch = random_module(), torch.nn.functional
    seeds: list[Any] = [None]

    def watched(
        name: str, draw: Callable[..., Any], shape: Any, *args: Any, **kwargs: Any
    ) -> Any:
        drawn = draw(shape, *args, **kwargs)
        first = tuple(shape.shape if torch.is_tensor(shape) else shape)
        see(Drawn(first, name, kwargs.get("seed"), drawn.dtype))
        return drawn

    def dropout(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
        if rate not in (0.0, 1.0) and not follows_torch(noise_shape, seed):
            see(Drawn(shape_of_noise(inputs, noise_shape), "dropout", seed))
        seeds.append(seed)
        try:
            return originals[0](inputs, rate, noise_shape, seed)
        finally:
            seeds.pop()

    def unseeded(
        input: Any,  # noqa: A002 (torch's name)
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Any:
        if training and p not in (0.0, 1.0):
            see(Drawn(tuple(input.shape), UNSEEDED, seeds[-1]))
        return originals[1](input, p, training, inplace)

    originals = module.dropout, of_torch.dropout
    instead = {
        name: functools.partial(watched, name, getattr(module, name))
        for name in (*BY_SHAPE, "normal", *WITH_GLOBAL_SEED, "categorical")
    }
    with replaced(module, **instead, dropout=dropout), replaced(of_torch, dropout=unseeded):
        yield


def shape_of_noise(inputs: Any, noise_shape: Any) -> tuple[int, ...]:
    """Return the shape of what dropout draws."""
    given = inputs.shape if noise_shape is None else noise_shape
    return tuple(own if one is None else one for one, own in zip(given, inputs.shape))


def differs(draw: Drawn, *, is_whole: bool, on_cpu: bool) -> bool:
    """Say whether micro-batches may not have the rows of a draw of the full batch.

    Args:
        draw: a draw that has numbers for each sample.
        is_whole: whether the samples of a batch are known when its micro-batches run.
        on_cpu: whether a CPU draws.
    """
    if not on_cpu:
        return True
    if draw.kind == "normal":
        return not is_whole or draw.dtype in (torch.float16, torch.bfloat16)
    return draw.kind == UNSEEDED and not is_whole
