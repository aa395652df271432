"""Loss and gradients of a batch, for a loss that compares samples."""

from __future__ import annotations

from typing import Any, Callable, cast

import tensorflow as tf

from bigbatch.backends.tensorflow import replicas
from bigbatch.backends.tensorflow.ops import dense
from bigbatch.backends.tensorflow.two_passes import LossOfBatch, TwoPasses
from bigbatch.backends.tensorflow.values import shaped, widen
from bigbatch.errors import ArgumentError, explain
from bigbatch.loops.checks import checked_loss


@tf.autograph.experimental.do_not_convert
def coupled_value_and_gradients(
    forward: Callable[..., Any],
    loss_fn: Callable[..., Any],
    variables: Any,
    batch: Any,
    microbatch_size: int,
    *,
    is_dense: bool = False,
) -> tuple[Any, Any]:
    """Return loss and gradients, exact for any loss; see `value_and_gradients`."""
    passes = TwoPasses(batch, microbatch_size, may_be_empty=replicas.inside_one_of_many())
    share, structure = passes.replica_rows, None

    def outputs_of(*micro_batch: Any) -> tuple[list[Any], list[Any], list[Any]]:
        nonlocal structure
        structure = forward(*micro_batch)
        outputs = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(structure)]
        _check_rows(outputs, structure)
        return outputs, [], []

    def loss_of(outputs: list[Any], means: list[Any]) -> LossOfBatch:
        del means
        arguments = share.whole(passes.batch.arguments(passes.batch.leaves))
        with tf.GradientTape() as tape:
            tape.watch([output for output in outputs if output.dtype.is_floating])
            loss, weight = checked_loss(
                loss_fn(tf.nest.pack_sequence_as(structure, outputs), *arguments)
            )
            if weight is not None:
                loss = tf.math.divide_no_nan(loss, tf.cast(weight, loss.dtype))
        in_loss, seeds = cast(Any, tape.gradient(loss, (variables, outputs)))
        if is_dense:
            in_loss = tf.nest.map_structure(dense, in_loss)
        return LossOfBatch(loss, variables, in_loss, seeds)

    def keep(gradients: Any) -> Any:
        if is_dense:
            gradients = tf.nest.map_structure(dense, gradients)
        return tf.nest.map_structure(shaped, gradients, variables)

    result, gradients = passes.run(outputs_of, loss_of, keep)
    loss = widen(result.result) / share.replicas
    return loss, passes.with_those_in_loss(result, gradients)


def _check_rows(outputs: list[Any], returned: Any) -> None:
    if not outputs or any(output.shape.rank == 0 for output in outputs):
        raise ArgumentError(
            explain(
                received=f"forward returned {returned!r}",
                expected="tensors with one row per sample of the micro-batch",
                fix="leave what reduces over samples to the loss",
            )
        )
