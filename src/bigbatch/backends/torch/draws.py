"""Random draws of the full batch, row by row, in each micro-batch.

On a CPU torch draws one number after the other. So a micro-batch has its rows of a draw of the
full batch if its draw goes on where that of the micro-batch before has ended:

- a layer with a seed has a generator of its own for every draw: it is kept for the batch;
- a Dropout layer without one draws from the generator of torch, as all others do, and modules
  of torch, too. There the first micro-batch passes over the numbers of the samples after it, so
  that the next layer finds what it finds in the full batch. In window mode the batches of a
  window are held, and counted, for that.

Normal draws come in blocks of 16, and have a stream of their own. On other devices a draw is
not in the order of its rows: micro-batches draw numbers of their own, from the same
distribution.

A draw may have several rows for each sample. They follow each other, or are in blocks, each
with a row of every sample: real and fake samples of a GAN that are concatenated. The check of
the first batch finds out.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any, Callable, Iterator, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bigbatch.backends.torch.compat import (
    BY_SHAPE,
    WITH_GLOBAL_SEED,
    drawn_seed,
    follows_torch,
    random_module,
    schema_of,
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
        self.places: list[int] | None = None
        """For each draw in turn, how many rows it has for each sample, if that is known."""
        self.shared: set[tuple[str, tuple[int, ...]]] = set()
        """The draws, by function and shape, that all samples share."""
        self.in_blocks = False
        """Whether several rows for each sample are in blocks, each with one of every sample."""
        self._generators: dict[Any, Any] = {}
        self._states: dict[Any, Any] = {}
        self._streams: dict[Any, NormalStream] = {}
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

    def _rows_per_sample(self, shape: Any, kind: str = "") -> int:
        """Return how many rows the next draw has for each sample, given its shape."""
        number, self._number = self._number, self._number + 1
        if self.places is not None and number < len(self.places):
            return self.places[number]
        if (kind, tuple(shape)) in self.shared:
            return 0
        return int(bool(len(shape)) and shape[0] == self._rows[1])

    def _draw(self, draw: Callable[..., Any], shape: Any, *args: Any, **kwargs: Any) -> Any:
        """Draw as usual, with the generator that the micro-batch before has used."""
        # A categorical draw has one row for each row of its logits.
        logits = shape if torch.is_tensor(shape) else None
        rows = self._rows_per_sample(shape if logits is None else logits.shape, draw.__name__)
        if not rows:
            return draw(shape, *args, **kwargs)
        if not self._is_in_blocks(rows):
            return self._with_generator(functools.partial(draw, shape, *args, **kwargs))

        def draw_rows(here: slice) -> Any:
            rest = (here.stop - here.start, *shape[1:]) if logits is None else logits[here]
            return draw(rest, *args, **kwargs)

        return self._blocks(draw_rows, rows, kwargs.get("seed"))

    def _with_generator(self, draw: Callable[[], Any]) -> Any:
        module, number = random_module(), self._number
        make = module.torch_seed_generator

        def kept(seed: Any) -> Any:
            generator = make(seed)  # which advances the seed
            return self._generators.setdefault(number, generator)

        with replaced(module, torch_seed_generator=kept):
            return draw()

    def _is_in_blocks(self, rows: int) -> bool:
        return self.in_blocks and rows > 1 and self._rows[2] is not None

    def _blocks(self, draw: Callable[[slice], Any], rows: int, seed: Any) -> Any:
        """Draw the rows of this micro-batch in each block, from a generator for each.

        `draw` is called with which rows of the micro-batch it is to draw.
        """
        module, (_, count, total) = random_module(), self._rows
        assert total is not None
        generator, parts = module.torch_seed_generator(seed), []  # which advances the seed
        for block in range(rows):
            key = self._number, block
            is_first = key not in self._generators
            kept = self._generators.setdefault(key, _copy_of(generator))
            with replaced(module, torch_seed_generator=lambda _, kept=kept: kept):
                left = block * total if is_first else 0
                while left:  # the samples of the blocks before, a micro-batch's at a time
                    left -= len(draw(slice(0, min(left, count))))
                parts.append(draw(slice(block * count, (block + 1) * count)))
        return torch.cat(parts)

    def _draw_globally(
        self, draw: Callable[..., Any], shape: Any, *args: Any, seed: Any = None, **kwargs: Any
    ) -> Any:
        """Draw numbers of its own in each micro-batch: how many it takes is not known."""
        if self._rows_per_sample(shape, draw.__name__) and self._rows[0]:
            seed = drawn_seed(seed) + self._rows[0]
        return draw(shape, *args, seed=seed, **kwargs)

    def _normal(
        self, draw: Callable[..., Any], shape: Any, *args: Any, seed: Any = None, **kwargs: Any
    ) -> Any:
        """Draw from the stream that the micro-batch before has drawn from."""
        rows = self._rows_per_sample(shape, draw.__name__)
        if not rows:
            return draw(shape, *args, seed=seed, **kwargs)
        module, (_, _, total) = random_module(), self._rows
        generator = module.torch_seed_generator(seed)  # which advances the seed
        blocks = rows if self._is_in_blocks(rows) else 1
        of_row = math.prod(shape[1:])
        numbers, here = None if total is None else total * rows * of_row, math.prod(shape)
        parts = []
        for block in range(blocks):
            key = self._number, block
            is_first = key not in self._streams
            stream = self._streams.setdefault(key, NormalStream(_copy_of(generator), numbers))

            def draw_flat(count: int, stream: NormalStream = stream) -> Any:
                with replaced(module, torch_seed_generator=lambda _: stream.generator):
                    return draw((count,), *args, seed=seed, **kwargs)

            left = block * (total or 0) * of_row if is_first else 0
            while left:  # the numbers of the blocks before, a micro-batch's at a time
                left -= len(stream.next(min(left, here), draw_flat))
            parts.append(stream.next(here // blocks, draw_flat))
        return torch.cat(parts).reshape(tuple(shape))

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
        rows = self._rows_per_sample(shape_of_noise(inputs, noise_shape))
        if not self._is_in_blocks(rows):
            return self._with_generator(draw) if rows else draw()

        def draw_rows(here: slice) -> Any:
            rest = noise_shape and (here.stop - here.start, *noise_shape[1:])
            return dropout(inputs[here], rate, rest, seed)

        return self._blocks(draw_rows, rows, seed)

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
        rows = self._rows_per_sample(input.shape)
        _, count, total = self._rows
        if not rows or total is None or input.device.type != "cpu":
            return draw()
        here, parts = torch.get_rng_state(), []
        blocks = rows if self._is_in_blocks(rows) else 1
        is_first = (self._number, 0) not in self._states
        for block, part in enumerate([input] if blocks == 1 else input.chunk(blocks)):
            key = self._number, block
            if not is_first:
                torch.set_rng_state(self._states[key])
            parts.append(dropout(part, p, training, inplace))
            self._states[key] = torch.get_rng_state()
            if is_first:
                of_sample = rows // blocks * math.prod(input.shape[1:])
                self._pass_over(part, p, (total - count) * of_sample)
        if not is_first:
            torch.set_rng_state(here)
        return parts[0] if blocks == 1 else input if inplace else torch.cat(parts)

    def _pass_over(self, inputs: Any, rate: float, count: int) -> None:
        """Draw the numbers of the samples that are not here, a micro-batch's at a time."""
        chunk = torch.empty(inputs.numel(), dtype=inputs.dtype)
        while count:
            count -= chunk[:count].bernoulli_(1 - rate).numel()


def _copy_of(generator: Any) -> Any:
    copy = torch.Generator(device=generator.device)
    copy.set_state(generator.get_state())
    return copy


class _OfTorch(TorchDispatchMode):
    """Sees what draws from the generator of torch."""

    def __init__(self, see: Callable[[str], None]) -> None:
        super().__init__()
        self._see = see
        self.is_known = False
        """Whether it is part of a draw that has been seen."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        given = (*args, *kwargs.values())
        has_generator = any(isinstance(one, torch.Generator) for one in given)
        names = [one.name for one in schema_of(func).arguments]
        by_name = {**dict(zip(names, args)), **kwargs}
        # Attention may drop out, and does not unless it is asked to.
        draws_nothing = "dropout_p" in names and not by_name.get("dropout_p", 0.0)
        is_tagged = torch.Tag.nondeterministic_seeded in func.tags
        is_draw = is_tagged and not has_generator and not draws_nothing
        if is_draw and not self.is_known:
            self._see(f"torch.{func.overloadpacket.__name__}")
        return func(*args, **kwargs)


@contextlib.contextmanager
def watching_draws(
    see: Callable[[Drawn], None], see_other: Callable[[str], None] = lambda _: None
) -> Iterator[None]:
    """Return a block in which `see` is called with each draw.

    `see_other` is called with the names of functions of torch that draw by themselves.
    """
    module, of_torch = random_module(), torch.nn.functional
    seeds: list[Any] = [None]
    others = _OfTorch(see_other)

    def watched(
        name: str, draw: Callable[..., Any], shape: Any, *args: Any, **kwargs: Any
    ) -> Any:
        with replaced(others, is_known=True):
            drawn = draw(shape, *args, **kwargs)
        first = tuple(shape.shape if torch.is_tensor(shape) else shape)
        see(Drawn(first, name, kwargs.get("seed"), drawn.dtype))
        return drawn

    def dropout(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
        is_seeded = rate not in (0.0, 1.0) and not follows_torch(noise_shape, seed)
        if is_seeded:
            see(Drawn(shape_of_noise(inputs, noise_shape), "dropout", seed))
        seeds.append(seed)
        try:
            with replaced(others, is_known=is_seeded):
                return originals[0](inputs, rate, noise_shape, seed)
        finally:
            seeds.pop()

    def unseeded(
        input: Any,  # noqa: A002 (torch's name)
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Any:
        # A function mode of torch calls what stands in the place of dropout once more.
        if training and p not in (0.0, 1.0) and not others.is_known:
            see(Drawn(tuple(input.shape), UNSEEDED, seeds[-1]))
        with replaced(others, is_known=True):
            return originals[1](input, p, training, inplace)

    originals = module.dropout, of_torch.dropout
    instead = {
        name: functools.partial(watched, name, getattr(module, name))
        for name in (*BY_SHAPE, "normal", *WITH_GLOBAL_SEED, "categorical")
    }
    in_module = replaced(module, **instead, dropout=dropout)
    with in_module, replaced(of_torch, dropout=unseeded), others:
        yield


def shape_of_noise(inputs: Any, noise_shape: Any) -> tuple[int, ...]:
    """Return the shape of what dropout draws."""
    given = inputs.shape if noise_shape is None else noise_shape
    return tuple(own if one is None else one for one, own in zip(given, inputs.shape))


def passes_over(draw: Drawn) -> bool:
    """Say whether the rows of a draw depend on how many samples the batch has."""
    return draw.kind in ("normal", UNSEEDED)


def has_global_seed(draw: Drawn) -> bool:
    """Say whether a draw takes its seed from the generator of Keras for draws without one."""
    return draw.seed is None and draw.kind != UNSEEDED


def differs(draw: Drawn, *, on_cpu: bool) -> bool:
    """Say whether micro-batches may not have the rows of a draw of the full batch.

    Args:
        draw: a draw that has numbers for each sample.
        on_cpu: whether a CPU draws.
    """
    is_half = draw.kind == "normal" and draw.dtype in (torch.float16, torch.bfloat16)
    return not on_cpu or draw.kind in WITH_GLOBAL_SEED or is_half
