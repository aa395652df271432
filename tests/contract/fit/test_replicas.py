"""Many devices in `fit`: one reduction per update, exact whatever each replica holds.

That the result is that of one device is part of the other contracts.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from comparison import check_same
from fit_cases import CASES, DENSE_X, DENSE_Y, MODES, TOKEN_Y, TOKENS, Case

from problems import TOLERANCE
from stack import keras, native


def collectives(function, *arguments):
    """Return the collective operations in a function and in all that it calls."""
    graph = function.get_concrete_function(*arguments).graph.as_graph_def()
    nodes = [*graph.node, *(n for body in graph.library.function for n in body.node_def)]
    return [node.op for node in nodes if "Collective" in node.op]


@pytest.fixture
def collective(mirrored):
    """A strategy whose reductions are operations that can be counted."""
    one = tf.function(lambda: mirrored.reduce("SUM", mirrored.run(lambda: tf.ones([2])), None))
    if not collectives(one):
        pytest.skip("MirroredStrategy of this TensorFlow reduces CPUs by plain additions")
    return mirrored


def engine_after_fit(case, setting, size, strategy):
    data = tf.data.Dataset.from_tensor_slices((case.x, case.y)).batch(size)
    with strategy.scope():
        model = case.make_model()
        model.compile(case.optimizer(), case.loss(), **case.compile)
    bigbatch.accumulate(model, **setting)
    model.fit(data, shuffle=False, verbose=0)
    return vars(model)["_bigbatch_hooks"].engine, iter(
        strategy.experimental_distribute_dataset(data)
    )


ONE_REDUCTION = ["dense", "own tracker", "masked"]  # plain; two logged losses; masks


@pytest.mark.parametrize("name", ONE_REDUCTION)
def test_one_reduction_per_update_in_split_mode(name, collective):
    engine, iterator = engine_after_fit(CASES[name], *MODES["split"], collective)
    found = [
        one for one in collectives(engine._on_iterator, iterator, 1) if "Gather" not in one
    ]
    assert found == ["CollectiveReduceV2"] * collective.num_replicas_in_sync


@pytest.mark.parametrize("name", ONE_REDUCTION)
def test_one_reduction_per_update_in_window_mode(name, collective):
    engine, iterator = engine_after_fit(CASES[name], *MODES["window"], collective)
    for is_first in (True, False):
        micro_batch = (iterator, 1, tf.constant(3, tf.float64), is_first)
        assert collectives(engine._add_next, *micro_batch) == []
    found = [one for one in collectives(engine._update) if "Gather" not in one]
    assert found == ["CollectiveReduceV2"] * collective.num_replicas_in_sync


def test_terms_with_different_masks_need_one_more_of_a_few_numbers(collective):
    """Each divides by another number, and gradients of all of them are in one sum."""
    engine, _ = engine_after_fit(CASES["two outputs"], *MODES["window"], collective)
    for function in (engine._update, engine._open_held):  # sparse rows are gathered
        found = [one for one in collectives(function) if "Reduce" in one]
        assert found == ["CollectiveReduceV2"] * collective.num_replicas_in_sync


@pytest.mark.sampled(2)
@pytest.mark.parametrize("masked_samples", [slice(0, 7), slice(0, None)], ids=["some", "all"])
def test_regularisers_count_where_all_is_masked(masked_samples, mode, mirrored):
    """One micro-batch, or all of them, have no elements to be divided by."""
    tokens = TOKENS.copy()
    tokens[masked_samples] = 0

    def make():
        return keras.Sequential(
            [
                keras.Input((7,)),
                keras.layers.Embedding(6, 4, mask_zero=True, embeddings_regularizer="l2"),
                keras.layers.Dense(2, kernel_regularizer="l2"),
            ]
        )

    case = Case(make, tokens, TOKEN_Y)
    expected = case.train()
    with mirrored.scope():
        result = case.accumulate(mode)
    check_same(result, expected, TOLERANCE["float32"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["dense", "masked", "own train_step"])
def test_replicas_without_samples(name, mode, mirrored):
    """The last micro-batch has one sample: the second replica has none."""
    case = CASES[name]
    expected = case.train(batch_size=49)
    with mirrored.scope():
        if mode == "split":
            result = case.train(
                lambda m: bigbatch.accumulate(m, microbatch_size=9), batch_size=49
            )
        else:
            result = case.accumulate(mode, {"accumulation_steps": 7}, batch_size=7)
    check_same(result, expected, TOLERANCE["float32"])


def test_both_replicas_hold_the_same_model(mode, mirrored):
    def make():
        return keras.Sequential(
            [keras.Input((5,)), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
        )

    with mirrored.scope():
        model = make()
        model.compile("adam", "mse")
        setting, size = MODES[mode]
        bigbatch.accumulate(model, **setting)
        model.fit(DENSE_X, DENSE_Y, batch_size=size, verbose=0)
    for weight in model.weights:
        one, two = mirrored.experimental_local_results(native(weight))
        assert np.array_equal(one.numpy(), two.numpy()), weight.name
