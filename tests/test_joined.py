"""Small results of micro-batches are added up as few tensors, and come back as they were."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from bigbatch.tf.batch import Batch
from bigbatch.tf.joined import Joined
from bigbatch.tf.microbatches import total
from bigbatch.tf.values import LARGE
from comparison import paired

X = np.arange(20.0, dtype=np.float32).reshape(10, 2)


def results(x):
    """Return one of everything; sums over rows, so that parts of a batch add up."""
    row = tf.reduce_sum(x, 0)
    return {
        "numbers": [tf.reduce_sum(x), tf.cast(tf.shape(x)[0], tf.float64), row[0], None],
        "other": [tf.cast(row[0], tf.float16), tf.cast(row[1], tf.float64)],
        "rows": (row, tf.concat([row, row], 0)),
        "alone": tf.shape(x)[0],
        "matrix": tf.tensordot(row, tf.ones([3]), 0),
        "long": tf.fill([LARGE], row[0]),
        "sparse": tf.IndexedSlices(x, tf.cast(x[:, 0], tf.int32)),
    }


def as_arrays(nest):
    leaves = tf.nest.flatten(nest, expand_composites=True)
    return [None if leaf is None else np.asarray(leaf) for leaf in leaves]


@pytest.mark.parametrize("size", [3, 5, 10])
@pytest.mark.parametrize("is_static", [True, False])
def test_what_is_joined_comes_back_as_it_was(size, is_static):
    signature = None if is_static else [tf.TensorSpec([None, 2])]

    @tf.function(input_signature=signature, autograph=False)
    def summed(x):
        return total(results, Batch((x,), may_be_empty=False), size)

    found, expected = summed(tf.constant(X)), results(tf.constant(X))
    tf.nest.assert_same_structure(found, expected)
    # Exact: small whole numbers, which float16 has as well.
    for one, other in paired(as_arrays(found), as_arrays(expected)):
        np.testing.assert_array_equal(one, other)


def test_numbers_and_short_rows_of_a_type_are_one_tensor_each():
    joined = Joined(results)
    sums = tf.function(joined, autograph=False)(tf.constant(X))
    kinds = [(row.dtype, row.shape.as_list()) for row in sums["rows"]]
    # The float16 number is added up in float32.
    assert kinds == [(tf.float32, [3]), (tf.float64, [2]), (tf.float32, [6])]
    rest = sums["rest"]
    left = [name for name in rest if any(x is not None for x in tf.nest.flatten(rest[name]))]
    assert sorted(left) == ["alone", "long", "matrix", "sparse"]
    some = joined.parted(sums, "rows", "alone")
    assert set(some) == {"rows", "alone"}
    np.testing.assert_array_equal(some["rows"][1], np.tile(X.sum(0), 2))


def test_eager_code_joins_nothing():
    sums = Joined(results)(tf.constant(X))
    assert not sums["rows"]
    tf.nest.assert_same_structure(sums["rest"], results(tf.constant(X)))
