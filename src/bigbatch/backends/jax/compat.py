"""Names of Keras on JAX that are not public; `tests/test_compat_jax.py` pins them."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import jax

from bigbatch.backends.keras import layers_of
from bigbatch.core.patching import replaced

DRAWING_MODULE: Any = importlib.import_module("keras.src.backend.jax.random")
"""Where Keras draws; it looks `jax.random` up when it does."""

PARTS = (
    "trainable_variables",
    "non_trainable_variables",
    "optimizer_variables",
    "metrics_variables",
)
"""The parts of the state of a model, by the names under which Keras keeps them."""


_QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def quickly() -> dict[str, Any] | None:
    """Return options for programs that run once or twice: half the time to compile on a CPU."""
    return _QUICKLY if jax.default_backend() == "cpu" else None


def seeds_of(model: Any) -> list[Any]:
    """Return the variables with the state of random layers."""
    layers = (model, *layers_of(model))
    return [one.state for layer in layers for one in layer._seed_generators]


def weights_of(optimizer: Any) -> list[Any]:
    """Return the weights that an optimizer was built for."""
    return list(getattr(optimizer, "inner_optimizer", optimizer)._trainable_variables)


def set_state(model: Any, state: Any) -> None:
    """Set what `fit` puts back into a model at its end, also if it fails."""
    model._jax_state = dict(zip(PARTS, state))


def number_of_terms(model: Any) -> int:
    """Return of how many losses given to `compile` the loss is the sum, once built."""
    return len(getattr(model._compile_loss, "_flat_losses", None) or ())


def stateless_call(model: Any, weights: Any, others: Any, x: Any) -> Any:
    """Call a model for training; return outputs, new state, and what is added to the loss."""
    options = {"training": True} if model._call_has_training_arg else {}
    return model.stateless_call(weights, others, x, return_losses=True, **options)


def losses_replaced(model: Any, losses: list[Any]) -> contextlib.AbstractContextManager[None]:
    """Return a block in which these are what layers have added to the loss."""
    return replaced(model, _losses_override=list(losses))


def update_metrics(model: Any, metrics: list[Any], loss: Any, data: Any) -> Any:
    """Return logs, and the values of metrics after a batch, as `train_step` does."""
    x, y, y_pred, sample_weight = data
    return model._update_metrics_variables(metrics, loss, x, y, y_pred, sample_weight)


def leave_on_host(epoch_iterator: Any) -> None:
    """Let `fit` hand over batches as its data has them, not spread over devices.

    Keras raises if their samples do not divide by the devices.
    """
    epoch_iterator._get_iterator = epoch_iterator.data_adapter.get_jax_iterator
