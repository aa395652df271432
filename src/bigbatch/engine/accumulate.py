"""`accumulate` and `restore`: switch accumulation on and off for a Keras model."""

from __future__ import annotations

from typing import Any, Callable, Literal, TypeVar

from bigbatch.backends.keras import backend_of, check_model
from bigbatch.core.arguments import keywords_explained
from bigbatch.core.exact import ExactBatchNorm
from bigbatch.core.size_search import chosen_size
from bigbatch.engine.hooks import attach, check_optimizers, detach, size_of
from bigbatch.engine.settings import Setting

Model = TypeVar("Model")
"""Any Keras model: what `accumulate` and `restore` are given, they return."""


@keywords_explained(
    micro_batch_size="microbatch_size",
    minibatch_size="microbatch_size",
    batch_size="microbatch_size",
    gradient_accumulation_steps="accumulation_steps",
    accum_steps="accumulation_steps",
    steps="accumulation_steps",
)
def accumulate(
    model: Model,
    *,
    microbatch_size: int | Literal["auto"] | None = None,
    accumulation_steps: int | Callable[[int], int] | None = None,
    batch_norm: Literal["pooled", "exact", "microbatch", "frozen"] | ExactBatchNorm = "pooled",
    coupled: bool | Literal["auto"] = "auto",
    check: Literal["warn", "raise", "off"] = "warn",
    sparse_gradients: Literal["rows", "dense"] = "rows",
) -> Model:
    """Let `model.fit` accumulate gradients, and make the update of the full batch.

    `fit`, callbacks, the optimizer and saving work unchanged. There are two modes:

    - `microbatch_size=32` cuts the batches of `fit`: `fit(batch_size=256)` makes one update
      of 256 samples, and holds 32 of them on the device at a time;
    - `accumulation_steps=8` groups the batches of the data set: eight of them make one update.
      The last window of an epoch may be shorter; it is applied before validation.

    The model's own `train_step` runs on each micro-batch; its gradients are collected, and
    the optimizer gets one list of gradients per update. `save` writes the plain model. If a
    batch fails, metrics, moving statistics and weights keep their values from before it.

    Every term of the loss is divided by its denominator in the whole batch: samples, valid
    elements under a mask, or the sum of the sample weights. For a custom loss, `add_loss` or
    `compute_loss`, the denominator is found by trying samples of the first batch. For a
    custom `train_step`, the check of the first batch finds whether it is a mean or a sum.

    You can call `accumulate` before or after `compile`, after `load_model`, and again with
    another setting. `restore` undoes it.

    Args:
        model: a Keras 3 model (on TensorFlow, JAX or torch), or a Keras 2 model (`tf_keras`, or
            `tf.keras` of TensorFlow 2.10 to 2.15).
        microbatch_size: samples per micro-batch; under a `tf.distribute` strategy, per
            micro-batch and replica. "auto" chooses the largest size that fits the device,
            measured at the first batch; a batch that still runs out of memory is rolled back
            and run again with micro-batches half as large.
        accumulation_steps: batches of the data set per update: a number, or a function from
            the number of updates made to one (a batch-size schedule).
        batch_norm: how BatchNormalization works: "pooled" (it normalises with the statistics
            of a micro-batch; its moving statistics are moved once per batch, by the statistics
            of the whole batch), "exact" or an `ExactBatchNorm` (it normalises with the
            statistics of the whole batch, gradients included, over all replicas: micro-batches
            run in stages, which takes more time; Keras 3 on TensorFlow or JAX), "microbatch"
            (as in plain Keras) or "frozen" (inference mode). Except with "exact", statistics
            of a micro-batch come from one replica, even with `synchronized=True`.
        coupled: whether the loss is computed on the whole batch, as contrastive losses and
            losses that divide by labels must be. If it is, a batch takes two passes: the first
            computes the outputs, then comes the loss of the whole batch, and the second pass
            computes the gradients. This is exact for every loss of the outputs, and costs one
            more forward pass. "auto" does it if a trial with samples of the first batch shows
            that the loss is neither a mean nor a sum over samples. `True` raises an error if
            two passes are not possible: with a custom `train_step`, or a layer that mixes
            samples. With `batch_norm="exact"` outputs are gathered instead, in one pass.
        check: what to do if updates will not equal the full batch. Before the first
            update the real `train_step` runs on five samples of the first batch, in one part
            and cut unequally, and gradients, logged values and assigned variables are
            compared; all of it is undone. "warn" gives a `bigbatch.NotEqualWarning` that
            names the cause, "raise" raises a `DifferenceError`, "off" skips the check.
        sparse_gradients: how the gradient of an embedding table is kept until the update, on
            TensorFlow. "rows" keeps the rows that were looked up, as in the full batch; their
            memory grows with the batch. "dense" keeps one sum as large as the table. If rows
            repeat, and the optimizer does not add them up (Keras' Adam and most others), the
            update is different, and the check says so. If both give the same update (SGD and
            Lion without clipping), "rows" chooses the smaller of the two.

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
    setting = Setting(
        microbatch_size, accumulation_steps, batch_norm, coupled, check, sparse_gradients
    )
    check_optimizers(model)
    detach(model)
    attach(model, setting)
    return model


def microbatch_size(model: Any) -> int | None:
    """Return the samples per micro-batch (and replica) with which a model trains.

    Args:
        model: a model, or a `loss_fn` that was passed to `value_and_gradients` with "auto".

    Returns:
        The number passed to `accumulate`, or the size that "auto" has chosen; `None` if it has
        not chosen yet, in window mode, and for a model that does not accumulate.
    """
    if callable(model) and backend_of(model) is None:
        return chosen_size(model)
    check_model(model)
    return size_of(model)


def restore(model: Model) -> Model:
    """Undo `accumulate`: the model trains as if it had never been called.

    A window that `train_on_batch` has left open is applied first.

    Returns:
        The same model.
    """
    check_model(model)
    detach(model)
    return model
