"""Loss and gradients of a batch whose samples meet in the loss."""

from __future__ import annotations

from typing import Any, Callable, cast

import tensorflow as tf

from bigbatch.errors import ArgumentError, explain
from bigbatch.tf import replicas
from bigbatch.tf.batch import Batch
from bigbatch.tf.checks import checked_loss
from bigbatch.tf.two_passes import Share, TwoPasses, joined_rows, pulled_back, rows
from bigbatch.tf.values import added, as_gradient_of, shaped, widen


@tf.autograph.experimental.do_not_convert
def coupled_value_and_gradients(
    forward: Callable[..., Any],
    loss_fn: Callable[..., Any],
    variables: Any,
    batch: Any,
    microbatch_size: int,
) -> tuple[Any, Any]:
    """Return loss and gradients, exact for any loss; see `value_and_gradients`."""
    samples = Batch(batch, may_be_empty=replicas.inside_one_of_many())
    passes = TwoPasses(samples, microbatch_size)
    structure: Any = None
    dtypes: list[Any] = []

    def outputs_of(*micro_batch: Any) -> list[Any]:
        nonlocal structure, dtypes
        structure = forward(*micro_batch)
        outputs = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(structure)]
        _check_rows(outputs, structure)
        dtypes = [output.dtype for output in outputs]
        return outputs

    joined = passes.first(lambda *micro_batch: [rows(o) for o in outputs_of(*micro_batch)])
    outputs = [joined_rows(*pair, samples.count) for pair in zip(joined, dtypes)]
    share = Share(samples.count)
    outputs = share.whole(outputs)
    arguments = share.whole(samples.arguments(samples.leaves))
    with tf.GradientTape() as tape:
        tape.watch([output for output in outputs if output.dtype.is_floating])
        loss, weight = checked_loss(
            loss_fn(tf.nest.pack_sequence_as(structure, outputs), *arguments)
        )
        if weight is not None:
            loss = tf.math.divide_no_nan(loss, tf.cast(weight, loss.dtype))
    in_loss, seeds = cast(Any, tape.gradient(loss, (variables, outputs)))
    seeds = [share.own(seed) for seed in seeds]

    def gradients_of(seeds: list[Any], *micro_batch: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = outputs_of(*micro_batch)
        gradients = pulled_back(tape, outputs, seeds, variables)
        return tf.nest.map_structure(shaped, gradients, variables)

    gradients = passes.second(gradients_of, seeds)

    def both(before: Any, here: Any, variable: Any) -> Any:
        before = as_gradient_of(variable, before)
        # The same on every replica: each has a part of it.
        return added(before, as_gradient_of(variable, here, 1 / share.replicas))

    return widen(loss) / share.replicas, tf.nest.map_structure(
        both, gradients, in_loss, variables
    )


def _check_rows(outputs: list[Any], returned: Any) -> None:
    if not outputs or any(output.shape.rank == 0 for output in outputs):
        raise ArgumentError(
            explain(
                received=f"forward returned {returned!r}",
                expected="tensors with one row per sample of the micro-batch",
                fix="leave what reduces over samples to the loss",
            )
        )
