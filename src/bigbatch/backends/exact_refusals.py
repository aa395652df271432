"""Errors for models without exact batch normalisation, raised before training."""

from __future__ import annotations

from typing import Any

from bigbatch.errors import ArgumentError, explain


def refuse_exact(model: Any, layers: list[Any], others: list[Any]) -> None:
    """Raise if a model cannot be trained with statistics of the whole batch.

    Args:
        model: a Keras 3 model.
        layers: its batch normalisation layers that are trained.
        others: those of them that compute statistics in a way of their own.
    """
    own = {id(layer) for layer in others}
    if model.run_eagerly:
        raise ArgumentError(
            explain(
                received='batch_norm="exact" and compile(run_eagerly=True)',
                expected="a model that is traced: micro-batches run in stages of its graph",
                fix='compile without run_eagerly, or use batch_norm="pooled"',
            )
        )
    for layer in layers:
        if getattr(layer, "renorm", False):
            raise ArgumentError(
                explain(
                    received=f'batch_norm="exact" and {layer.name} with renorm=True',
                    expected="layers that normalise with the statistics of the batch alone",
                    fix="leave renorm out: statistics of the whole batch do not need it; "
                    'or use batch_norm="pooled"',
                )
            )
        if id(layer) in own:
            raise ArgumentError(
                explain(
                    received=f'batch_norm="exact" and {layer.name}, a {type(layer).__name__} '
                    "with statistics of its own",
                    expected="layers whose statistics are those of BatchNormalization",
                    fix="compute them with bigbatch.cross_microbatch_sum in a layer that is "
                    'not a BatchNormalization, or use batch_norm="pooled"',
                )
            )
