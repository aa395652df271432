"""What all generations of Keras have in common, and which of them a model is of.

What differs is in one file for each: `keras2`, `keras3`. Names that are not public are in these
three files alone; `tests/test_compat.py` and `tests/test_compat_keras2.py` pin them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import Any, Callable

import keras
import tensorflow as tf


def keras_of(model: Any) -> Any:
    """Return what knows the Keras that a model is of: a `Keras2` or `Keras3`.

    `None` for anything that is not a model of a Keras.
    """
    for kind in type(model).__mro__:
        package = kind.__module__.split(".")[0]
        # In Keras 3 a layer with a `Trainer` is a model, too.
        if kind.__name__ in ("Model", "Trainer") and package in ("keras", "tf_keras"):
            return _generation(package)
    return None


@functools.lru_cache(maxsize=None)
def _generation(package: str) -> Any:
    if package == "keras" and int(keras.__version__.split(".")[0]) >= 3:
        return importlib.import_module("bigbatch.keras.keras3").Keras3(keras)
    # Before TensorFlow 2.16 the public names are those of `tf.keras`.
    public = tf.keras if package == "keras" else importlib.import_module(package)
    return importlib.import_module("bigbatch.keras.keras2").Keras2(public)


class Callback(keras.callbacks.Callback):
    """A callback for models of every Keras, with nothing to do for single batches."""

    def _implements_train_batch_hooks(self) -> bool:
        return False

    _implements_test_batch_hooks = _implements_train_batch_hooks
    _implements_predict_batch_hooks = _implements_train_batch_hooks


class Generation:
    """What there is to know of one generation of Keras.

    Args:
        package: its public names.
    """

    def __init__(self, package: Any) -> None:
        self.keras = package

    def unpacked(self, data: Any) -> tuple[Any, Any, Any]:
        """Return the inputs, targets and sample weights of a batch."""
        return self.keras.utils.unpack_x_y_sample_weight(data)

    def packed(self, x: Any, y: Any, sample_weight: Any) -> Any:
        """Return a batch as `train_step` gets it."""
        return self.keras.utils.pack_x_y_sample_weight(x, y, sample_weight)

    def has_own_train_step(self, model: Any) -> bool:
        """Say whether the model does not leave `train_step` to Keras."""
        own = type(model).train_step is not self.keras.Model.train_step
        return own or "train_step" in vars(model)

    def uses_inputs_after_call(self, model: Any) -> bool:
        """Say whether the model may look at its inputs when it computes the loss or metrics."""
        return any(
            getattr(type(model), name) is not getattr(self.keras.Model, name)
            or name in vars(model)
            for name in ("compute_loss", "compute_metrics")
        )

    def name_of(self, optimizer: Any) -> str:
        """Return the name of an optimizer."""
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        return inner.name if hasattr(inner, "name") else inner._name

    def scaling_sums_of_layers(
        self, model: Any, factor: Callable[[], Any]
    ) -> contextlib.AbstractContextManager[Any]:
        """Return a block in which what layers add to the loss as a sum over samples is scaled.

        By `factor()`, unless that is `None`. As a rule layers add nothing of the kind.
        """
        del model, factor
        return contextlib.nullcontext()

    def layers_with_other_draws(self, model: Any) -> list[Any]:
        """Return the layers that draw other random numbers than they do for the full batch."""
        del model
        return []

    def is_mean(self, metric: Any) -> bool:
        """Say whether a metric is the mean of what it is updated with."""
        return type(metric) is self.keras.metrics.Mean


def strategy_of(model: Any) -> Any:
    """Return the strategy in whose scope the model was made."""
    return model.distribute_strategy


def is_multi_worker(model: Any) -> bool:
    """Say whether a model is trained by several processes together."""
    return isinstance(strategy_of(model), tf.distribute.MultiWorkerMirroredStrategy)


def layers_of(model: Any) -> list[Any]:
    """Return the layers of a model, however deep they are."""
    # In Keras 2 metrics are layers, too.
    return [
        layer
        for layer in model._flatten_layers(include_self=False)
        if not hasattr(layer, "update_state")
    ]


def python_function(function: Any) -> Callable[..., Any]:
    """Return the Python function in a `tf.function`, and any other function as it is.

    Gradients could not get out of a graph of its own.
    """
    return getattr(function, "python_function", function)


def set_mask(tensor: Any, mask: Any) -> None:
    """Attach a mask to a tensor, for Keras to see."""
    tensor._keras_mask = mask


def mask_of(tensor: Any) -> Any:
    """Return the mask Keras has attached to a tensor, or `None`."""
    return getattr(tensor, "_keras_mask", None)
