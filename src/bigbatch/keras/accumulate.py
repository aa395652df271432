"""`accumulate` and `restore`: switch accumulation on and off for a Keras model."""

from __future__ import annotations

from typing import Any

import keras

from bigbatch.core import versions
from bigbatch.core.window import AccumulationSteps
from bigbatch.errors import ArgumentError, explain
from bigbatch.keras import compat
from bigbatch.keras.hooks import attach, detach, size_of
from bigbatch.keras.keras2 import Keras2
from bigbatch.keras.keras3 import Keras3
from bigbatch.keras.setting import Setting
from bigbatch.tf.auto import chosen_size


def accumulate(
    model: Any,
    *,
    microbatch_size: int | str | None = None,
    accumulation_steps: AccumulationSteps = None,
    batch_norm: str = "pooled",
    coupled: bool = False,
) -> Any:
    """Let `model.fit` accumulate gradients, with the update of the full batch.

    `fit`, callbacks, the optimizer and saving stay as they are. There are two modes:

    - `microbatch_size=32` cuts the batches that `fit` is given: `fit(batch_size=256)` makes
      one update of 256 samples, and holds 32 of them on the device at a time;
    - `accumulation_steps=8` groups the batches of the data set: eight of them make one update.
      The last window of an epoch may be shorter; it is applied before validation.

    The model's own `train_step` runs on each micro-batch; its gradients are collected, and
    the optimizer gets one gradient list per update. What is saved is the plain model. If a
    batch fails, metrics, moving statistics and weights are those before it.

    Every term of the compiled loss is divided by what it has in the whole batch: samples,
    valid elements under a mask, the sum of the sample weights. What `add_loss`, an own
    `compute_loss` or an own `train_step` adds is taken to be a mean over samples.

    Can be called before or after `compile`, after `load_model`, and again with another
    setting. `restore` undoes it.

    Args:
        model: a Keras 3 model (TensorFlow backend), or a Keras 2 model (`tf_keras`, or
            `tf.keras` of TensorFlow 2.10 to 2.15).
        microbatch_size: samples per micro-batch; under a `tf.distribute` strategy, per
            micro-batch and replica. "auto": the largest that fits the device, measured at the
            first batch; a batch that runs out of memory all the same is rolled back and run
            again with micro-batches half as large.
        accumulation_steps: batches of the data set per update: a number, or a function from
            the number of updates made to one (a batch-size schedule).
        batch_norm: what BatchNormalization does, which normalises with the statistics of a
            micro-batch: "pooled" (its moving statistics are moved once per batch, by those of
            the whole batch), "microbatch" (as Keras has it) or "frozen" (inference mode). On
            several replicas a micro-batch's statistics are those of one replica, also with
            `synchronized=True`.
        coupled: whether samples of a batch meet in the loss, as in contrastive losses. Then
            two passes are made over a batch: outputs first, the loss of the whole batch, and
            gradients in the second pass. Exact for every loss of the outputs, for one more
            forward pass; not for models with an own `train_step`, and not if samples also
            meet in a layer.

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
    check_model(model)
    setting = Setting(microbatch_size, accumulation_steps, batch_norm, coupled)
    detach(model)
    attach(model, setting)
    return model


def microbatch_size(model: Any) -> int | None:
    """Return the samples per micro-batch (and replica) with which a model trains.

    Args:
        model: a model, or a `loss_fn` that was passed to `value_and_gradients` with "auto".

    Returns:
        The number given to `accumulate`, or the one that "auto" has chosen; `None` if it has
        not chosen yet, in window mode, and for a model that does not accumulate.
    """
    if callable(model) and compat.keras_of(model) is None:
        return chosen_size(model)
    check_model(model)
    return size_of(model)


def restore(model: Any) -> Any:
    """Undo `accumulate`: the model trains as if it had never been called.

    A window that `train_on_batch` has left open is applied first.

    Returns:
        The same model.
    """
    check_model(model)
    detach(model)
    return model


def check_model(model: Any) -> None:
    """Raise if `model` is not a Keras model that can be trained here."""
    if compat.keras_of(model) is None or not _is_on_tensorflow(model):
        raise ArgumentError(
            explain(
                received=f"model={model!r} ({type(model).__name__}), Keras {keras.__version__} "
                f"with the backend {keras.backend.backend()!r}",
                expected="a Keras 3 model on the TensorFlow backend, or a Keras 2 model",
                fix="pass the model whose fit() is to accumulate; set KERAS_BACKEND=tensorflow",
            )
        )
    if isinstance(compat.keras_of(model), Keras3):
        versions.check_keras_3(keras.__version__)


def check_keras_3(model: Any, what: str) -> None:
    """Raise if `what` is asked for a model of Keras 2."""
    if not isinstance(compat.keras_of(model), Keras3):
        raise ArgumentError(
            explain(
                received=f"{what} for the Keras 2 model {model.name!r}",
                expected="a Keras 3 model",
                fix="bigbatch.accumulate works for both; to try this out, build the model with "
                "Keras 3",
            )
        )


def _is_on_tensorflow(model: Any) -> bool:
    return isinstance(compat.keras_of(model), Keras2) or keras.backend.backend() == "tensorflow"


def check_compiled(model: Any) -> None:
    """Raise if a model has no loss and optimizer yet."""
    if not compat.keras_of(model).is_compiled(model):
        raise ArgumentError(
            explain(
                received="a model that has not been compiled",
                expected="a model with a loss and an optimizer",
                fix="call model.compile(...) first",
            )
        )
