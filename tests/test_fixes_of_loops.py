"""The fixes of messages about custom loops are followed, and work."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import bigbatch
from fixes import refused

from stack import keras

layers = keras.layers


def kernel_and_bias():
    return [tf.Variable([1.0, 2.0], name="kernel"), tf.Variable(0.0, name="bias")]


GRADIENTS = [tf.ones(2), tf.constant(1.0)]


def test_what_an_accumulator_is_made_of():
    new, variables, sgd = bigbatch.GradientAccumulator, kernel_and_bias(), keras.optimizers.SGD
    with refused("pass a Keras optimizer, for example keras.optimizers.Adam()"):
        new("adam", variables)
    optimizer = sgd()
    optimizer.build(variables[:1])
    with refused("pass a new optimizer, or call optimizer.build with all variables first"):
        new(optimizer, variables)
    with refused("build the model first, then pass model.trainable_variables"):
        new(sgd(), [])
    with refused(
        "pass the same objects as in variables, for example "
        "repeated_rows=[positions.embeddings]"
    ):
        new(sgd(), variables, repeated_rows=[tf.Variable([1.0, 2.0])])
    built = sgd()
    built.build(variables)
    model = keras.Sequential([keras.Input((5,)), layers.Dense(3)])
    for made in (
        new(keras.optimizers.Adam(), variables),
        new(sgd(), variables),
        new(built, variables),
        new(sgd(), variables, repeated_rows=variables[:1]),
    ):
        made.accumulate(GRADIENTS)
        assert made.flush()
    new(sgd(), model.trainable_variables)


def test_what_is_accumulated():
    kernel, bias = variables = kernel_and_bias()
    accumulator = bigbatch.GradientAccumulator(keras.optimizers.SGD(), variables)
    x = tf.ones([4, 2])
    with tf.GradientTape() as tape:
        early = tf.reduce_mean(x)
        loss = tf.reduce_mean(tf.linalg.matvec(x, kernel) + bias)
    good = tape.gradient(loss, variables)
    with refused("pass tape.gradient(loss, variables) with the variables given at the start"):
        accumulator.accumulate(good[:1])
    with refused("compute the loss inside the tape, from the variables given at the start"):
        accumulator.accumulate([None, None] if early is not None else good)
    with refused("pass the gradients in the order of the variables, as the tape gave them"):
        accumulator.accumulate(good[::-1])
    with refused("pass what the mean loss divides by, for example weight=tf.shape(x)[0]"):
        accumulator.accumulate(good, weight=-1)
    assert int(accumulator.step) == 0
    accumulator.accumulate(good, weight=tf.shape(x)[0])
    assert accumulator.flush()


def test_gradients_that_are_read_in_a_graph():
    accumulator = bigbatch.GradientAccumulator(keras.optimizers.SGD(), kernel_and_bias())
    accumulator.accumulate([GRADIENTS[0], None])
    accumulator.accumulate(GRADIENTS)
    read = lambda: accumulator.gradients[0]  # noqa: E731
    with refused(
        "read gradients outside tf.function, or call apply_when_full() or flush() after the "
        "first accumulate()"
    ):
        tf.function(read)()
    np.testing.assert_array_equal(read(), [1.0, 1.0])


def test_what_xla_cannot_do():
    table = tf.Variable(tf.ones([6, 2]))

    def gradients(rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, rows))
        return tape.gradient(loss, [table])

    rows = tf.constant([0, 2])
    accumulator = bigbatch.GradientAccumulator(keras.optimizers.SGD(), [table])
    with refused(
        "return the gradients from the compiled function and call accumulate() outside it"
    ):
        tf.function(lambda: accumulator.accumulate(gradients(rows)), jit_compile=True)()
    compiled = tf.function(lambda: gradients(rows)[0].values, jit_compile=True)
    accumulator.accumulate([tf.IndexedSlices(compiled(), rows, table.shape)])
    assert accumulator.flush()
    scheduled = bigbatch.GradientAccumulator(
        keras.optimizers.SGD(), kernel_and_bias(), accumulation_steps=lambda updates: 1
    )
    scheduled.accumulate(GRADIENTS)
    with refused("call apply_when_full() after the compiled function, not in it"):
        tf.function(scheduled.apply_when_full, jit_compile=True)()
    tf.function(lambda: scheduled.accumulate(GRADIENTS), jit_compile=True)()
    assert scheduled.apply_when_full()


def test_a_checkpoint_of_other_variables(tmp_path):
    new = bigbatch.GradientAccumulator
    saved = new(keras.optimizers.SGD(), kernel_and_bias())
    saved.accumulate(GRADIENTS)
    path = tf.train.Checkpoint(accumulator=saved).save(tmp_path / "checkpoint")
    other = new(keras.optimizers.SGD(), kernel_and_bias()[:1])
    with refused("build the accumulator with the variables it was saved with"):
        tf.train.Checkpoint(accumulator=other).restore(path)
    same = new(keras.optimizers.SGD(), kernel_and_bias())
    tf.train.Checkpoint(accumulator=same).restore(path)
    assert int(same.step) == 1


def test_accumulators_and_strategies(mirrored):
    def new():
        variable = tf.Variable(1.0)
        optimizer = keras.optimizers.SGD()
        return bigbatch.GradientAccumulator(optimizer, [variable], accumulation_steps=1)

    outside = new()
    with mirrored.scope():
        inside = new()
    step = lambda one: mirrored.run(one.accumulate, ([tf.constant(1.0)],))  # noqa: E731
    with refused("with strategy.scope(): accumulator = GradientAccumulator(...)"):
        step(outside)
    with refused("strategy.run(micro_batch, args=(x, y)) with accumulate() in micro_batch"):
        inside.accumulate([tf.constant(1.0)])
    with refused(
        "call accumulate inside strategy.run and this after it, for example "
        "strategy.run(micro_batch, args=(x, y)); accumulator.flush()"
    ):
        mirrored.run(inside.flush)
    step(inside)
    assert inside.flush()


def mean_of(w):
    return lambda x, *_: tf.reduce_mean(w * x)


def test_what_value_and_gradients_is_given():
    w, x = tf.Variable(2.0), tf.ones([4])

    def compute(loss_fn, batch=(x,), **options):
        options = {"microbatch_size": 2, **options}
        return bigbatch.value_and_gradients(loss_fn, [w], batch, **options)

    with refused("close over the scalar in loss_fn, or repeat it once per sample"):
        compute(lambda x, factor: tf.reduce_mean(w * x * factor), (x, 3.0))
    with refused("convert the leaf with tf.convert_to_tensor or np.asarray"):
        compute(mean_of(w), ({1.0, 2.0},))
    with refused("reduce the loss over the micro-batch, for example with tf.reduce_mean"):
        compute(lambda x: w * x)
    with refused("pass forward=..., coupled=True and a loss_fn(outputs, *batch)"):
        compute(mean_of(w), forward=lambda x: x * w)
    with refused("leave what reduces over samples to the loss"):
        compute(lambda z, x: z, coupled=True, forward=lambda x: tf.reduce_mean(x * w))
    for loss, _ in (
        compute(lambda x: tf.reduce_mean(w * x * 3.0)),
        compute(lambda x, factor: tf.reduce_mean(w * x * factor), (x, 3.0 * tf.ones([4]))),
        compute(mean_of(3 * w), (np.asarray([1.0, 1.0], "float32"),)),
        compute(lambda z, x: tf.reduce_mean(3 * z), coupled=True, forward=lambda x: x * w),
    ):
        assert float(loss) == 6.0


def test_an_automatic_size_needs_python():
    w, x = tf.Variable(2.0), tf.ones([4])

    class Slotted:
        __slots__ = ()

        def __call__(self, x):
            return tf.reduce_mean(w * x)

    def compute(loss_fn, size="auto"):
        return bigbatch.value_and_gradients(loss_fn, [w], (x,), microbatch_size=size)

    with refused("pass a function made with def or lambda"):
        compute(Slotted())
    with refused("call it outside (it compiles loss_fn itself), or pass a number"):
        tf.function(lambda: compute(mean_of(w)))()
    for loss, _ in (compute(mean_of(w)), tf.function(lambda: compute(mean_of(w), 2))()):
        assert float(loss) == 2.0
