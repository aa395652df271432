"""`accumulate` and `restore`: switch accumulation on and off for a Keras model."""

from __future__ import annotations

import functools
from typing import Any

import keras

from bigbatch.core.arguments import positive_integer
from bigbatch.errors import ArgumentError, explain
from bigbatch.keras import compat
from bigbatch.keras.batch_norm import MODES
from bigbatch.keras.collector import optimizers_of
from bigbatch.keras.engine import SplitEngine
from bigbatch.keras.train_function import make_train_function


def accumulate(model: Any, *, microbatch_size: int, batch_norm: str = "pooled") -> Any:
    """Let `model.fit` run every batch as micro-batches, with the update of the full batch.

    `fit`, callbacks, the optimizer and saving stay as they are: `fit(batch_size=256)` makes
    one update of 256 samples, and holds `microbatch_size` of them on the device at a time.
    The model's own `train_step` runs on each micro-batch; its gradients are collected, and
    the optimizer gets one gradient list per batch. What is saved is the plain model.

    Every term of the compiled loss is divided by what it has in the whole batch: samples,
    valid elements under a mask, the sum of the sample weights. What `add_loss`, an own
    `compute_loss` or an own `train_step` adds is taken to be a mean over samples.

    Can be called before or after `compile`, after `load_model`, and again with another
    setting. `restore` undoes it.

    Args:
        model: a Keras 3 model (TensorFlow backend).
        microbatch_size: samples per micro-batch; under a `tf.distribute` strategy, per
            micro-batch and replica.
        batch_norm: what BatchNormalization does, which normalises with the statistics of a
            micro-batch: "pooled" (its moving statistics are moved once per batch, by those of
            the whole batch), "microbatch" (as Keras has it) or "frozen" (inference mode).

    Returns:
        The same model.

    Example:
        >>> import keras
        >>> import numpy as np
        >>> import bigbatch
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> model = bigbatch.accumulate(model, microbatch_size=32)
        >>> history = model.fit(np.ones((600, 4)), np.ones((600, 1)), batch_size=256, verbose=0)
        >>> int(model.optimizer.iterations)  # 256 + 256 + 88 samples
        3
    """
    microbatch_size = positive_integer(microbatch_size, "microbatch_size")
    _check_model(model)
    if batch_norm not in MODES:
        raise ArgumentError(
            explain(
                received=f"batch_norm={batch_norm!r}",
                expected=f"one of {', '.join(map(repr, MODES))}",
                fix="leave it out, or choose one of these",
            )
        )
    engine = SplitEngine(model, microbatch_size, batch_norm)

    def make(force: bool = False) -> Any:
        if model.train_function is None or force:
            _check_optimizers(model)
            model.train_function = make_train_function(
                engine.train_on,
                functools.partial(compat.build, model),
                model.steps_per_execution,
                model.run_eagerly,
            )
        return model.train_function

    # Attributes of the instance: Keras honours them, and neither saves nor copies them.
    model.make_train_function = make
    setattr(model, compat.BUILD_BEFORE_FIT, compat.build_before_fit(model))
    model.train_function = None
    return model


def restore(model: Any) -> Any:
    """Undo `accumulate`: the model trains as if it had never been called.

    Returns:
        The same model.
    """
    _check_model(model)
    for name in ("make_train_function", compat.BUILD_BEFORE_FIT):
        vars(model).pop(name, None)
    model.train_function = None
    return model


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model) or keras.backend.backend() != "tensorflow":
        raise ArgumentError(
            explain(
                received=f"model={model!r} ({type(model).__name__}), Keras backend "
                f"{keras.backend.backend()!r}",
                expected="a Keras 3 model on the TensorFlow backend",
                fix="pass the model whose fit() is to accumulate; set KERAS_BACKEND=tensorflow",
            )
        )


def _check_optimizers(model: Any) -> None:
    for optimizer in optimizers_of(model):
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if inner.gradient_accumulation_steps:
            raise ArgumentError(
                explain(
                    received="an optimizer with gradient_accumulation_steps="
                    f"{inner.gradient_accumulation_steps}",
                    expected="an optimizer that updates whenever it is applied",
                    fix="remove gradient_accumulation_steps: bigbatch accumulates",
                )
            )
