"""Promise 1: the update equals that of the full batch."""

from __future__ import annotations

import itertools
from typing import Any, Callable

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import bigbatch
from comparison import paired

from problems import (
    TOLERANCE,
    Problem,
    cut,
    dense_problem,
    embedding_problem,
    largest_difference,
    optimizers,
    train_full_batch,
    variables_for,
)
from stack import keras

PARTITIONS = {
    "equal": [6, 6, 6, 6],
    "unequal": [1, 10, 2, 11],
    "one sample each": [1] * 24,
    "short last": [7, 7, 7, 3],
    "one micro-batch": [24],
}
UPDATES = 4


def accumulate_eagerly(
    problem: Problem, model: Any, accumulator: Any, variables: list[Any]
) -> Callable[..., Any]:
    def micro_batch(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = problem.mean_loss(model, x, y)
        gradients = tape.gradient(loss, variables)
        accumulator.accumulate(gradients, weight=tf.shape(x)[0])

    return micro_batch


LOOPS = {
    "eager": lambda function: function,
    "graph": lambda function: tf.function(function, reduce_retracing=True),
    "jit": lambda function: tf.function(function, jit_compile=True),
}


CASES = [
    *itertools.product(TOLERANCE, optimizers(), PARTITIONS, ["graph"]),
    *itertools.product(["float64"], ["adam"], PARTITIONS, ["eager", "jit"]),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("dtype", "optimizer", "partition", "loop"), CASES)
@pytest.mark.parametrize("make_problem", [dense_problem, embedding_problem])
def test_accumulator(make_problem, dtype, optimizer, partition, loop):
    problem, sizes = make_problem(dtype), PARTITIONS[partition]
    expected = train_full_batch(problem, optimizers()[optimizer], UPDATES)
    model, optimizer = problem.build(optimizers()[optimizer])
    variables = variables_for(optimizer, model)
    accumulator = bigbatch.GradientAccumulator(
        optimizer, variables, accumulation_steps=len(sizes)
    )
    micro_batch = LOOPS[loop](accumulate_eagerly(problem, model, accumulator, variables))
    for _ in range(UPDATES):
        updated = []
        for x, y in cut(problem, sizes):
            micro_batch(x, y)
            updated.append(accumulator.apply_when_full())
        assert updated == [False] * (len(sizes) - 1) + [True]
    assert largest_difference(model, expected) <= TOLERANCE[dtype]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer", optimizers())
@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("make_problem", [dense_problem, embedding_problem])
def test_accumulator_with_the_whole_loop_in_one_graph(make_problem, partition, optimizer):
    problem, sizes = make_problem(), PARTITIONS[partition]
    expected = train_full_batch(problem, optimizers()[optimizer], UPDATES)
    model, optimizer = problem.build(optimizers()[optimizer])
    variables = variables_for(optimizer, model)
    accumulator = bigbatch.GradientAccumulator(
        optimizer, variables, accumulation_steps=len(sizes)
    )
    accumulate = accumulate_eagerly(problem, model, accumulator, variables)
    updated = tf.Variable(0)

    @tf.function(reduce_retracing=True)
    def micro_batch(x, y):
        accumulate(x, y)
        if accumulator.apply_when_full():
            updated.assign_add(1)

    for _ in range(UPDATES):
        for x, y in cut(problem, sizes):
            micro_batch(x, y)
    assert int(updated) == UPDATES
    assert largest_difference(model, expected) <= TOLERANCE["float64"]


WAYS = {
    "eager": {},
    "graph": {"jit_compile": False},
    "graph, batch size unknown": {"jit_compile": False, "any_size": True},
    "jit": {"jit_compile": True},
    "jit, batch size unknown": {"jit_compile": True, "any_size": True},
    "compiled loss, eager": {"compiled_loss": True},
    "compiled loss": {"compiled_loss": True, "jit_compile": False},
    "compiled loss, batch size unknown": {
        "compiled_loss": True,
        "jit_compile": False,
        "any_size": True,
    },
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("microbatch_size", [1, 6, 7, 24, 100])
@pytest.mark.parametrize("form", ["mean", "sum and weight"])
@pytest.mark.parametrize("make_problem", [dense_problem, embedding_problem])
def test_value_and_gradients(make_problem, form, microbatch_size, way):
    problem = make_problem()
    model, _ = problem.build(lambda: None)
    variables = [*model.trainable_variables, tf.Variable(1.0, name="unused")]

    def loss_fn(x, y):
        per_sample = problem.per_sample(model, x, y)
        if form == "mean":
            return tf.reduce_mean(per_sample)
        return tf.reduce_sum(per_sample), tf.shape(x)[0]

    def compute(x, y):
        return bigbatch.value_and_gradients(
            loss_fn, variables, (x, y), microbatch_size=microbatch_size
        )

    options = dict(WAYS[way])
    if options.pop("compiled_loss", False):
        loss_fn = tf.function(loss_fn, jit_compile=True)
    if options:
        x, y = tf.constant(problem.x), tf.constant(problem.y)
        if options.pop("any_size", False):
            options["input_signature"] = [
                tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype) for tensor in (x, y)
            ]
        compute = tf.function(compute, **options)
    with tf.GradientTape() as tape:
        expected_loss = problem.mean_loss(model, problem.x, problem.y)
    expected = tape.gradient(expected_loss, variables)
    loss, gradients = compute(tf.constant(problem.x), tf.constant(problem.y))

    assert abs(float(loss - expected_loss)) <= 1e-12
    assert gradients[-1] is expected[-1] is None
    for gradient, reference in paired(gradients[:-1], expected[:-1]):
        assert gradient.dtype == reference.dtype
        if isinstance(reference, tf.IndexedSlices):
            # The very rows of the full batch, in its order.
            np.testing.assert_array_equal(gradient.indices, reference.indices)
            np.testing.assert_array_equal(gradient.dense_shape, reference.dense_shape)
            gradient, reference = gradient.values, reference.values
        np.testing.assert_allclose(gradient, reference, rtol=0, atol=1e-12)


@st.composite
def partitions(draw):
    """Return the sizes of micro-batches that make up 24 samples, zero included."""
    cuts = sorted(draw(st.lists(st.integers(0, 24), max_size=8)))
    return [end - start for start, end in zip([0, *cuts], [*cuts, 24])]


class Law:
    """A linear model by hand: its gradient is one line of NumPy, the oracle of the laws."""

    rng = np.random.default_rng(3)
    x, y, initial = rng.normal(size=(24, 4)), rng.normal(size=24), rng.normal(size=4)

    @classmethod
    def full_batch_gradient(cls) -> np.ndarray:
        return 2 * (cls.x @ cls.initial - cls.y) @ cls.x / len(cls.x)

    def __init__(self, accumulation_steps=None) -> None:
        self.w = tf.Variable(self.initial)
        self.accumulator = bigbatch.GradientAccumulator(
            keras.optimizers.SGD(1.0), [self.w], accumulation_steps=accumulation_steps
        )

    def accumulate(self, rows: np.ndarray) -> None:
        gradient = np.zeros(4)
        if len(rows):
            gradient = (
                2 * (self.x[rows] @ self.initial - self.y[rows]) @ self.x[rows] / len(rows)
            )
        self.accumulator.accumulate([gradient], weight=len(rows))

    def check_is_full_batch(self) -> None:
        update = self.initial - self.w.numpy()
        np.testing.assert_allclose(update, self.full_batch_gradient(), rtol=0, atol=1e-12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(sizes=partitions(), order=st.permutations(range(24)))
def test_any_partition_in_any_order_gives_the_same_update(sizes, order):
    law = Law(accumulation_steps=len(sizes))
    for rows in np.split(np.array(order), np.cumsum(sizes)[:-1]):
        law.accumulate(rows)
    assert law.accumulator.apply_when_full()
    law.check_is_full_batch()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(sizes=partitions(), at=st.integers(0, 8))
def test_saving_and_restoring_anywhere_changes_nothing(sizes, at, tmp_path_factory):
    law = Law()
    parts = np.split(np.arange(24), np.cumsum(sizes)[:-1])
    for rows in parts[:at]:
        law.accumulate(rows)
    path = tf.train.Checkpoint(accumulator=law.accumulator).save(
        tmp_path_factory.mktemp("law") / "checkpoint"
    )
    later = Law()
    later.accumulate(np.arange(5))  # forgotten when the checkpoint is restored
    tf.train.Checkpoint(accumulator=later.accumulator).restore(path).assert_consumed()
    for rows in parts[at:]:
        later.accumulate(rows)
    assert later.accumulator.flush()
    later.check_is_full_batch()


def test_window_of_one_is_plain_training_bit_for_bit():
    problem = dense_problem("float32")
    expected = train_full_batch(problem, optimizers()["adam"], UPDATES)
    model, optimizer = problem.build(optimizers()["adam"])
    accumulator = bigbatch.GradientAccumulator(
        optimizer, model.trainable_variables, accumulation_steps=1
    )
    for _ in range(UPDATES):
        with tf.GradientTape() as tape:
            loss = problem.mean_loss(model, problem.x, problem.y)
        accumulator.accumulate(tape.gradient(loss, model.trainable_variables))
        assert accumulator.apply_when_full()
    assert largest_difference(model, expected) == 0
