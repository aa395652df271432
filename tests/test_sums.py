"""Where `fit` adds up what micro-batches return: in graphs by variables, eagerly by Python."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from bigbatch.backends.tensorflow.sums import GradientSums, PythonSums, StoredSums
from comparison import paired

SHAPES = {"kernel": (3, 4), "other kernel": (2, 4), "bias": (4,), "large": (64, 65)}


def variables():
    return [tf.Variable(tf.zeros(shape)) for shape in SHAPES.values()]


def ones(variable, factor=1.0):
    return tf.fill(variable.shape, factor)


def test_every_variable_has_its_own_sum():
    of = variables()
    sums = GradientSums(of)

    def twice():
        for factor in (0.5, 1.0):
            gradients = [ones(one, factor * (index + 1)) for index, one in enumerate(of)]
            assert sums.add(of, gradients, [False] * len(of)) == [None] * len(of)
        return [sums.value(one) for one in of]

    def opened():
        for one in sums.used:
            one.open()
        return twice()

    tf.function(twice).get_concrete_function()  # which shows what is ever added
    assert sum(one.bytes for one in sums.used) == 4 * sum(map(np.prod, SHAPES.values()))
    for index, (one, value) in enumerate(paired(of, tf.function(opened)())):
        # Exact: halves of small whole numbers.
        np.testing.assert_array_equal(value, np.full(one.shape, 1.5 * (index + 1)))
    for one in sums.used:
        one.close()
        assert one.variable.shape.rank is None
        assert tf.size(one.variable.read_value()) == 0


def test_who_has_no_gradient_has_no_sum_and_takes_no_memory():
    kernel, other, bias, large = of = variables()
    sums = GradientSums(of)

    @tf.function
    def add():
        assert sums.add(of, [ones(kernel), None, ones(bias), None], [False] * 4) == [None] * 4

    add.get_concrete_function()
    assert sum(one.bytes for one in sums.used) == 4 * (12 + 4)
    assert sums.value(other) is None
    assert sums.value(large) is None


def test_rows_and_variables_without_a_place_are_left_to_the_caller():
    known, new = variables()[:2]
    sums = GradientSums([known])

    @tf.function
    def add():
        rows = tf.IndexedSlices(tf.ones([1, 4]), tf.constant([0]), tf.constant([3, 4]))
        left = sums.add([known, new], [rows, ones(new)], [False] * 2)
        assert left[0] is rows
        assert left[1] is not None

    add.get_concrete_function()
    assert not sums.used


def test_sums_between_graphs():
    specs = [tf.TensorSpec([]), tf.TensorSpec([None, 2]), tf.TensorSpec([None, 3])]
    stored = StoredSums(specs, [False, True, False])
    add, clear = tf.function(stored.add), tf.function(stored.clear)
    for _ in range(2):  # nothing of one batch is left in the next
        clear()
        for factor in (1.0, 2.0):
            rows = tf.fill([int(factor), 2], factor)
            add([tf.constant(factor), rows, tf.fill([1, 3], factor)])
        number, rows, unknown = stored.values()
        assert float(number) == 3.0
        np.testing.assert_array_equal(rows, [[1, 1], [2, 2], [2, 2]])
        np.testing.assert_array_equal(unknown, [[3, 3, 3]])


def test_in_eager_code_every_batch_may_have_gradients_of_other_variables():
    sums = PythonSums()
    for gradients in ([tf.ones(2), None], [None, None]):
        sums.add(gradients)
    one, other = sums.value()
    np.testing.assert_array_equal(one, np.ones(2))
    assert other is None
    sums.clear()
    assert sums.value() is None
    sums.add([None, tf.ones(2)])
    # Not zeros, with which an optimizer that has a momentum would move it.
    assert sums.value()[0] is None


def test_half_precision_and_complex_numbers():
    sums = PythonSums()
    for _ in range(2):
        sums.add([tf.constant([1.0], tf.bfloat16), tf.constant([1 + 2j], tf.complex64)])
    half, number = sums.value()
    assert half.dtype == tf.float32
    np.testing.assert_array_equal(number, [2 + 4j])
