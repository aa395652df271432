"""`accumulate`: `model.fit` with micro-batches equals `model.fit` with the full batch."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from bigbatch.errors import ArgumentError, ContextError
from fit_cases import CASES, DENSE_X, DENSE_Y, Case, dense

from problems import TOLERANCE, largest_difference


@pytest.fixture(params=["float64", "float32"])
def tolerance(request):
    def use(dtype):
        keras.config.set_floatx(dtype)
        keras.config.set_dtype_policy(dtype)

    use(request.param)
    yield TOLERANCE[request.param]
    use("float32")


def accumulated(microbatch_size=7, **options):
    return lambda model: bigbatch.accumulate(model, microbatch_size=microbatch_size, **options)


def check_same(result, expected, tolerance):
    (model, history), (reference, reference_history) = result, expected
    assert int(model.optimizer.iterations.numpy()) == int(
        reference.optimizer.iterations.numpy()
    )
    assert largest_difference(model, reference) <= tolerance
    assert history.keys() == reference_history.keys()
    for name, values in reference_history.items():
        np.testing.assert_allclose(history[name], values, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_full_batch(name, tolerance):
    check_same(CASES[name].train(accumulated()), CASES[name].train(), tolerance)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.loss])
def test_on_two_replicas_equals_the_full_batch_on_one_device(name, mirrored):
    expected = CASES[name].train(batch_size=21)
    with mirrored.scope():  # batches of 21 samples: 11 and 10, in micro-batches of 4
        result = CASES[name].train(accumulated(4), batch_size=21)
    check_same(result, expected, TOLERANCE["float32"])


OPTIONS = {
    "steps_per_execution": {"steps_per_execution": 2},
    "jit_compile": {"jit_compile": True},
    "run_eagerly": {"run_eagerly": True},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["regularised", "masked", "two outputs"])
def test_with_compile_options(name, option):
    case = CASES[name]
    case = Case(**{**vars(case), "compile": {**case.compile, **OPTIONS[option]}})
    check_same(case.train(accumulated()), case.train(), TOLERANCE["float32"])


def datasets():
    def dataset():
        return tf.data.Dataset.from_tensor_slices((DENSE_X, DENSE_Y)).batch(20)

    class Sequence(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            rows = slice(20 * index, 20 * index + 20)
            return DENSE_X[rows], DENSE_Y[rows]

    def generator():
        while True:
            for rows in (slice(0, 20), slice(20, 40), slice(40, 50)):
                yield DENSE_X[rows], DENSE_Y[rows]

    return {
        "tf.data": (dataset, {}),
        "endless tf.data": (lambda: dataset().repeat(), {"steps_per_epoch": 3}),
        "PyDataset": (Sequence, {}),
        "generator": (generator, {"steps_per_epoch": 3}),
    }


@pytest.mark.parametrize("name", datasets())
def test_every_way_to_feed_it(name):
    make_data, options = datasets()[name]

    def train(prepare):
        keras.utils.set_random_seed(3)
        model = prepare(dense())
        model.compile("adam", "mse", metrics=["mae"])
        history = model.fit(make_data(), epochs=2, shuffle=False, verbose=0, **options)
        return model, history.history

    check_same(train(accumulated()), train(lambda model: model), TOLERANCE["float32"])


def test_train_on_batch_and_validation():
    def train(prepare):
        keras.utils.set_random_seed(3)
        model = dense()
        model.compile("adam", "mse", metrics=["mae"])
        prepare(model)
        logs = [model.train_on_batch(DENSE_X[:n], DENSE_Y[:n]) for n in (50, 7, 33)]
        data = (DENSE_X[:30], DENSE_Y[:30])
        history = model.fit(DENSE_X, DENSE_Y, validation_data=data, verbose=0, shuffle=False)
        return model, {**history.history, "logs": np.array(logs)}

    check_same(train(accumulated()), train(lambda model: model), TOLERANCE["float32"])


@pytest.mark.parametrize("microbatch_size", [20, 21, 1000])
def test_a_micro_batch_that_holds_the_batch_is_plain_training_bit_for_bit(microbatch_size):
    case = CASES["regularised"]
    check_same(case.train(accumulated(microbatch_size)), case.train(), 0)


def test_restore_and_another_setting():
    model, _ = CASES["dense"].train(accumulated(3))
    assert bigbatch.accumulate(model, microbatch_size=5) is model
    assert bigbatch.restore(model) is model
    assert "make_train_function" not in vars(model)
    assert "_maybe_symbolic_build" not in vars(model)
    model.fit(DENSE_X, DENSE_Y, verbose=0)


def test_one_trace_serves_ragged_batches_and_epochs():
    traces = []

    class Counting(type(dense())):
        def train_step(self, data):
            traces.append(1)
            return super().train_step(data)

    keras.utils.set_random_seed(3)
    model = Counting([keras.Input((5,)), keras.layers.Dense(3)])
    model.compile("adam", "mse")
    bigbatch.accumulate(model, microbatch_size=7)
    for _ in range(2):
        model.fit(DENSE_X, DENSE_Y, batch_size=20, epochs=2, verbose=0)
    assert len(traces) == 1


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(policy):
    def make():
        hidden = keras.layers.Dense(8, "tanh", dtype=policy)
        return keras.Sequential([keras.Input((5,)), hidden, keras.layers.Dense(3)], name="m")

    def train(prepare):
        keras.config.set_dtype_policy(policy)
        try:
            return Case(make, fit={"epochs": 3}).train(prepare)
        finally:
            keras.config.set_dtype_policy("float32")

    # The gradients of a micro-batch are rounded to 16 bits, those of the batch once: with 11
    # bits of precision, or 8. A mean of means is off by 2e-2.
    result, expected = train(accumulated()), train(lambda model: model)
    if policy == "mixed_float16":
        assert isinstance(result[0].optimizer, keras.optimizers.LossScaleOptimizer)
    assert int(result[0].optimizer.iterations) == int(expected[0].optimizer.iterations)
    assert (
        largest_difference(result[0], expected[0])
        <= {"mixed_float16": 1e-5, "mixed_bfloat16": 1e-4}[policy]
    )


def batch_norm_model():
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.BatchNormalization(momentum=0.8),
            keras.layers.Dense(3),
        ]
    )


X = 5 + 3 * DENSE_X  # a mean that is not zero


def test_pooled_statistics_are_those_of_the_full_batch():
    case = Case(batch_norm_model, x=X, fit={"epochs": 4})
    (model, _), (expected, _) = case.train(accumulated()), case.train()
    norm, reference = model.layers[0], expected.layers[0]
    np.testing.assert_allclose(norm.moving_mean, reference.moving_mean, rtol=1e-6)
    np.testing.assert_allclose(norm.moving_variance, reference.moving_variance, rtol=1e-6)
    # Averaging the variances of the micro-batches, as others do, is not the same.
    micro = [np.var(X[start : start + 7], 0) for start in range(0, 20, 7)]
    assert np.max(np.abs(np.mean(micro, 0) / np.var(X[:20], 0) - 1)) > 1e-3


def test_pooled_statistics_on_two_replicas(mirrored):
    case = Case(batch_norm_model, x=X, fit={"epochs": 4})
    expected, _ = case.train(batch_size=21)
    with mirrored.scope():
        model, _ = case.train(accumulated(4), batch_size=21)
    for name in ("moving_mean", "moving_variance"):
        one, two = (getattr(m.layers[0], name).numpy() for m in (model, expected))
        np.testing.assert_allclose(one, two, rtol=2e-6)


def test_micro_batch_statistics_move_with_every_micro_batch():
    case = Case(batch_norm_model, x=X)
    (model, _), (expected, _) = case.train(accumulated(batch_norm="microbatch")), case.train()
    faster = np.abs(model.layers[0].moving_mean - 5) < np.abs(
        expected.layers[0].moving_mean - 5
    )
    assert np.all(faster)


def test_frozen_statistics_normalise_and_do_not_move():
    case = Case(batch_norm_model, x=X)
    model, _ = case.train(accumulated(batch_norm="frozen"))
    assert np.all(model.layers[0].moving_mean.numpy() == 0)

    def freeze(model):
        call = model.layers[0].call
        model.layers[0].call = lambda inputs, training=None, mask=None: call(
            inputs, False, mask
        )

    expected, _ = case.train(freeze)
    assert largest_difference(model, expected) <= TOLERANCE["float32"]


def test_sparse_gradients_stay_sparse(monkeypatch):
    seen = []
    update_step = keras.optimizers.SGD.update_step

    def spy(self, gradient, variable, learning_rate):
        seen.append(type(gradient).__name__)
        return update_step(self, gradient, variable, learning_rate)

    monkeypatch.setattr(keras.optimizers.SGD, "update_step", spy)
    model = keras.Sequential([keras.Input((4,), dtype="int32"), keras.layers.Embedding(9, 2)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    bigbatch.accumulate(model, microbatch_size=3)
    model.fit(np.ones((8, 4), "int32"), np.ones((8, 4, 2)), verbose=0)
    assert seen == ["IndexedSlices"]


def test_the_saved_model_is_the_plain_model(tmp_path):
    model, _ = CASES["dense"].train(accumulated())
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert not {"make_train_function", "_maybe_symbolic_build"} & set(vars(loaded))
    assert largest_difference(loaded, model) == 0
    plain, _ = CASES["dense"].train()
    for one in (loaded, plain):
        bigbatch.accumulate(one, microbatch_size=6)
        one.fit(DENSE_X, DENSE_Y, batch_size=20, shuffle=False, verbose=0)
    assert largest_difference(loaded, plain) <= TOLERANCE["float32"]


def test_reductions_on_two_replicas(mirrored):
    with mirrored.scope():
        model = dense()
        model.compile("adam", "mse", metrics=["mae"])
    engine_data = tf.data.Dataset.from_tensor_slices((DENSE_X, DENSE_Y)).batch(20)
    bigbatch.accumulate(model, microbatch_size=4)
    model.fit(engine_data, shuffle=False, verbose=0)
    iterator = iter(mirrored.experimental_distribute_dataset(engine_data))
    (compiled,) = (
        cell.cell_contents
        for cell in model.train_function.__closure__
        if getattr(cell.cell_contents, "__name__", "") == "on_iterator"
    )
    graph = compiled.get_concrete_function(iterator).graph.as_graph_def()
    nodes = [*graph.node, *(n for body in graph.library.function for n in body.node_def)]
    collectives = [node.op for node in nodes if "Collective" in node.op]
    assert collectives == ["CollectiveReduceV2"] * mirrored.num_replicas_in_sync


class Twice(keras.Sequential):
    def train_step(self, data):
        super().train_step(data)
        return super().train_step(data)


class Never(keras.Sequential):
    def train_step(self, data):
        return {"loss": tf.reduce_mean(self(data[0]))}


@pytest.mark.parametrize(("kind", "text"), [(Twice, "twice"), (Never, "no gradients")])
def test_a_train_step_that_applies_twice_or_never(kind, text):
    model = kind([keras.Input((5,)), keras.layers.Dense(3)])
    model.compile("adam", "mse")
    bigbatch.accumulate(model, microbatch_size=3)
    before = model.get_weights()
    with pytest.raises(ContextError, match=text):
        model.fit(DENSE_X, DENSE_Y, verbose=0)
    assert all(np.array_equal(*pair) for pair in zip(before, model.get_weights()))
    assert "apply" not in vars(model.optimizer)


def test_bad_arguments():
    model = dense()
    for arguments in ({"microbatch_size": 0}, {"microbatch_size": 4, "batch_norm": "synced"}):
        with pytest.raises(ArgumentError, match="Expected: "):
            bigbatch.accumulate(model, **arguments)
    for function in (lambda m: bigbatch.accumulate(m, microbatch_size=4), bigbatch.restore):
        with pytest.raises(ArgumentError, match="a Keras 3 model"):
            function("model")
    assert "make_train_function" not in vars(model)


def test_an_optimizer_that_accumulates_itself():
    model = bigbatch.accumulate(dense(), microbatch_size=4)
    model.compile(keras.optimizers.SGD(gradient_accumulation_steps=2), "mse")
    with pytest.raises(ArgumentError, match="remove gradient_accumulation_steps"):
        model.fit(DENSE_X, DENSE_Y, verbose=0)
