"""Bad input gets an error that says what was received, what was expected and how to fix it."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from bigbatch.errors import ArgumentError

from stack import keras, new_optimizers


def check(error, received, fix=""):
    text = str(error.value)
    assert [line.split(":")[0] for line in text.split("\n")] == ["Received", "Expected", "Fix"]
    assert received in text
    assert fix in text


def make(accumulation_steps=None):
    variables = [tf.Variable([1.0, 2.0], name="kernel"), tf.Variable(0.0, name="bias")]
    accumulator = bigbatch.GradientAccumulator(
        keras.optimizers.SGD(1.0), variables, accumulation_steps=accumulation_steps
    )
    return variables, accumulator


GOOD = [tf.constant([1.0, 1.0]), tf.constant(1.0)]


@pytest.mark.parametrize("steps", [0, -1, 2.5, "4", True, np.float32(2)])
def test_accumulation_steps(steps):
    for value in (steps, lambda updates: steps):
        with pytest.raises(ArgumentError) as error:
            make(value)
        check(error, repr(steps), "accumulation_steps")


def test_numpy_integers_are_integers():
    _, accumulator = make(np.int64(1))
    accumulator.accumulate(GOOD)
    assert accumulator.apply_when_full()


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_schedule_that_goes_wrong_later_changes_nothing(in_graph):
    (kernel, _), accumulator = make(lambda updates: 1 if updates == 0 else -3)
    apply = (
        tf.function(accumulator.apply_when_full) if in_graph else accumulator.apply_when_full
    )
    accumulator.accumulate(GOOD)
    with pytest.raises((ArgumentError, tf.errors.InvalidArgumentError), match=r"\(1\)=-3"):
        apply()
    assert int(accumulator.step) == 1
    assert accumulator.is_full
    np.testing.assert_array_equal(kernel, [1.0, 2.0])
    with pytest.raises((ArgumentError, tf.errors.InvalidArgumentError), match=r"\(1\)=-3"):
        apply()  # the schedule is asked for the same update again


BAD_GRADIENTS = {
    "too few": (GOOD[:1], "1 gradients"),
    "nothing": (None, "None"),
    "too many": ([*GOOD, None], "3 gradients"),
    "none at all": ([None, None], "all None"),
    "another shape": ([tf.constant([1.0, 1.0, 1.0]), None], "(3,)"),
    "integers": ([tf.constant([1, 1]), None], "int32"),
    "complex numbers": ([tf.constant([1j, 1j]), None], "complex128"),
    "rows of another shape": (
        [None, tf.IndexedSlices(tf.ones([1, 3]), tf.constant([0]), (1, 3))],
        "(1, 3)",
    ),
    "rows of a scalar": (
        [None, tf.IndexedSlices(tf.ones([1]), tf.constant([0]), (1,))],
        "(1,)",
    ),
}


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("name", BAD_GRADIENTS)
def test_gradients(name, in_graph):
    gradients, received = BAD_GRADIENTS[name]
    _, accumulator = make()
    accumulator.accumulate(GOOD)

    def accumulate():
        accumulator.accumulate(gradients)

    with pytest.raises(ArgumentError) as error:
        tf.function(accumulate)() if in_graph else accumulate()
    assert received in str(error.value)
    assert int(accumulator.step) == 1
    np.testing.assert_array_equal(accumulator.gradients[0], [1.0, 1.0])


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("weight", [-1, -0.5, float("nan"), float("inf"), [1, 2], "3", None])
def test_weight(weight, in_graph):
    _, accumulator = make()

    def accumulate():
        accumulator.accumulate(GOOD, weight=weight)

    with pytest.raises(ArgumentError) as error:
        tf.function(accumulate, autograph=False)() if in_graph else accumulate()
    check(error, "weight", "weight=tf.shape(x)[0]")
    assert int(accumulator.step) == 0


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weight_in_a_graph_is_asserted_before_anything_changes(weight):
    _, accumulator = make()

    @tf.function
    def accumulate(weight):
        accumulator.accumulate(GOOD, weight=weight)

    accumulate(tf.constant(2.0))
    with pytest.raises(tf.errors.InvalidArgumentError, match="finite and not negative"):
        accumulate(tf.constant(weight))
    assert int(accumulator.step) == 1
    assert float(accumulator.total_weight) == 2.0
    np.testing.assert_array_equal(accumulator.gradients[0], [1.0, 1.0])


def test_optimizer_without_apply_gradients():
    with pytest.raises(ArgumentError) as error:
        bigbatch.GradientAccumulator("adam", [tf.Variable(1.0)])
    check(error, "'adam'", "keras.optimizers.Adam()")


def test_variables_that_are_not_the_optimizers():
    known, unknown = tf.Variable(1.0, name="known"), tf.Variable(1.0, name="unknown")
    optimizer = new_optimizers().SGD()
    optimizer.build([known])
    with pytest.raises(ArgumentError) as error:
        bigbatch.GradientAccumulator(optimizer, [known, unknown])
    check(error, "unknown", "optimizer.build")


@pytest.mark.parametrize("variables", [[], "kernel", [1.0], {"kernel": None}])
def test_variables(variables):
    with pytest.raises(ArgumentError) as error:
        bigbatch.GradientAccumulator(keras.optimizers.SGD(), variables)
    check(error, f"variables={variables!r}", "model.trainable_variables")


def test_one_variable_is_not_a_list():
    with pytest.raises(ArgumentError) as error:
        bigbatch.GradientAccumulator(keras.optimizers.SGD(), tf.Variable([1.0, 2.0]))
    check(error, "variables=<tf.Variable")


def test_a_shape_that_is_wrong_when_the_graph_runs_changes_nothing():
    kernel, other = tf.Variable([1.0, 2.0]), tf.Variable([1.0, 2.0])
    accumulator = bigbatch.GradientAccumulator(keras.optimizers.SGD(), [kernel, other])

    @tf.function(input_signature=[tf.TensorSpec(None), tf.TensorSpec(None)])
    def accumulate(one, two):
        accumulator.accumulate([one, two])

    accumulate(tf.ones(2), tf.ones(2))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"EnsureShape|ensure_shape"):
        accumulate(tf.ones(2), tf.ones(3))
    assert int(accumulator.step) == 1
    np.testing.assert_array_equal(accumulator.gradients, np.ones([2, 2]))


def test_checkpoint_of_other_variables(tmp_path):
    _, saved = make()
    saved.accumulate(GOOD)
    path = tf.train.Checkpoint(accumulator=saved).save(tmp_path / "checkpoint")
    other = bigbatch.GradientAccumulator(
        keras.optimizers.SGD(), [tf.Variable(tf.zeros(3)), tf.Variable(0.0)]
    )
    with pytest.raises(ArgumentError, match="variables of other shapes"):
        tf.train.Checkpoint(accumulator=other).restore(path)
    assert int(other.step) == 0


def mean(w):
    return lambda x, *_: tf.reduce_mean(w * x)


@pytest.mark.parametrize("size", [0, -2, 1.5, "largest"])
def test_microbatch_size(size):
    w = tf.Variable(1.0)
    with pytest.raises(ArgumentError) as error:
        bigbatch.value_and_gradients(mean(w), [w], (tf.ones([4]),), microbatch_size=size)
    check(error, repr(size), "microbatch_size")


BAD_BATCHES = {
    "leaves of different length": (
        (np.ones([4]), np.ones([5])),
        "batch[1] with 5 samples in a batch of 4",
    ),
    "empty": ((np.ones([0, 2]),), "(0, 2)"),
    "no leaves": ((), "no tensors"),
    "a scalar": ((np.ones([4]), 3.0), "3.0"),
    "an object": ((np.ones([4]), object()), "object"),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_batch(name):
    batch, received = BAD_BATCHES[name]
    w = tf.Variable(1.0, dtype=tf.float64)
    with pytest.raises(ArgumentError) as error:
        bigbatch.value_and_gradients(mean(w), [w], batch, microbatch_size=2)
    check(error, received)


@pytest.mark.parametrize(
    ("shapes", "message"), [(([4], [5]), "differs from other tensors"), (([0], [0]), "empty")]
)
def test_batch_of_unknown_size_is_asserted_in_the_graph(shapes, message):
    w = tf.Variable(1.0)
    compute = tf.function(
        lambda x, y: bigbatch.value_and_gradients(mean(w), [w], (x, y), microbatch_size=2),
        input_signature=[tf.TensorSpec([None])] * 2,
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        compute(*map(tf.ones, shapes))


BAD_LOSSES = {
    "one loss per sample": lambda x: x,
    "three values": lambda x: (x[0], x[0], x[0]),
    "an integer": lambda x: tf.constant(1),
    "a vector of weights": lambda x: (x[0], x),
}


@pytest.mark.parametrize("weight", [-1.0, float("nan")])
def test_weight_of_a_loss(weight):
    w = tf.Variable(1.0)
    with pytest.raises(ArgumentError) as error:
        bigbatch.value_and_gradients(
            lambda x: (tf.reduce_sum(w * x), weight), [w], (tf.ones([4]),), microbatch_size=2
        )
    check(error, "weight")


@pytest.mark.parametrize("name", BAD_LOSSES)
def test_loss(name):
    w = tf.Variable(1.0)
    with pytest.raises(ArgumentError) as error:
        bigbatch.value_and_gradients(BAD_LOSSES[name], [w], (tf.ones([4]),), microbatch_size=2)
    check(error, "loss_fn returned", "tf.reduce_mean")


@pytest.mark.parametrize("in_graph", [False, True])
def test_an_exception_in_the_loss_leaves_the_accumulator_as_it_was(in_graph):
    (kernel, bias), accumulator = make()
    accumulator.accumulate(GOOD)

    def loss_fn(x):
        raise ValueError("mine")

    def micro_batch():
        _, gradients = bigbatch.value_and_gradients(
            loss_fn, [kernel, bias], (tf.ones([4]),), microbatch_size=2
        )
        accumulator.accumulate(gradients)

    with pytest.raises(ValueError, match="mine"):
        tf.function(micro_batch)() if in_graph else micro_batch()
    assert int(accumulator.step) == 1


def test_nests_are_passed_on_as_they_are():
    w = tf.Variable(2.0)
    batch = (
        {"a": np.float32([1, 2, 3]), "b": (np.float32([4, 5, 6]), None)},
        np.float32([1, 1, 1]),
    )

    def loss_fn(features, weight):
        assert features["b"][1] is None
        return tf.reduce_mean(w * features["a"] * features["b"][0] * weight)

    for function in (lambda f: f, tf.function):
        compute = function(
            lambda: bigbatch.value_and_gradients(loss_fn, {"w": w}, batch, microbatch_size=2)
        )
        loss, gradients = compute()
        assert float(loss) == pytest.approx(2 * (4 + 10 + 18) / 3)
        assert float(gradients["w"]) == pytest.approx((4 + 10 + 18) / 3)


def test_ragged_batches():
    w = tf.Variable(2.0)
    x = tf.ragged.constant([[1.0], [2.0, 3.0], [], [4.0, 5.0, 6.0], [7.0]])

    def loss_fn(x):
        return tf.reduce_sum(w * x.flat_values), tf.shape(x.flat_values)[0]

    def compute(x):
        return bigbatch.value_and_gradients(loss_fn, [w], x, microbatch_size=2)

    for function in (compute, tf.function(compute)):
        loss, (gradient,) = function(x)
        assert float(loss) == pytest.approx(8.0)
        assert float(gradient) == pytest.approx(4.0)
