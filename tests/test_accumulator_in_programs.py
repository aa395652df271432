"""`GradientAccumulator` in programs: compiled by XLA, saved with a model, printed."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from bigbatch.errors import ContextError
from comparison import largest_difference

from problems import TOLERANCE
from stack import keras, new_optimizers

rng = np.random.default_rng(28)
X, Y = rng.normal(size=(88, 4)).astype("float32"), rng.normal(size=(88, 1)).astype("float32")


def network():
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(8, "tanh")
    return keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(1)])


def optimizer():
    return new_optimizers().Adam(1e-2, global_clipnorm=1.0)


def with_loop(jit_compile, apply_inside=True, accumulation_steps=3):
    """Train with the loop of the README, whose last window of an epoch is short."""
    model, loss_fn, one = network(), keras.losses.MeanSquaredError(), optimizer()
    variables = model.trainable_variables
    accumulator = bigbatch.GradientAccumulator(
        one, variables, accumulation_steps=accumulation_steps
    )

    @tf.function(reduce_retracing=True, jit_compile=jit_compile)
    def micro_batch(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        accumulator.accumulate(tape.gradient(loss, variables), weight=tf.shape(x)[0])
        return apply_inside and accumulator.apply_when_full()

    made = []
    for _ in range(2):
        for x, y in tf.data.Dataset.from_tensor_slices((X, Y)).batch(12):
            made.append(bool(micro_batch(x, y)))
            if not apply_inside:
                made[-1] = accumulator.apply_when_full()
        accumulator.flush()
    return model.get_weights(), made


def with_full_batches():
    model = network()
    model.compile(optimizer(), "mse")
    model.fit(X, Y, batch_size=36, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


def test_the_loop_of_the_readme_compiled_by_xla():
    weights, made = with_loop(jit_compile=True)
    assert made == [False, False, True, False, False, True, False, False] * 2
    assert largest_difference(weights, with_full_batches()) <= TOLERANCE["float32"]


def test_a_schedule_is_not_compiled_and_the_fix_works():
    def schedule(updates):
        return 3

    with pytest.raises(ContextError, match=r"Fix: call apply_when_full.. after the compiled"):
        with_loop(jit_compile=True, accumulation_steps=schedule)
    weights, _ = with_loop(True, apply_inside=False, accumulation_steps=schedule)
    assert largest_difference(weights, with_full_batches()) <= TOLERANCE["float32"]


@pytest.mark.filterwarnings("ignore:.*Gradients do not exist")
def test_a_window_that_xla_has_not_foreseen_is_left_for_a_call_outside():
    one, two = tf.Variable([1.0]), tf.Variable([1.0])
    sgd = new_optimizers().SGD(1.0)
    accumulator = bigbatch.GradientAccumulator(sgd, [one, two], accumulation_steps=2)

    @tf.function(jit_compile=True)
    def compiled():
        accumulator.accumulate([tf.ones([1]), None])
        return accumulator.apply_when_full()

    assert not compiled()
    accumulator.accumulate([None, tf.ones([1])])  # of a variable that had no gradient
    assert accumulator.apply_when_full()
    assert one.numpy() == two.numpy() == 0.5
    accumulator.accumulate([None, tf.ones([1])])
    assert not compiled()  # full, and left as it is
    assert accumulator.apply_when_full()
    assert one.numpy() == two.numpy() == 0.0


class Trains(tf.Module):
    def __init__(self):
        super().__init__()
        self.w = tf.Variable([1.0, 2.0])
        sgd = new_optimizers().SGD(0.1)
        self.accumulator = bigbatch.GradientAccumulator(sgd, [self.w], accumulation_steps=2)

    @tf.function(input_signature=[tf.TensorSpec([2], tf.float32)])
    def __call__(self, x):
        return self.w * x


@pytest.mark.parametrize("filled", [0, 1])
def test_a_model_that_keeps_an_accumulator_is_saved(filled, tmp_path):
    module = Trains()
    for _ in range(filled):
        module.accumulator.accumulate([tf.ones([2])])
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    np.testing.assert_array_equal(loaded(tf.ones([2])), [1.0, 2.0])
    assert int(module.accumulator.step) == filled


def test_what_an_accumulator_says_of_itself():
    w = tf.Variable(tf.zeros([30, 50]))
    sgd = new_optimizers().SGD()
    text = repr(bigbatch.GradientAccumulator(sgd, [w], accumulation_steps=8))
    assert text == (
        "<GradientAccumulator for SGD, accumulation_steps=8, 1 variable (1,500 numbers), "
        "0 of 8 micro-batches>"
    )
    endless = bigbatch.GradientAccumulator(sgd, [w])
    endless.accumulate([tf.ones([30, 50])])
    assert "accumulation_steps=None" in repr(endless)
    assert "1 micro-batch" in repr(endless)
    schedule = bigbatch.grow(8, every=10)
    growing = bigbatch.GradientAccumulator(sgd, [w], accumulation_steps=schedule)
    assert f"accumulation_steps={schedule}," in repr(growing)
    tf.function(lambda: repr(endless))()
