"""Normal numbers of a batch, drawn part by part.

A CPU of torch makes normal numbers in blocks of 16. If a draw does not end with a block, the
last 16 numbers are drawn once more, after all others. Fewer than 16 are drawn one by one.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

_BLOCK = 16


class NormalStream:
    """The numbers of one draw.

    If it is not known how many there are, and they do not end with a block, the last 16 are not
    those of the whole draw.

    Args:
        generator: where they come from.
        total: how many there are, if that is known.
    """

    def __init__(self, generator: Any, total: int | None) -> None:
        self.generator = generator
        """Where the next numbers come from."""
        self._total = total
        self._in_blocks = None if total is None else total - total % _BLOCK
        self._drawn = self._used = 0
        self._left: Any = None

    def next(self, count: int, draw: Callable[[int], Any]) -> Any:
        """Return the next numbers; `draw` draws some from the generator."""
        if self._total is not None and self._total < _BLOCK:
            return draw(count)
        kept = 0 if self._left is None else len(self._left)
        wanted = -(-max(count - kept, 0) // _BLOCK) * _BLOCK
        if self._in_blocks is not None:
            wanted = min(wanted, self._in_blocks - self._drawn)
        if wanted or self._left is None:
            new = draw(wanted)
            self._left = new if self._left is None else torch.cat([self._left, new])
            self._drawn += wanted
        values, self._left = self._left[:count], self._left[count:]
        self._used += count
        if self._total is None or self._total % _BLOCK == 0:
            return values
        return self._with_last(values, count, draw)

    def _with_last(self, values: Any, count: int, draw: Callable[[int], Any]) -> Any:
        """Return numbers with those among the last 16 as they are drawn after all others."""
        assert self._total is not None
        replaced = min(self._used - (self._total - _BLOCK), count)
        if replaced <= 0:
            return values
        here = self.generator.get_state()
        torch.rand(self._total - self._drawn, generator=self.generator, dtype=values.dtype)
        last = draw(_BLOCK)
        self.generator.set_state(here)
        end = _BLOCK - (self._total - self._used)
        return torch.cat([values[: count - replaced], last[end - replaced : end]])
