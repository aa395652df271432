"""Promise 8: one trace, whatever the tails and the schedule do."""

from __future__ import annotations

import pytest
import tensorflow as tf

import bigbatch

from problems import dense_problem
from stack import new_optimizers


@pytest.mark.parametrize("jit_compile", [False, True])
def test_value_and_gradients_traces_once_for_every_batch_size(jit_compile):
    problem = dense_problem()
    model, _ = problem.build(lambda: None)
    traces = []

    def loss_fn(x, y):
        traces.append(x.shape)
        return problem.mean_loss(model, x, y)

    @tf.function(
        jit_compile=jit_compile,
        input_signature=[
            tf.TensorSpec([None, 5], tf.float64),
            tf.TensorSpec([None, 3], tf.float64),
        ],
    )
    def compute(x, y):
        return bigbatch.value_and_gradients(
            loss_fn, model.trainable_variables, (x, y), microbatch_size=4
        )

    for samples in (24, 23, 4, 3, 1, 8):
        compute(tf.constant(problem.x[:samples]), tf.constant(problem.y[:samples]))
    assert compute.experimental_get_tracing_count() == 1
    assert len(traces) == 1


@pytest.mark.parametrize("jit_compile", [None, True])
def test_a_compiled_loss_is_compiled_together_with_its_gradients(jit_compile):
    w = tf.Variable(2.0)
    loss_fn = tf.function(lambda x: tf.reduce_mean(w * x), jit_compile=jit_compile)
    compute = tf.function(
        lambda x: bigbatch.value_and_gradients(loss_fn, [w], (x,), microbatch_size=2)
    )
    graph = compute.get_concrete_function(tf.range(6.0)).graph.as_graph_def()
    functions = {function.signature.name: function for function in graph.library.function}
    (loop,) = (node for node in graph.node if node.op in ("While", "StatelessWhile"))
    calls = (
        node for node in functions[loop.attr["body"].func.name].node_def if "f" in node.attr
    )
    (micro_batch,) = (functions[call.attr["f"].func.name] for call in calls)
    assert micro_batch.attr["_XlaMustCompile"].b == bool(jit_compile)


def test_the_graph_does_not_grow_with_the_number_of_micro_batches():
    problem = dense_problem()
    model, _ = problem.build(lambda: None)

    def nodes(microbatch_size):
        compute = tf.function(
            lambda x, y: bigbatch.value_and_gradients(
                lambda x, y: problem.mean_loss(model, x, y),
                model.trainable_variables,
                (x, y),
                microbatch_size=microbatch_size,
            )
        )
        graph = compute.get_concrete_function(problem.x, problem.y).graph.as_graph_def()
        return len(graph.node) + sum(len(f.node_def) for f in graph.library.function)

    assert nodes(microbatch_size=2) == nodes(microbatch_size=12)


@pytest.mark.parametrize("must_know", [False, True])
def test_one_trace_serves_all_sizes_unless_the_loss_must_know_them(must_know):
    w = tf.Variable(1.0)
    shapes = []

    def loss_fn(x):
        shapes.append(x.shape[0])
        assert x.shape[0] is not None or not must_know
        return tf.reduce_mean(w * x)

    compute = tf.function(
        lambda x: bigbatch.value_and_gradients(loss_fn, [w], (x,), microbatch_size=4)
    )
    compute(tf.ones([10]))
    assert shapes == ([None, 4, 2] if must_know else [None])


def test_updates_are_traced_once_in_a_run_of_full_and_short_windows():
    w = tf.Variable(1.0)
    traces = []

    class Counting(new_optimizers().SGD):
        def update_step(self, *args, **kwargs):
            traces.append(1)
            return super().update_step(*args, **kwargs)

    accumulator = bigbatch.GradientAccumulator(
        Counting(), [w], accumulation_steps=lambda updates: 1 + updates % 3
    )
    for _ in range(3):
        for _ in range(7):
            accumulator.accumulate([tf.constant(1.0)])
            accumulator.apply_when_full()
        accumulator.flush()
    assert len(traces) == 1


def test_python_control_flow_in_the_loss_is_converted_as_in_the_users_function():
    w = tf.Variable(2.0)

    def loss_fn(x):
        if tf.reduce_mean(x) > 1.5:  # a tensor: AutoGraph has to see it
            return tf.reduce_mean(w * x)
        return tf.reduce_mean(w * x * 10.0)

    x = tf.constant([1.0, 1.0, 2.0, 2.0])

    def compute(x):
        return bigbatch.value_and_gradients(loss_fn, [w], (x,), microbatch_size=2)

    for function in (compute, tf.function(compute)):
        _, (gradient,) = function(x)
        assert float(gradient) == (2 * 10.0 + 2 * 2.0) / 4


def test_eagerly_the_loss_is_plain_python():
    w = tf.Variable(2.0)
    seen = []

    def loss_fn(x):
        seen.append(x.numpy().tolist())
        return tf.reduce_mean(w * x)

    bigbatch.value_and_gradients(loss_fn, [w], (tf.range(5.0),), microbatch_size=2)
    assert seen == [[0.0, 1.0], [2.0, 3.0], [4.0]]
