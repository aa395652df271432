"""Promise 6: replicas communicate once per update, and not for each micro-batch."""

from __future__ import annotations

import collections

import tensorflow as tf

from replica_cases import SHARES, train_on_replicas, windows

from problems import dense_problem


def operations(function):
    """Count the kinds of operations in a traced function and all it calls."""
    graph = function.graph.as_graph_def()
    nodes = [*graph.node, *(n for body in graph.library.function for n in body.node_def)]
    return collections.Counter(node.op for node in nodes)


def communication(function):
    kinds = operations(function)
    return {
        op: n for op, n in kinds.items() if "Collective" in op or "Nccl" in op or op == "AddN"
    }


def communication_of_one_reduction(strategy):
    """TensorFlow's own: an operation on each replica, or one that adds all of them."""

    def replica_fn():
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([3]) * 2.0)

    reduce_once = tf.function(lambda: strategy.run(replica_fn))
    found = communication(reduce_once.get_concrete_function())
    assert found
    return found


def test_micro_batches_communicate_nothing_and_updates_reduce_once(mirrored):
    problem = dense_problem()
    _, _, accumulator, micro_batch = train_on_replicas(
        mirrored, problem, "adam", SHARES["even"]
    )
    x, y = next(windows(mirrored, problem, SHARES["even"]))
    assert communication(micro_batch.get_concrete_function(x, y)) == {}
    # Four variables and the weight: one packed reduction.
    kinds = (1, 1, 1, 1)
    update = tf.function(accumulator._update_and_open)
    update = update.get_concrete_function(kinds, tf.constant(2, tf.int64))
    assert communication(update) == communication_of_one_reduction(mirrored)


def test_the_count_of_reductions_can_fail(mirrored):
    problem = dense_problem()
    with mirrored.scope():
        model, _ = problem.build(lambda: None)

    def communication_with(reduce):
        def replica_fn(x, y):
            with tf.GradientTape() as tape:
                loss = problem.mean_loss(model, x, y)
            gradients = tape.gradient(loss, model.trainable_variables)
            context = tf.distribute.get_replica_context()
            return reduce(lambda g: context.all_reduce("SUM", g), gradients)

        function = tf.function(lambda x, y: mirrored.run(replica_fn, args=(x, y)))
        x, y = next(windows(mirrored, problem, SHARES["even"]))
        return communication(function.get_concrete_function(x, y))

    def packed(all_reduce, gradients):
        return all_reduce(tf.concat([tf.reshape(one, [-1]) for one in gradients], 0))

    def one_by_one(all_reduce, gradients):
        return [all_reduce(gradient) for gradient in gradients]

    one = communication_of_one_reduction(mirrored)
    assert communication_with(packed) == one
    assert communication_with(one_by_one) == {op: 4 * count for op, count in one.items()}
