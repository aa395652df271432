"""Where `fit` adds dense gradients up: small ones of a kind in one tensor."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from bigbatch.tf.sums import DenseSums
from comparison import paired

SHAPES = {"kernel": (3, 4), "other kernel": (2, 4), "bias": (4,), "large": (64, 65)}


def variables():
    return {name: tf.Variable(tf.zeros(shape)) for name, shape in SHAPES.items()}


def ones(variable, factor=1.0):
    return tf.fill(variable.shape, factor)


def prepared(variables, *, joins=True):
    sums = DenseSums(joins=joins)
    sums.prepare(variables)
    return sums


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "graph"])
def test_every_variable_has_its_own_sum(wrap):
    of = list(variables().values())
    sums = prepared(of)

    def twice():
        for factor in (1.0, 2.0):
            gradients = [ones(one, factor * (index + 1)) for index, one in enumerate(of)]
            left, _ = sums.add(of, gradients, tf.constant(0.5, tf.float64))
            assert left == [None] * len(of)
        values = sums.values()
        return [values[id(one)] for one in of]

    def opened():
        sums.open()
        return twice()

    if wrap is tf.function:
        wrap(twice).get_concrete_function()  # of what is added is known when it is traced
    for index, (one, value) in enumerate(paired(of, wrap(opened)())):
        # Exact: halves of small whole numbers.
        np.testing.assert_array_equal(value, np.full(one.shape, 1.5 * (index + 1)))


def test_small_ones_of_a_kind_share_a_tensor_and_large_ones_do_not():
    of = list(variables().values())
    sums = prepared(of)
    _, added = sums.add(of, list(map(ones, of)))
    assert [tuple(one.shape) for one in added] == [(5, 4), (4,), (64, 65)]
    assert sum(one.bytes for one in sums.used) == 4 * sum(
        int(np.prod(shape)) for shape in SHAPES.values()
    )


def test_who_has_no_gradient_has_no_sum_and_takes_no_memory():
    of = list(variables().values())
    kernel, other, bias, _ = of
    sums = prepared(of)
    left, _ = sums.add(of, [ones(kernel), None, ones(bias), None])
    assert left == [None] * 4
    assert set(sums.values()) == {id(kernel), id(bias)}
    assert sum(one.bytes for one in sums.used) == 4 * (12 + 4)
    # A later trace may have others: they are left to the caller, and who is missing is zero.
    left, _ = sums.add([other, bias], [ones(other), ones(bias)])
    assert left[0] is not None
    assert left[1] is None
    np.testing.assert_array_equal(sums.values()[id(kernel)], np.ones((3, 4)))
    np.testing.assert_array_equal(sums.values()[id(bias)], np.full(4, 2.0))


def test_a_gradient_that_another_trace_had_is_zero_in_this_one():
    of = list(variables().values())[:2]
    sums = prepared(of)
    sums.add(of, list(map(ones, of)))
    sums.add(of, [None, ones(of[1])])
    values = sums.values()
    np.testing.assert_array_equal(values[id(of[0])], np.ones((3, 4)))
    np.testing.assert_array_equal(values[id(of[1])], np.full((2, 4), 2.0))


def test_rows_and_variables_without_a_place_are_left_to_the_caller():
    of = list(variables().values())
    known, new = of[:2]
    sums = prepared([known])
    rows = tf.IndexedSlices(tf.ones([1, 4]), tf.constant([0]), tf.constant([3, 4]))
    left, added = sums.add([known, new], [rows, ones(new)])
    assert left[0] is rows
    assert left[1] is not None
    assert not added
    sums.prepare([known, new])
    left, _ = sums.add([new], [ones(new)])
    assert left == [None]


def test_in_eager_code_every_batch_may_have_gradients_of_other_variables():
    one, other = list(variables().values())[:2]
    sums = prepared([one, other], joins=False)
    sums.add([one, other], [ones(one), None])
    assert set(sums.values()) == {id(one)}
    left, _ = sums.add([one, other], [None, ones(other)])
    assert left == [None, None]
    assert set(sums.values()) == {id(one), id(other)}
    sums.close()
    sums.open()
    sums.add([one, other], [None, ones(other)])
    # Not zeros, with which an optimizer that has a momentum would move it.
    assert set(sums.values()) == {id(other)}
    np.testing.assert_array_equal(sums.values()[id(other)], np.ones((2, 4)))


def test_gradients_keep_their_type_and_are_joined_in_that_of_their_sum():
    of = list(variables().values())[:2]
    sums = prepared(of)
    sums.add(of, [ones(of[0]), tf.cast(ones(of[1]), tf.float64)])
    assert {value.dtype for value in sums.values().values()} == {tf.float32}
    number = tf.Variable(tf.zeros([2], tf.complex64))
    sums = prepared([number])
    sums.add([number], [tf.constant([1 + 2j, 3j], tf.complex64)], tf.constant(0.5, tf.float64))
    np.testing.assert_array_equal(sums.values()[id(number)], [0.5 + 1j, 1.5j])
