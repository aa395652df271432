"""Which optimizer is it? One file per generation knows the rest."""

from __future__ import annotations

from typing import Any

from bigbatch.backends.tensorflow.keras2_optimizers import (
    Keras2Optimizer,
    LegacyKeras2Optimizer,
)
from bigbatch.backends.tensorflow.keras3_optimizers import Keras3Optimizer
from bigbatch.backends.tensorflow.plain_optimizers import PlainOptimizer
from bigbatch.backends.tensorflow.v1_optimizers import V1Optimizer
from bigbatch.core.loop_checks import checked_optimizer

_KINDS = (Keras3Optimizer, Keras2Optimizer, LegacyKeras2Optimizer, V1Optimizer)


def adapted(optimizer: Any, variables: list[Any]) -> PlainOptimizer:
    """Check that `optimizer` can update `variables`; return it with what is known of it."""
    optimizer = checked_optimizer(optimizer)
    for kind in _KINDS:
        if kind.fits(optimizer):
            return kind(optimizer, variables)
    return PlainOptimizer(optimizer, variables)
