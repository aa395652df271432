"""`GradientAccumulator` for TensorFlow 1.14, against the full batch.

It is plain Python, so the tests run on TensorFlow 2 as well. `make matrix` runs them on 1.14.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from bigbatch.errors import ArgumentError, BigbatchError, ContextError
from bigbatch.loops import tf1 as eager1
from bigbatch.loops.tf1 import GradientAccumulator
from comparison import paired

IS_ONE = tf.__version__.startswith("1.")
if IS_ONE:
    two = tf.compat.v1.ConfigProto(device_count={"CPU": 2})
    tf.compat.v1.enable_eager_execution(config=two)
only_one = pytest.mark.skipif(not IS_ONE, reason="TensorFlow 1 only")

TOLERANCE = 1e-12  # float64: rounding only
UPDATES = 3
train = tf.compat.v1.train
OPTIMIZERS = {
    "train.Adam": lambda: train.AdamOptimizer(0.05),
    "train.GradientDescent": lambda: train.GradientDescentOptimizer(0.05),
    "train.Momentum": lambda: train.MomentumOptimizer(0.05, 0.9),
    "keras.Adam": lambda: tf.keras.optimizers.Adam(0.05),
    "keras.SGD": lambda: tf.keras.optimizers.SGD(0.05, momentum=0.9),
}
PARTITIONS = {"equal": [6, 6, 6, 6], "unequal": [1, 10, 2, 11], "one micro-batch": [24]}

rng = np.random.RandomState(1)
# Rows of the table repeat within and across micro-batches, and some are never touched.
IDS, X, Y = rng.randint(0, 20, (24, 4)), rng.normal(size=(24, 5)), rng.normal(size=(24, 3))
INITIAL = [rng.normal(size=shape) for shape in ((30, 3), (5, 3), (3,), (2,))]


def make_variables():
    return [tf.Variable(value) for value in INITIAL]


def gradients_of(variables, rows):
    """Return the gradients of the mean loss of some samples: sparse, dense, dense, `None`."""
    table, kernel, bias, _ = variables
    with tf.GradientTape() as tape:
        embedded = tf.reduce_sum(tf.gather(table, IDS[rows]), axis=1)
        outputs = tf.tanh(embedded + tf.matmul(X[rows], kernel)) + bias
        loss = tf.reduce_mean(tf.square(outputs - Y[rows]))
    return tape.gradient(loss, variables)


def parts(sizes):
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for size, end in zip(sizes, ends)]


def train_full_batch(optimizer, updates=UPDATES):
    variables = make_variables()
    for _ in range(updates):
        pairs = zip(gradients_of(variables, slice(0, 24)), variables)
        optimizer.apply_gradients([pair for pair in pairs if pair[0] is not None])
    return variables


def check_same(variables, expected):
    for one, other in paired(variables, expected):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=0, atol=TOLERANCE)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_the_full_batch(name, partition):
    sizes = PARTITIONS[partition]
    expected = train_full_batch(OPTIMIZERS[name]())
    variables = make_variables()
    accumulator = GradientAccumulator(
        OPTIMIZERS[name](), variables, accumulation_steps=len(sizes)
    )
    for _ in range(UPDATES):
        updated = []
        for rows, size in paired(parts(sizes), sizes):
            accumulator.accumulate(gradients_of(variables, rows), weight=size)
            updated.append(accumulator.apply_when_full())
        assert updated == [False] * (len(sizes) - 1) + [True]
    check_same(variables, expected)


def test_a_mean_of_means_would_be_seen(monkeypatch):
    test_equals_the_full_batch("train.Adam", "unequal")
    monkeypatch.setattr(eager1, "checked_weight", lambda *_: (None, 1.0))
    with pytest.raises(AssertionError):
        test_equals_the_full_batch("train.Adam", "unequal")


def make(accumulation_steps=None):
    w, v = tf.Variable(1.0, name="w"), tf.Variable([1.0, 2.0], name="v")
    optimizer = train.GradientDescentOptimizer(1.0)
    accumulator = GradientAccumulator(optimizer, [w, v], accumulation_steps=accumulation_steps)
    return w, v, accumulator


def feed(accumulator, *values):
    for value in values:
        accumulator.accumulate([tf.constant(value), None])


def test_the_last_short_window_and_what_can_be_seen():
    w, v, accumulator = make(accumulation_steps=3)
    accumulator.accumulate([tf.constant(2.0), None], weight=1)
    accumulator.accumulate([tf.constant(5.0), None], weight=tf.constant(2))
    assert (accumulator.step, accumulator.total_weight) == (2, 3.0)
    assert float(accumulator.gradients[0]) == 4.0
    assert accumulator.gradients[1] is None
    assert not accumulator.is_full
    assert accumulator.apply_when_full() is False
    assert accumulator.flush() is True
    assert accumulator.flush() is False
    assert (accumulator.step, accumulator.total_weight) == (0, 0.0)
    assert float(w.numpy()) == -3.0
    np.testing.assert_array_equal(v.numpy(), [1.0, 2.0])


def test_reset_forgets_even_a_nan():
    w, _, accumulator = make()
    feed(accumulator, np.float32(np.nan))
    accumulator.reset()
    feed(accumulator, 3.0)
    assert accumulator.flush()
    assert float(w.numpy()) == -2.0


def test_weight_zero_changes_nothing_even_of_a_nan():
    w, _, accumulator = make()
    accumulator.accumulate([tf.constant(2.0), None], weight=3)
    accumulator.accumulate([tf.constant(np.float32(np.nan)), None], weight=0)
    assert accumulator.flush()
    assert float(w.numpy()) == -1.0
    accumulator.accumulate([tf.constant(np.float32(np.nan)), None], weight=0)
    assert accumulator.flush()
    assert float(w.numpy()) == -1.0


def test_half_precision_is_added_in_float32():
    w = tf.Variable(tf.zeros([], tf.float16))
    accumulator = GradientAccumulator(train.GradientDescentOptimizer(1.0), [w])
    accumulator.accumulate([tf.constant(2048, tf.float16)])
    for _ in range(64):
        accumulator.accumulate([tf.constant(1, tf.float16)])
    (gradient,) = accumulator.gradients
    assert gradient.dtype == tf.float16
    assert float(gradient) == np.float16((2048 + 64) / 65)  # in 16 bits 2048 + 1 is 2048


def test_rows_stay_rows_and_mix_with_dense_gradients():
    table = tf.Variable(tf.zeros([5, 1]))
    accumulator = GradientAccumulator(train.GradientDescentOptimizer(1.0), [table])

    def rows(indices, values):
        return [tf.IndexedSlices(tf.constant(values), tf.constant(indices))]

    accumulator.accumulate(rows([3, 1, 3], [[1.0], [2.0], [3.0]]), weight=1)
    accumulator.accumulate(rows(np.array([1]), [[4.0]]), weight=3)  # int64, above int32
    accumulator.deserialize(accumulator.serialize())
    (gradient,) = accumulator.gradients
    assert gradient.indices.numpy().tolist() == [3, 1, 3, 1]
    np.testing.assert_allclose(gradient.values.numpy(), [[0.25], [0.5], [0.75], [3.0]])
    accumulator.accumulate([tf.ones([5, 1])], weight=4)
    (gradient,) = accumulator.gradients
    np.testing.assert_allclose(gradient.numpy()[:, 0], [0.5, 2.25, 0.5, 1.0, 0.5])


def test_a_schedule_sets_the_length_of_each_window():
    w, _, accumulator = make(lambda updates: {0: 1, 1: 3, 2: 2}.get(updates, 4))
    updated = []
    for _ in range(10):
        feed(accumulator, 1.0)
        updated.append(accumulator.apply_when_full())
    assert np.flatnonzero(updated).tolist() == [0, 3, 5, 9]
    assert float(w.numpy()) == -3.0


def test_the_schedules_of_bigbatch():
    _, _, accumulator = make(bigbatch.piecewise({0: 1, 1: 2}))
    feed(accumulator, 1.0)
    assert accumulator.apply_when_full()
    feed(accumulator, 1.0)
    assert not accumulator.apply_when_full()


def test_a_checkpoint_in_the_middle_of_a_window(tmp_path):
    name, sizes = "train.GradientDescent", PARTITIONS["unequal"]
    expected = train_full_batch(OPTIMIZERS[name](), updates=1)
    variables = make_variables()
    saved = GradientAccumulator(OPTIMIZERS[name](), variables, accumulation_steps=4)
    for rows, size in zip(parts(sizes)[:2], sizes):
        saved.accumulate(gradients_of(variables, rows), weight=size)
    path = train.Checkpoint(accumulator=saved).save(str(tmp_path / "checkpoint"))
    restored = GradientAccumulator(OPTIMIZERS[name](), variables, accumulation_steps=4)
    restored.accumulate(gradients_of(variables, slice(0, 5)), weight=5)  # forgotten
    train.Checkpoint(accumulator=restored).restore(path)
    assert (restored.step, restored.total_weight) == (2, 11.0)
    for rows, size in paired(parts(sizes)[2:], sizes[2:]):
        restored.accumulate(gradients_of(variables, rows), weight=size)
    assert restored.apply_when_full()
    check_same(variables, expected)


def test_a_checkpoint_of_other_variables_is_refused():
    _, _, saved = make()
    feed(saved, 1.0)
    other = GradientAccumulator(train.GradientDescentOptimizer(1.0), [tf.Variable([1.0])])
    with pytest.raises(ArgumentError, match="variables of other shapes"):
        other.deserialize(saved.serialize())
    assert other.step == 0


def test_a_failed_update_keeps_the_window():
    class Failing:
        def apply_gradients(self, pairs):
            raise RuntimeError("no")

    accumulator = GradientAccumulator(Failing(), [tf.Variable(0.0)])
    accumulator.accumulate([tf.constant(2.0)])
    with pytest.raises(RuntimeError, match="no"):
        accumulator.flush()
    assert accumulator.step == 1


@pytest.mark.parametrize(
    ("gradients", "received"),
    [
        ([1.0], "1 gradients"),
        (None, "None"),
        ([None, None], "all None"),
        ([[1.0, 1.0, 1.0], None], "(3,)"),
        ([1, None], "int32"),
        ([None, tf.SparseTensor([[0]], [1.0], [2])], "shape (1,)"),
    ],
)
def test_bad_gradients(gradients, received):
    _, _, accumulator = make()
    feed(accumulator, 1.0)
    with pytest.raises(ArgumentError) as error:
        accumulator.accumulate(gradients)
    assert received in str(error.value)
    assert accumulator.step == 1


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), [1, 2], "3", None])
def test_bad_weight(weight):
    _, _, accumulator = make()
    with pytest.raises(ArgumentError, match="weight"):
        accumulator.accumulate([tf.constant(1.0), None], weight=weight)
    assert accumulator.step == 0


@pytest.mark.parametrize("steps", [0, -1, 2.5, "4", True])
def test_bad_accumulation_steps(steps):
    for value in (steps, lambda updates: steps):
        with pytest.raises(ArgumentError, match="accumulation_steps"):
            make(value)


def test_bad_optimizer_and_variables():
    with pytest.raises(ArgumentError, match="apply_gradients"):
        GradientAccumulator("adam", [tf.Variable(1.0)])
    with pytest.raises(ArgumentError, match=r"model\.trainable_variables"):
        GradientAccumulator(train.GradientDescentOptimizer(1.0), tf.Variable(1.0))


def test_graphs_are_refused():
    refused = pytest.raises(ContextError, match="enable_eager_execution")
    with tf.Graph().as_default(), refused:
        make()


SHARES = {"even": [(6, 6), (6, 6)], "uneven": [(1, 9), (11, 3)], "none": [(10, 0), (0, 14)]}


@pytest.fixture(scope="module")
def mirrored():
    return tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])


def on_replicas(strategy, function):
    """Run a function of the replica's number on each replica."""

    def local():
        context = tf.distribute.get_replica_context()
        function(int(context.replica_id_in_sync_group))

    strategy.experimental_run_v2(local)


@only_one
@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replicas_equal_the_full_batch(mirrored, name, shares):
    expected = train_full_batch(OPTIMIZERS[name]())
    with mirrored.scope():
        variables = make_variables()
        accumulator = GradientAccumulator(
            OPTIMIZERS[name](), variables, accumulation_steps=len(SHARES[shares])
        )
    for _ in range(UPDATES):
        updated, start = [], 0
        for counts in SHARES[shares]:
            bounds = np.cumsum([start, *counts])
            start = bounds[-1]

            def micro_batch(replica, bounds=bounds):
                rows = slice(bounds[replica], bounds[replica + 1])
                weight = rows.stop - rows.start
                accumulator.accumulate(gradients_of(variables, rows), weight)  # 0/0 if none

            on_replicas(mirrored, micro_batch)
            updated.append(accumulator.apply_when_full())
        assert updated == [False, True]
    for replica in range(2):
        local = [mirrored.experimental_local_results(v)[replica] for v in variables]
        check_same(local, expected)


@only_one
def test_whole_gradients_instead_of_shares_would_be_seen(mirrored, monkeypatch):
    scaled = eager1.scaled

    def whole(value, factor, *of):
        is_share = factor == 1 / 2
        return scaled(value, 1.0 if is_share else factor, *of)

    test_replicas_equal_the_full_batch(mirrored, "train.Momentum", "uneven")
    monkeypatch.setattr(eager1, "scaled", whole)
    with pytest.raises(AssertionError):
        test_replicas_equal_the_full_batch(mirrored, "train.Momentum", "uneven")


@only_one
def test_the_state_of_replicas_goes_through_a_checkpoint(mirrored):
    with mirrored.scope():
        w = tf.Variable(1.0)
        saved, restored = (
            GradientAccumulator(train.GradientDescentOptimizer(1.0), [w]) for _ in range(2)
        )
    on_replicas(mirrored, lambda replica: saved.accumulate([float(replica)], replica + 1))
    restored.deserialize(saved.serialize())
    assert (restored.step, restored.total_weight) == (1, 3.0)
    assert restored.flush() is True
    assert float(w.numpy()) == pytest.approx(1 - 2 / 3)


@only_one
def test_calls_in_the_wrong_place_are_refused(mirrored):
    with mirrored.scope():
        w = tf.Variable(1.0)
        accumulator = GradientAccumulator(train.GradientDescentOptimizer(1.0), [w])
    for call in ("apply_when_full", "flush", "reset"):
        with pytest.raises(ContextError, match=rf"{call}\(\) outside strategy.run"):
            mirrored.experimental_run_v2(getattr(accumulator, call))
    with pytest.raises(ContextError, match="inside strategy"):
        accumulator.accumulate([1.0])
    outside = GradientAccumulator(train.GradientDescentOptimizer(1.0), [tf.Variable(1.0)])
    with pytest.raises(ContextError, match=r"with strategy.scope\(\)"):
        mirrored.experimental_run_v2(lambda: outside.accumulate([1.0]))


@only_one
def test_what_bigbatch_has_on_tensorflow_1():
    assert bigbatch.GradientAccumulator is GradientAccumulator
    for name in ("accumulate", "value_and_gradients", "verify"):
        with pytest.raises(BigbatchError, match=r"with TensorFlow 1\.1[45]"):
            getattr(bigbatch, name)
