"""Random draws of a few samples: each micro-batch draws for all and takes its rows."""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch

from bigbatch.backends.torch.compat import follows_torch
from bigbatch.backends.torch.draws import Draws, shape_of_noise
from bigbatch.backends.torch.rollback import generator_states, set_generator_states


class WholeDraws(Draws):
    """Draws that are equal however samples are cut: of all samples, in each micro-batch.

    For a trial of a few samples. Draws of training that may not be those of the full batch are
    told by the banner, and must not hide what else differs.

    Args:
        like: the draws of training.
        total: the samples of all micro-batches.
    """

    def __init__(self, like: Draws, total: int) -> None:
        super().__init__()
        self.places, self.shared, self.in_blocks = like.places, like.shared, like.in_blocks
        self._total = total
        self._is_inside = False

    def _draw(self, draw: Callable[..., Any], shape: Any, *args: Any, **kwargs: Any) -> Any:
        is_of_logits = torch.is_tensor(shape)
        of = shape.shape if is_of_logits else shape
        rows = self._rows_per_sample(of, draw.__name__)
        if self._is_inside or not rows:  # inside: a draw that another one makes
            return draw(shape, *args, **kwargs)
        whole = (rows * self._total, *of[1:])
        if is_of_logits:
            logits = shape.new_zeros(whole)
            logits[self._here(rows)] = shape
            whole = logits
        return self._rows_of(functools.partial(draw, whole, *args, **kwargs), rows)

    _normal = _draw

    def _unseeded(
        self,
        dropout: Callable[..., Any],
        input: Any,  # noqa: A002 (torch's name)
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Any:
        is_random = training and p not in (0.0, 1.0)
        if self._is_inside or not is_random:
            return dropout(input, p, training, inplace)
        rows = self._rows_per_sample(input.shape)
        if not rows:
            return dropout(input, p, training, inplace)
        ones = input.detach().new_ones((rows * self._total, *input.shape[1:]))
        kept = input * self._rows_of(functools.partial(dropout, ones, p), rows)
        return input.copy_(kept) if inplace else kept

    def _dropout(
        self,
        dropout: Callable[..., Any],
        inputs: Any,
        rate: float,
        noise_shape: Any = None,
        seed: Any = None,
    ) -> Any:
        draw = functools.partial(dropout, rate=rate, seed=seed)
        if rate in (0.0, 1.0) or follows_torch(noise_shape, seed):
            return draw(inputs, noise_shape=noise_shape)
        rows = self._rows_per_sample(shape_of_noise(inputs, noise_shape))
        if not rows:
            return draw(inputs, noise_shape=noise_shape)
        if noise_shape is not None:
            noise_shape = (rows * self._total, *noise_shape[1:])
        ones = inputs.new_ones((rows * self._total, *inputs.shape[1:]))
        return inputs * self._rows_of(
            functools.partial(draw, ones.detach(), noise_shape=noise_shape), rows
        )

    def _here(self, rows: int) -> Any:
        start, count, _ = self._rows
        if not self.in_blocks:
            return slice(rows * start, rows * (start + count))
        every = torch.arange(rows * self._total).reshape(rows, self._total)
        return every[:, start : start + count].flatten()

    def _rows_of(self, draw: Callable[[], Any], rows: int) -> Any:
        """Return the rows of this micro-batch; the generator of torch goes on only once."""
        number, now = self._number, generator_states()
        is_first = number not in self._states
        if not is_first:
            set_generator_states(self._states[number])
        self._states.setdefault(number, now)
        self._is_inside = True
        try:
            drawn = draw()[self._here(rows)]
        finally:
            self._is_inside = False
        if not is_first:
            set_generator_states(now)
        return drawn
