"""Loss and gradients of a batch, computed micro-batch by micro-batch, without state."""

from __future__ import annotations

from typing import Any, Callable

import tensorflow as tf

from bigbatch.core.arguments import positive_integer
from bigbatch.errors import ArgumentError, explain
from bigbatch.tf import replicas
from bigbatch.tf.batch import Batch, sample_count
from bigbatch.tf.checks import checked_weight
from bigbatch.tf.compat import like_the_caller
from bigbatch.tf.microbatches import total
from bigbatch.tf.values import WEIGHT_DTYPE, as_gradient_of, shaped, widen


def value_and_gradients(
    loss_fn: Callable[..., Any], variables: Any, batch: Any, *, microbatch_size: int
) -> tuple[Any, Any]:
    r"""Return the loss of a whole batch and its gradients, one micro-batch at a time.

    With A the sum and D the weight of each micro-batch's loss,

        loss = Σ A / Σ D        gradients = Σ ∇A / Σ D

    which is what one pass over the whole batch gives, in the memory of one micro-batch and
    one set of gradients. Works eagerly, in `tf.function`, with `jit_compile=True`, and
    inside `strategy.run`; there Σ also runs over the replicas, and both results are this
    replica's part: they *sum* to the global value, as Keras optimizers do it. Call it in the
    function given to `strategy.run` itself, not in a `tf.function` inside that: it
    communicates, and TensorFlow cannot do so from there.

    Args:
        loss_fn: called as `loss_fn(*micro_batch)`. Returns a scalar, the mean loss of the
            micro-batch's samples, or a pair `(sum, weight)`: the summed loss and what it
            is to be divided by (valid tokens, the sum of sample weights). A Keras loss
            object divides by the number of replicas inside `strategy.run`: multiply by it.
        variables: what to differentiate by; any nest of variables.
        batch: tensors with one common first dimension, in any nest. A tuple or list is
            passed as arguments, anything else as one argument.
        microbatch_size: samples per micro-batch; the last one may be smaller.

    Returns:
        `(loss, gradients)`: the gradients in the structure and of the types that
        `tape.gradient(loss, variables)` gives for the whole batch.

    Example:
        >>> import tensorflow as tf
        >>> import bigbatch
        >>> w = tf.Variable(2.0)
        >>> x = tf.constant([1.0, 2.0, 3.0])
        >>> loss, gradients = bigbatch.value_and_gradients(
        ...     lambda x: tf.reduce_mean(w * x), [w], (x,), microbatch_size=2
        ... )
        >>> print(loss.numpy(), gradients[0].numpy())
        4.0 2.0
    """
    return _value_and_gradients(like_the_caller(loss_fn), variables, batch, microbatch_size)


@tf.autograph.experimental.do_not_convert
def _value_and_gradients(
    loss_fn: Callable[..., Any], variables: Any, batch: Any, microbatch_size: int
) -> tuple[Any, Any]:
    microbatch_size = positive_integer(microbatch_size, "microbatch_size")
    many_replicas = replicas.inside_one_of_many()
    samples = Batch(batch, may_be_empty=many_replicas)
    count = tf.cast(samples.count, WEIGHT_DTYPE)
    is_mean = True

    def compute(*micro_batch: Any) -> tuple[Any, Any, Any]:
        nonlocal is_mean
        with tf.GradientTape() as tape:
            loss, weight = _loss_and_weight(loss_fn(*micro_batch))
        is_mean = weight is None
        weight = tf.cast(sample_count(micro_batch) if is_mean else weight, WEIGHT_DTYPE)
        # Seeded with 1/N, the backward pass meets numbers of the size they have in the full
        # batch: float16 overflows or underflows only where the full batch would.
        seed = tf.math.divide_no_nan(weight if is_mean else tf.ones_like(weight), count)
        gradients = tf.nest.map_structure(
            shaped,
            tape.gradient(loss, variables, output_gradients=tf.cast(seed, loss.dtype)),
            variables,
        )
        loss = widen(loss)
        return loss * tf.cast(weight, loss.dtype) if is_mean else loss, weight, gradients

    loss, weight, gradients = total(compute, samples, microbatch_size)
    if many_replicas:
        weight = replicas.sum_from_inside(weight)
    # Now weight is D summed over micro-batches and replicas; zero if everything is masked.
    loss = tf.math.divide_no_nan(loss, tf.cast(weight, loss.dtype))
    # The gradients hold the sum of A's, over N. For a mean on one device D is N: done.
    scale = None if is_mean and not many_replicas else tf.math.divide_no_nan(count, weight)
    return loss, tf.nest.map_structure(
        lambda gradient, variable: as_gradient_of(variable, gradient, scale),
        gradients,
        variables,
    )


def _loss_and_weight(value: Any) -> tuple[Any, Any]:
    """Return what `loss_fn` gave as `(mean, None)` or `(sum, weight)`, checked."""
    pair = value if isinstance(value, (tuple, list)) else (value,)
    tensors = [tf.convert_to_tensor(part) for part in pair] if len(pair) in (1, 2) else []
    if (
        not tensors
        or not tensors[0].dtype.is_floating
        or any(tensor.shape.rank not in (0, None) for tensor in tensors)
    ):
        raise ArgumentError(
            explain(
                received=f"loss_fn returned {value!r}",
                expected="a scalar mean loss, or a pair of scalars (sum, weight)",
                fix="reduce the loss over the micro-batch, for example with tf.reduce_mean",
            )
        )
    loss = tf.ensure_shape(tensors[0], [])
    return loss, checked_weight(tensors[1]) if len(tensors) == 2 else None
