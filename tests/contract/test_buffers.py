"""Promise 5: at least float32, sparse stays sparse, `None` stays `None`."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf

import bigbatch

from stack import IS_KERAS_3, build, keras


class Recorder:
    def __init__(self):
        self.gradients = None

    def apply_gradients(self, pairs):
        self.gradients = [gradient for gradient, _ in pairs]


def make(*variables, **options):
    recorder = Recorder()
    return recorder, bigbatch.GradientAccumulator(recorder, list(variables), **options)


def rows(indices, values, table_rows=1000):
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), (table_rows, 1))


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_half_precision_gradients_are_added_in_float32(dtype):
    # In 16 bits 2048 + 1 is 2048: all the ones would be lost.
    recorder, accumulator = make(tf.Variable(0, dtype=dtype))
    accumulator.accumulate([tf.constant(2048, dtype)])
    for _ in range(2048):
        accumulator.accumulate([tf.constant(1, dtype)], weight=1)
    assert float(accumulator.gradients[0]) == pytest.approx(4096 / 2049, rel=0.01)
    accumulator.flush()
    assert recorder.gradients[0].dtype == dtype


def test_float64_stays_float64():
    recorder, accumulator = make(tf.Variable(0.0, dtype=tf.float64))
    accumulator.accumulate([tf.constant(0.1, tf.float64)], weight=0.3)
    accumulator.accumulate([tf.constant(0.2, tf.float64)], weight=0.6)
    accumulator.flush()
    expected = (0.1 * 0.3 + 0.2 * 0.6) / (0.3 + 0.6)
    assert abs(float(recorder.gradients[0]) - expected) <= 1e-16


def test_a_gradient_in_some_micro_batches_counts_with_the_weight_of_all():
    recorder, accumulator = make(tf.Variable(0.0), tf.Variable(0.0), tf.Variable(0.0))
    accumulator.accumulate([tf.constant(6.0), None, None], weight=1)
    accumulator.accumulate([tf.constant(6.0), tf.constant(6.0), None], weight=2)
    accumulator.flush()
    first, second, third = recorder.gradients
    assert (float(first), float(second), third) == (6.0, 4.0, None)


@pytest.mark.parametrize("together", [False, True])
def test_in_a_graph_none_is_none_window_by_window(together):
    w, v = tf.Variable(0.0), tf.Variable(0.0)
    # Momentum moves a variable whose gradient is zero, but not one whose gradient is None.
    optimizer = keras.optimizers.SGD(1.0, momentum=0.9)
    build(optimizer, [w, v])
    accumulator = bigbatch.GradientAccumulator(optimizer, [w, v])

    @tf.function
    def both(value):
        accumulator.accumulate([value, value])

    @tf.function
    def only_first(value):
        accumulator.accumulate([value, None])

    @tf.function
    def flush():
        return accumulator.flush()

    one = tf.constant(1.0)
    both(one)
    only_first(one)
    # Keras 2 logs it.
    warns = pytest.warns(UserWarning, match="Gradients do not exist")
    with warns if IS_KERAS_3 else contextlib.nullcontext():
        assert flush()
    np.testing.assert_allclose([w, v], [-1.0, -0.5])
    if together:
        both(one)
    only_first(one)
    assert flush()
    assert float(w) == pytest.approx(-2.9)
    assert float(v) == pytest.approx(-0.5 - (0.45 + 0.5 if together else 0.0))


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_a_graph_updates_variables_it_could_not_foresee():
    # One function for two tasks: the graph of the first is traced before the second is seen.
    shared, a, b = (tf.Variable(2.0) for _ in range(3))
    optimizer = keras.optimizers.SGD(1.0, momentum=0.9)
    accumulator = bigbatch.GradientAccumulator(optimizer, [shared, a, b], accumulation_steps=2)

    @tf.function
    def micro_batch(task):
        one = tf.constant(1.0)
        accumulator.accumulate([one, one, None] if task == "a" else [one, None, one])
        return accumulator.apply_when_full()

    assert [bool(micro_batch(task)) for task in "aaba"] == [False, True] * 2
    # Momentum: the second update moves by 0.9 times the first, and by its own gradient.
    np.testing.assert_allclose([shared, a, b], [-0.9, 2 - 1 - 0.9 - 0.5, 1.5], rtol=1e-6)


def test_a_graph_can_be_traced_before_anything_is_accumulated():
    w = tf.Variable(0.0)
    accumulator = bigbatch.GradientAccumulator(keras.optimizers.SGD(1.0), [w])
    flush = tf.function(accumulator.flush)
    assert not flush()
    accumulator.accumulate([tf.constant(3.0)])
    assert flush()
    assert float(w) == -3.0
    assert int(accumulator.step) == 0


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_the_graph_of_an_update_grows_no_faster_than_the_number_of_tasks():
    def branches(heads):
        variables = [tf.Variable(0.0) for _ in range(heads)]
        accumulator = bigbatch.GradientAccumulator(keras.optimizers.SGD(1.0), variables)
        for head in range(heads):
            gradients = [tf.constant(1.0) if head == i else None for i in range(heads)]
            accumulator.accumulate(gradients)
        graph = tf.function(accumulator.flush).get_concrete_function().graph.as_graph_def()
        return sum("branch" in function.signature.name for function in graph.library.function)

    assert branches(6) - branches(5) == branches(4) - branches(3)


def test_rows_are_handed_over_as_the_full_batch_would():
    recorder, accumulator = make(tf.Variable(tf.zeros([1000, 1])))
    accumulator.accumulate([rows([7, 3, 7], [[1.0], [2.0], [3.0]])], weight=1)
    accumulator.accumulate([rows([3], [[4.0]])], weight=3)
    accumulator.flush()
    (gradient,) = recorder.gradients
    assert isinstance(gradient, tf.IndexedSlices)
    # Not de-duplicated: the full batch does not either, and Keras' Adam sees the difference.
    np.testing.assert_array_equal(gradient.indices, [7, 3, 7, 3])
    np.testing.assert_allclose(gradient.values, [[0.25], [0.5], [0.75], [3.0]])
    np.testing.assert_array_equal(gradient.dense_shape, [1000, 1])


@pytest.mark.parametrize("sparse_first", [False, True])
def test_dense_and_sparse_gradients_of_one_variable_add_up_to_a_dense_one(sparse_first):
    recorder, accumulator = make(tf.Variable(tf.zeros([3, 1])))
    gradients = [tf.ones([3, 1]), rows([1, 1], [[2.0], [4.0]], 3)]
    for gradient in reversed(gradients) if sparse_first else gradients:
        accumulator.accumulate([gradient])
    accumulator.flush()
    np.testing.assert_allclose(recorder.gradients[0], [[0.5], [3.5], [0.5]])


def test_nan_does_not_survive_a_reset():
    recorder, accumulator = make(tf.Variable(0.0), tf.Variable(tf.zeros([1000, 1])))
    accumulator.accumulate([tf.constant(np.nan), rows([1], [[np.nan]])])
    accumulator.reset()
    accumulator.accumulate([tf.constant(1.0), rows([2], [[1.0]])])
    accumulator.flush()
    dense, sparse = recorder.gradients
    assert float(dense) == 1.0
    assert sparse.values.numpy().tolist() == [[1.0]]


def test_weight_zero_changes_nothing_even_of_a_nan():
    # An all-masked micro-batch has the mean loss 0/0.
    recorder, accumulator = make(tf.Variable(0.0))
    accumulator.accumulate([tf.constant(2.0)], weight=3)
    accumulator.accumulate([tf.constant(np.nan)], weight=0)
    accumulator.flush()
    assert float(recorder.gradients[0]) == 2.0


def test_a_window_of_weight_zero_has_a_gradient_of_zero():
    recorder, accumulator = make(tf.Variable(0.0))
    accumulator.accumulate([tf.constant(np.nan)], weight=0)
    assert accumulator.flush() is True
    assert float(recorder.gradients[0]) == 0.0


def test_everything_masked_is_a_loss_and_gradients_of_zero():
    w = tf.Variable(2.0)
    loss, (gradient,) = bigbatch.value_and_gradients(
        lambda x: (tf.reduce_sum(w * x) * 0.0, 0), [w], (tf.ones([5]),), microbatch_size=2
    )
    assert (float(loss), float(gradient)) == (0.0, 0.0)


def test_half_precision_variables_get_gradients_as_from_a_tape():
    w = tf.Variable([1.0, 2.0], dtype=tf.bfloat16)
    x = tf.cast(tf.random.normal([64, 2]), tf.bfloat16)
    loss, (gradient,) = bigbatch.value_and_gradients(
        lambda x: tf.reduce_mean(tf.reduce_sum(w * x, -1)), [w], (x,), microbatch_size=1
    )
    assert gradient.dtype == tf.bfloat16
    assert loss.dtype == tf.float32
    # One rounding to bfloat16 (8 bits) of the exact mean, not 64 of them.
    expected = np.mean(x.numpy().astype("float64"), 0)
    np.testing.assert_allclose(
        gradient.numpy().astype("float64"), expected, rtol=2**-8, atol=1e-3
    )
