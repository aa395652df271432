"""Loss and gradients of a batch, computed micro-batch by micro-batch, without state."""

from __future__ import annotations

from typing import Any, Callable, Literal

import tensorflow as tf

from bigbatch.backends.tensorflow import replicas
from bigbatch.backends.tensorflow.batch import Batch, sample_count
from bigbatch.backends.tensorflow.compat import is_compiled, like_the_caller
from bigbatch.backends.tensorflow.microbatches import total
from bigbatch.backends.tensorflow.ops import dense
from bigbatch.backends.tensorflow.values import WEIGHT_DTYPE, as_gradient_of, shaped, widen
from bigbatch.core.arguments import not_among, positive_integer
from bigbatch.core.size_search import AUTO
from bigbatch.core.sparse_gradients import CHOICES, DENSE
from bigbatch.errors import ArgumentError, explain
from bigbatch.loops.auto_size import auto_size
from bigbatch.loops.checks import checked_loss
from bigbatch.loops.coupled import coupled_value_and_gradients


def value_and_gradients(
    loss_fn: Callable[..., Any],
    variables: Any,
    batch: Any,
    *,
    microbatch_size: int | Literal["auto"],
    coupled: bool = False,
    forward: Callable[..., Any] | None = None,
    sparse_gradients: Literal["rows", "dense"] = "rows",
) -> tuple[Any, Any]:
    r"""Return the loss of a whole batch and its gradients, one micro-batch at a time.

    With A the sum and D the weight of each micro-batch's loss,

        loss = Σ A / Σ D        gradients = Σ ∇A / Σ D

    as one pass over the whole batch would give, in the memory of one micro-batch and one set
    of gradients. Works eagerly, in `tf.function`, with `jit_compile=True`, and
    inside `strategy.run`; there Σ also runs over the replicas, and both results are this
    replica's part: they *sum* to the global value, as Keras optimizers do it. Call it in the
    function given to `strategy.run` itself, not in a `tf.function` inside that: it
    communicates, and TensorFlow cannot do so from there.

    A loss that compares samples (contrastive, in-batch negatives) is not a sum over
    micro-batches. With `coupled=True` the gradients are still exact: `forward(*micro_batch)`
    gives the outputs of each micro-batch, `loss_fn(outputs, *batch)` is called once with the
    outputs of the whole batch, and a second pass over the micro-batches takes the gradients
    back. It costs one more forward pass, and is exact if `forward` does not mix samples.
    Inside `strategy.run` the loss sees the outputs of all replicas.

    Args:
        loss_fn: called as `loss_fn(*micro_batch)`. Returns a scalar, the mean loss of the
            micro-batch's samples, or a pair `(sum, weight)`: the summed loss and what it
            is to be divided by (valid tokens, the sum of sample weights). A Keras loss
            object divides by the number of replicas inside `strategy.run`: multiply by it. If
            it is a `tf.function(jit_compile=True)`, a micro-batch's gradients are compiled with
            it.
        variables: the variables to differentiate by, in any nest.
        batch: tensors with one common first dimension, in any nest. A tuple or list is
            passed as arguments, anything else as one argument.
        microbatch_size: samples per micro-batch; the last one may be smaller. "auto": the
            largest that fits the device, chosen at the first call with `loss_fn` and
            `variables`, and halved if a call still runs out of memory; it can be read
            by `bigbatch.microbatch_size(loss_fn)`. Called eagerly; `loss_fn` is compiled into
            a `tf.function`.
        coupled: whether the loss compares samples; needs `forward`, and `loss_fn`
            then takes its outputs as first argument.
        forward: the part of the computation before the loss, if `coupled`. Returns tensors
            with one row per sample, in any nest. What it draws by a Keras `SeedGenerator` or a
            `tf.random.Generator` is the same in both passes; state it changes changes once.
        sparse_gradients: what stands for the `IndexedSlices` of `tape.gradient`. "rows":
            the rows that the full batch has; their memory grows with the batch. "dense": one
            sum as large as the variable, which Keras' Adam and most others treat in another
            way where rows repeat.

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

        A contrastive loss, exact although no two micro-batches are in memory together:

        >>> def forward(x):
        ...     return x * w
        >>> def loss(outputs, x):
        ...     return tf.reduce_mean(tf.abs(outputs[:, None] - outputs[None, :]))
        >>> loss, gradients = bigbatch.value_and_gradients(
        ...     loss, [w], (x,), microbatch_size=2, coupled=True, forward=forward
        ... )
        >>> print(f"{loss.numpy():.4f} {gradients[0].numpy():.4f}")
        1.7778 0.8889
    """
    if coupled != (forward is not None):
        raise ArgumentError(
            explain(
                received=f"coupled={coupled!r} and forward={forward!r}",
                expected="coupled=True together with forward, or neither",
                fix="pass forward=..., coupled=True and a loss_fn(outputs, *batch)",
            )
        )

    if sparse_gradients not in CHOICES:
        raise ArgumentError(not_among("sparse_gradients", sparse_gradients, CHOICES))
    is_dense = sparse_gradients == DENSE

    def compute(
        batch: Any, size: Any, begin: Callable[[Any], None] = lambda _: None
    ) -> tuple[Any, Any]:
        if forward is None:
            jit_compile = is_compiled(loss_fn) or None
            converted = like_the_caller(loss_fn)
            return _value_and_gradients(
                converted, variables, batch, size, jit_compile, begin, is_dense=is_dense
            )
        functions = like_the_caller(forward), like_the_caller(loss_fn)
        return coupled_value_and_gradients(
            *functions, variables, batch, size, is_dense=is_dense
        )

    if microbatch_size == AUTO:
        return auto_size(loss_fn, forward, variables, compute)(Batch(batch, may_be_empty=False))
    size = positive_integer(microbatch_size, "microbatch_size", or_auto=True)
    return compute(batch, size)


@tf.autograph.experimental.do_not_convert
def _value_and_gradients(
    loss_fn: Callable[..., Any],
    variables: Any,
    batch: Any,
    microbatch_size: Any,
    jit_compile: bool | None,
    begin: Callable[[Any], None],
    *,
    is_dense: bool,
) -> tuple[Any, Any]:
    many_replicas = replicas.inside_one_of_many()
    samples = Batch(batch, may_be_empty=many_replicas)
    count = tf.cast(samples.count, WEIGHT_DTYPE)
    is_mean = True

    def compute(*micro_batch: Any) -> tuple[Any, Any, Any]:
        nonlocal is_mean
        with tf.GradientTape() as tape:
            loss, weight = checked_loss(loss_fn(*micro_batch))
        is_mean = weight is None
        weight = tf.cast(sample_count(micro_batch) if is_mean else weight, WEIGHT_DTYPE)
        # Seeded with 1/N, the backward pass meets numbers of the size they have in the full
        # batch: float16 overflows or underflows only where the full batch would.
        seed = tf.math.divide_no_nan(weight if is_mean else tf.ones_like(weight), count)
        gradients = tape.gradient(loss, variables, output_gradients=tf.cast(seed, loss.dtype))
        if is_dense:
            gradients = tf.nest.map_structure(dense, gradients)
        gradients = tf.nest.map_structure(shaped, gradients, variables)
        loss = widen(loss)
        return loss * tf.cast(weight, loss.dtype) if is_mean else loss, weight, gradients

    loss, weight, gradients = total(
        compute, samples, microbatch_size, jit_compile=jit_compile, begin=begin
    )
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
