"""Promise 6: one reduction per update, exact when replicas hold different amounts."""

from __future__ import annotations

import collections
import contextlib

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from bigbatch.errors import ContextError
from bigbatch.tf import v1_optimizers

from problems import (
    TOLERANCE,
    dense_problem,
    embedding_problem,
    largest_difference,
    optimizers,
    train_full_batch,
    updates_of,
    variables_for,
)
from stack import (
    HAS_LEGACY,
    IS_KERAS_3,
    build,
    gradients_for,
    keras,
    loss_scale,
    new_optimizers,
    with_loss_scale,
)

# Samples of each replica in each micro-batch of a window; all windows hold 24 samples.
SHARES = {
    "even": [(6, 6), (6, 6)],
    "uneven": [(1, 9), (11, 3)],
    "one replica has none": [(10, 0), (0, 8), (6, 0)],
}
UPDATES = 3


def local_mean(problem, model, x, y):
    """Return the mean over this replica's samples: 0/0 where it has none."""
    samples = tf.cast(tf.shape(x)[0], problem.dtype)
    return tf.reduce_sum(problem.per_sample(model, x, y)) / samples, samples


def keras_loss(problem, model, x, y):
    # A Keras loss divides by the number of replicas.
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    loss = keras.losses.MeanSquaredError(dtype=problem.dtype)(y, model(x, training=True))
    return loss * replicas, tf.shape(x)[0]


def compute_average_loss(problem, model, x, y):
    context = tf.distribute.get_replica_context()
    replicas = context.num_replicas_in_sync
    n = context.all_reduce("sum", tf.shape(x)[0])  # the samples of all replicas
    per_sample = problem.per_sample(model, x, y)
    loss = tf.nn.compute_average_loss(per_sample, global_batch_size=n)
    return loss * replicas, n / replicas


def on_each_replica(strategy, values):
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(values[context.replica_id_in_sync_group])
    )


def windows(strategy, problem, shares):
    """Yield the micro-batches of a window, distributed over the replicas."""
    start = 0
    for first, second in shares:
        middle, end = start + first, start + first + second
        yield tuple(
            on_each_replica(strategy, [data[start:middle], data[middle:end]])
            for data in (problem.x, problem.y)
        )
        start = end
    assert start == len(problem.x)


def train(strategy, problem, optimizer, shares, loss=local_mean, in_scope=False, steps=None):
    with strategy.scope():
        model, optimizer = problem.build(optimizers()[optimizer])
        variables = variables_for(optimizer, model)
        accumulator = bigbatch.GradientAccumulator(
            optimizer, variables, accumulation_steps=steps or len(shares)
        )

    def replica_fn(x, y):
        with tf.GradientTape() as tape:
            value, weight = loss(problem, model, x, y)
        accumulator.accumulate(tape.gradient(value, variables), weight=weight)

    @tf.function(reduce_retracing=True)
    def micro_batch(x, y):
        strategy.run(replica_fn, args=(x, y))

    with strategy.scope() if in_scope else contextlib.nullcontext():
        for _ in range(UPDATES):
            for x, y in windows(strategy, problem, shares):
                micro_batch(x, y)
                accumulator.apply_when_full()
    return model, optimizer, accumulator, micro_batch


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("optimizer", optimizers())
@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("make_problem", [dense_problem, embedding_problem])
def test_equals_one_device_and_the_full_batch(mirrored, make_problem, shares, optimizer, dtype):
    problem = make_problem(dtype)
    expected = train_full_batch(problem, optimizers()[optimizer], UPDATES)
    model, optimizer, _, _ = train(mirrored, problem, optimizer, SHARES[shares])
    assert updates_of(optimizer, UPDATES) == UPDATES
    assert largest_difference(model, expected) <= TOLERANCE[dtype]


no_keras_loss = pytest.mark.skipif(
    not IS_KERAS_3, reason="Keras 2 refuses a loss object that takes a mean on a replica"
)


@pytest.mark.parametrize(
    "loss", [local_mean, pytest.param(keras_loss, marks=no_keras_loss), compute_average_loss]
)
@pytest.mark.parametrize("shares", ["even", "uneven"])
def test_each_way_of_computing_the_loss(mirrored, shares, loss):
    problem = dense_problem()
    expected = train_full_batch(problem, optimizers()["adam"], UPDATES)
    model, *_ = train(mirrored, problem, "adam", SHARES[shares], loss)
    assert largest_difference(model, expected) <= TOLERANCE["float64"]


def test_updates_may_be_made_inside_the_scope(mirrored):
    problem = dense_problem()
    expected = train_full_batch(problem, optimizers()["adam"], UPDATES)
    model, *_ = train(mirrored, problem, "adam", SHARES["uneven"], in_scope=True)
    assert largest_difference(model, expected) <= TOLERANCE["float64"]


@pytest.mark.parametrize("optimizer", [n for n in optimizers() if "adam" in n])
def test_updates_may_be_made_in_the_graph_around_strategy_run(mirrored, optimizer):
    problem, shares = embedding_problem(), SHARES["uneven"]
    expected = train_full_batch(problem, optimizers()[optimizer], UPDATES)
    with mirrored.scope():
        model, optimizer = problem.build(optimizers()[optimizer])
        variables = variables_for(optimizer, model)
        accumulator = bigbatch.GradientAccumulator(
            optimizer, variables, accumulation_steps=len(shares)
        )

    def replica_fn(x, y):
        with tf.GradientTape() as tape:
            value, weight = local_mean(problem, model, x, y)
        accumulator.accumulate(tape.gradient(value, variables), weight=weight)

    @tf.function(reduce_retracing=True)
    def micro_batch(x, y):
        mirrored.run(replica_fn, args=(x, y))
        return accumulator.apply_when_full()

    for _ in range(UPDATES):
        updated = [bool(micro_batch(x, y)) for x, y in windows(mirrored, problem, shares)]
        assert updated == [False, True]
    assert largest_difference(model, expected) <= TOLERANCE["float64"]


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("form", ["mean", "sum and weight"])
@pytest.mark.parametrize("make_problem", [dense_problem, embedding_problem])
def test_value_and_gradients_sum_to_the_global_gradient(mirrored, make_problem, form, shares):
    problem = make_problem()
    # No clipping here: in replica context Keras clips each replica's part by itself.
    make_optimizer = lambda: keras.optimizers.Adam(0.05)  # noqa: E731
    with mirrored.scope():
        model, optimizer = problem.build(make_optimizer)
        variables = model.trainable_variables
        build(optimizer, variables)

    def loss_fn(x, y):
        per_sample = problem.per_sample(model, x, y)
        if form == "mean":
            return tf.reduce_mean(per_sample)
        return tf.reduce_sum(per_sample), tf.shape(x)[0]

    def replica_fn(x, y):
        loss, gradients = bigbatch.value_and_gradients(
            loss_fn, variables, (x, y), microbatch_size=4
        )
        optimizer.apply_gradients(zip(gradients, variables))
        return loss

    @tf.function(reduce_retracing=True)
    def update(x, y):
        return mirrored.reduce("SUM", mirrored.run(replica_fn, args=(x, y)), axis=None)

    whole = [sum(share) for share in zip(*SHARES[shares])]
    x, y = (
        on_each_replica(mirrored, [data[: whole[0]], data[whole[0] :]])
        for data in (problem.x, problem.y)
    )
    reference, _ = problem.build(make_optimizer)
    expected_loss = problem.mean_loss(reference, problem.x, problem.y)
    assert abs(float(update(x, y) - expected_loss)) <= 1e-12
    for _ in range(UPDATES - 1):
        update(x, y)
    expected = train_full_batch(problem, make_optimizer, UPDATES)
    assert largest_difference(model, expected) <= TOLERANCE["float64"]


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
    _, _, accumulator, micro_batch = train(mirrored, problem, "adam", SHARES["even"])
    x, y = next(windows(mirrored, problem, SHARES["even"]))
    assert communication(micro_batch.get_concrete_function(x, y)) == {}
    # Four variables and the weight: one packed reduction.
    kinds = (1, 1, 1, 1)
    update = tf.function(accumulator._update).get_concrete_function(kinds)
    assert communication(update) == communication_of_one_reduction(mirrored)


def test_the_count_of_reductions_can_fail(mirrored):
    problem = dense_problem()
    with mirrored.scope():
        model, _ = problem.build(lambda: None)

    def replica_fn(x, y):
        with tf.GradientTape() as tape:
            loss = problem.mean_loss(model, x, y)
        gradients = tape.gradient(loss, model.trainable_variables)
        return [tf.distribute.get_replica_context().all_reduce("SUM", g) for g in gradients]

    reduce_each = tf.function(lambda x, y: mirrored.run(replica_fn, args=(x, y)))
    x, y = next(windows(mirrored, problem, SHARES["even"]))
    found = communication(reduce_each.get_concrete_function(x, y))
    one = communication_of_one_reduction(mirrored)
    assert found == {op: 4 * count for op, count in one.items()}


@pytest.mark.parametrize("kind", ["v1", "new", "legacy"] if HAS_LEGACY else ["v1"])
def test_no_optimizer_sums_gradients_that_are_sums(mirrored, kind, monkeypatch):
    make = {
        "v1": lambda: tf.compat.v1.train.GradientDescentOptimizer(1.0),
        "new": lambda: new_optimizers().SGD(1.0),
        "legacy": lambda: keras.optimizers.legacy.SGD(1.0),
    }[kind]

    def update():
        with mirrored.scope():
            w = tf.Variable(0.0)
            accumulator = bigbatch.GradientAccumulator(make(), [w])
        tf.function(lambda: mirrored.run(lambda: accumulator.accumulate([tf.constant(1.0)])))()
        accumulator.flush()
        return [float(replica) for replica in mirrored.experimental_local_results(w)]

    assert update() == [-1.0, -1.0]
    if kind == "v1":  # those of Keras 2 fail, or have it right, if they are not told
        whole = lambda variable, gradient, share: gradient * 1.0  # noqa: E731
        monkeypatch.setattr(v1_optimizers, "as_gradient_of", whole)
        assert update() == [-2.0, -2.0]


@pytest.mark.parametrize("kind", ["new", "legacy"] if HAS_LEGACY else ["new"])
@pytest.mark.parametrize("bad_replica", [0, 1])
def test_not_finite_on_any_replica_skips_the_update_everywhere(mirrored, bad_replica, kind):
    with mirrored.scope():
        w = tf.Variable([1.0, 2.0])
        module = new_optimizers() if kind == "new" else keras.optimizers.legacy
        optimizer = with_loss_scale(module.SGD(1.0), initial_scale=8.0)
        accumulator = bigbatch.GradientAccumulator(optimizer, [w], accumulation_steps=1)

    def replica_fn(factor):
        accumulator.accumulate(gradients_for(optimizer, lambda: tf.reduce_sum(w * factor), [w]))

    @tf.function
    def micro_batch(factor):
        mirrored.run(replica_fn, args=(factor,))

    factors = [1.0, 1.0]
    factors[bad_replica] = float("inf")
    micro_batch(on_each_replica(mirrored, factors))
    accumulator.apply_when_full()
    np.testing.assert_array_equal(w.numpy(), [1.0, 2.0])
    assert loss_scale(optimizer) == 4.0
    micro_batch(on_each_replica(mirrored, [1.0, 3.0]))
    accumulator.apply_when_full()
    for replica in mirrored.experimental_local_results(w):
        np.testing.assert_allclose(replica, [-1.0, 0.0])


@pytest.mark.parametrize("make_problem", [dense_problem, embedding_problem])
def test_checkpoint_in_the_middle_of_a_window(mirrored, make_problem, tmp_path):
    problem, shares = make_problem(), SHARES["uneven"]
    with mirrored.scope():
        model, optimizer = problem.build(optimizers()["sgd"])
        variables = model.trainable_variables
        saved = bigbatch.GradientAccumulator(optimizer, variables)
        restored = bigbatch.GradientAccumulator(optimizer, variables)
    accumulators = {"saved": saved, "restored": restored}

    def replica_fn(name, x, y):
        with tf.GradientTape() as tape:
            value, weight = local_mean(problem, model, x, y)
        accumulators[name].accumulate(tape.gradient(value, variables), weight=weight)

    @tf.function(reduce_retracing=True)
    def micro_batch(name, x, y):
        mirrored.run(replica_fn, args=(name, x, y))

    first, second = windows(mirrored, problem, shares)
    micro_batch("saved", *first)
    path = tf.train.Checkpoint(accumulator=saved).save(tmp_path / "checkpoint")
    tf.train.Checkpoint(accumulator=restored).restore(path).assert_consumed()
    assert int(restored.step) == 1
    assert float(restored.total_weight) == sum(shares[0])
    micro_batch("restored", *second)
    assert restored.flush() is True
    expected = train_full_batch(problem, optimizers()["sgd"], 1)
    assert largest_difference(model, expected) <= TOLERANCE["float64"]


def test_what_only_one_replica_has_is_not_lost(mirrored):
    with mirrored.scope():
        a, b = tf.Variable(0.0), tf.Variable(0.0)
        accumulator = bigbatch.GradientAccumulator(keras.optimizers.SGD(1.0), [a, b])

    @tf.function
    def micro_batch(first_takes_part):
        def replica_fn():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            if tf.get_static_value(replica) == 1:
                accumulator.accumulate([tf.constant(1.0), tf.constant(1.0)])
            elif first_takes_part:
                accumulator.accumulate([tf.constant(1.0), None])

        mirrored.run(replica_fn)

    micro_batch(tf.constant(True))
    assert accumulator.flush() is True
    np.testing.assert_allclose([a.numpy(), b.numpy()], [-1.0, -0.5])
    micro_batch(tf.constant(False))
    assert int(accumulator.step) == 1
    assert accumulator.flush() is True
    np.testing.assert_allclose([a.numpy(), b.numpy()], [-2.0, -1.5])


@no_keras_loss
def test_a_keras_loss_in_value_and_gradients_is_multiplied_by_the_replicas(mirrored):
    problem = dense_problem()
    with mirrored.scope():
        model, _ = problem.build(lambda: None)
    loss_object = keras.losses.MeanSquaredError(dtype=problem.dtype)

    def replica_fn(x, y):
        return bigbatch.value_and_gradients(
            lambda x, y: loss_object(y, model(x)) * mirrored.num_replicas_in_sync,
            model.trainable_variables,
            (x, y),
            microbatch_size=4,
        )[0]

    run = tf.function(lambda x, y: mirrored.run(replica_fn, args=(x, y)))
    x, y = (on_each_replica(mirrored, [d[:7], d[7:]]) for d in (problem.x, problem.y))
    loss = mirrored.reduce("SUM", run(x, y), axis=None)
    expected = problem.mean_loss(model, problem.x, problem.y)
    assert abs(float(loss - expected)) <= 1e-12


def test_a_graph_refuses_gradients_it_could_not_foresee_on_several_replicas(mirrored):
    with mirrored.scope():
        w = tf.Variable(0.0)
        accumulator = bigbatch.GradientAccumulator(keras.optimizers.SGD(1.0), [w])
    flush = tf.function(accumulator.flush)
    assert not flush()
    tf.function(lambda: mirrored.run(lambda: accumulator.accumulate([tf.constant(1.0)])))()
    with pytest.raises(tf.errors.InvalidArgumentError, match="had none when this"):
        flush()
    assert accumulator.flush() is True  # nothing is lost
    assert float(w.numpy()) == -1.0


def test_compiled_micro_batches_with_other_numbers_of_rows_on_each_replica(mirrored):
    with mirrored.scope():
        table = tf.Variable(tf.zeros([5, 2]))
        accumulator = bigbatch.GradientAccumulator(
            keras.optimizers.SGD(1.0), [table], accumulation_steps=2
        )
    indices = [[0, 1], [2, 3, 4]]

    def compiled():
        @tf.function(jit_compile=True)
        def micro_batch(indices):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, indices))
            accumulator.accumulate(tape.gradient(loss, [table]))

        return micro_batch

    functions = [compiled(), compiled()]

    @tf.function(autograph=False)
    def micro_batch():
        def replica_fn():
            context = tf.distribute.get_replica_context()
            replica = tf.get_static_value(context.replica_id_in_sync_group)
            functions[replica](tf.constant(indices[replica]))

        mirrored.run(replica_fn)

    updated = []
    for _ in range(4):
        micro_batch()
        updated.append(accumulator.apply_when_full())
    assert updated == [False, True] * 2
    np.testing.assert_allclose(table.numpy(), np.full([5, 2], -1.0))


@pytest.mark.parametrize("call", ["apply_when_full", "flush", "reset"])
def test_updates_inside_strategy_run_are_refused(mirrored, call):
    with mirrored.scope():
        w = tf.Variable(1.0)
        accumulator = bigbatch.GradientAccumulator(keras.optimizers.SGD(), [w])
    with pytest.raises(ContextError, match=rf"{call}\(\) outside strategy.run"):
        mirrored.run(getattr(accumulator, call))


@pytest.mark.parametrize("name", ["gradients", "total_weight"])
def test_global_values_inside_strategy_run_are_refused(mirrored, name):
    with mirrored.scope():
        accumulator = bigbatch.GradientAccumulator(keras.optimizers.SGD(), [tf.Variable(1.0)])
    with pytest.raises(ContextError, match=f"{name} outside strategy.run"):
        mirrored.run(lambda: getattr(accumulator, name))


@pytest.mark.parametrize("in_scope", [False, True])
def test_accumulate_outside_strategy_run_is_refused(mirrored, in_scope):
    with mirrored.scope():
        w = tf.Variable(1.0)
        accumulator = bigbatch.GradientAccumulator(keras.optimizers.SGD(), [w])
    with mirrored.scope() if in_scope else contextlib.nullcontext():
        with pytest.raises(ContextError, match="inside strategy"):
            accumulator.accumulate([tf.constant(1.0)])
        assert int(accumulator.step) == 0


def test_an_accumulator_built_outside_the_scope_is_refused(mirrored):
    accumulator = bigbatch.GradientAccumulator(keras.optimizers.SGD(), [tf.Variable(1.0)])
    with pytest.raises(ContextError, match=r"with strategy.scope\(\)"):
        mirrored.run(lambda: accumulator.accumulate([tf.constant(1.0)]))


def test_one_device_strategy():
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    problem = dense_problem()
    expected = train_full_batch(problem, optimizers()["adam"], UPDATES)
    with strategy.scope():
        model, optimizer = problem.build(optimizers()["adam"])
        accumulator = bigbatch.GradientAccumulator(optimizer, model.trainable_variables)

    @tf.function
    def micro_batch(x, y):
        def replica_fn(x, y):
            with tf.GradientTape() as tape:
                loss = problem.mean_loss(model, x, y)
            gradients = tape.gradient(loss, model.trainable_variables)
            accumulator.accumulate(gradients, weight=tf.shape(x)[0])

        strategy.run(replica_fn, args=(x, y))

    for _ in range(UPDATES):
        for rows in (slice(0, 10), slice(10, 24)):
            micro_batch(tf.constant(problem.x[rows]), tf.constant(problem.y[rows]))
        accumulator.flush()
    assert largest_difference(model, expected) <= TOLERANCE["float64"]
