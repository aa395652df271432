"""Whether the samples of a batch depend on each other, in the loss or in a layer: tried."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, Callable

from bigbatch.backends.keras import backend_of
from bigbatch.engine.batch_norm import BatchNorm
from bigbatch.errors import ArgumentError, explain

_ROWS = 16


class CouplingCheck:
    """Looks at samples of the first batch there is, once.

    Args:
        model: a Keras model, built when it is looked at.
        check: called with a `Sample`.
    """

    def __init__(self, model: Any, check: Callable[[Any], None]) -> None:
        self._model = model
        self._check = check
        # In a custom `train_step` loss and forward pass cannot be told apart.
        self.is_done = backend_of(model).has_custom_train_step(model)
        self.sample: Any = None
        """The samples that have been looked at."""

    def at(self, data: Any, rows: int = _ROWS) -> None:
        """Look at a batch, or at the next one if this has too few samples."""
        if self.is_done:
            return
        sample = backend_of(self._model).sample(self._model, data, rows)
        if sample.is_enough:
            self.sample, self.is_done = sample, True
            self._check(sample)


def warn_of_coupled_loss(sample: Any) -> None:
    """Warn if the loss compares samples: no sum over micro-batches is right then."""
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


def refuse_mixing_layers(model: Any, batch_norm: str, sample: Any) -> None:
    """Raise if layers mix samples before the loss: two passes are not exact then."""
    layers: list[Any] = []
    with contextlib.suppress(Exception):
        layers = sample.mixing_layers(BatchNorm(model, batch_norm).watching())
    if layers:
        raise ArgumentError(samples_meet(layers[0]))


def samples_meet(layer: Any) -> str:
    """Say that a layer mixes samples, not only the loss."""
    return explain(
        received=f"coupled=True and the layer {layer.name!r} ({type(layer).__name__}), in "
        "which the samples of a batch meet in the forward pass",
        expected="samples that meet in the loss only",
        fix='pass batch_norm="frozen" for BatchNormalization, or use LayerNormalization or '
        "GroupNormalization; move what mixes samples from call() to the loss",
    )
