"""Running out of memory, really: in other processes, whose allocator has a hard limit."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
import bigbatch.loops.auto_size
import comparison
from bigbatch.core.size_search import ChosenSize
from bigbatch.engine.auto_size import AutoSlices
from bigbatch.errors import ContextError
from comparison import paired
from coupled_cases import COUPLED_CASES
from fit_cases import CASES, DENSE_X, DENSE_Y, dense

from problems import TOLERANCE
from stack import IS_KERAS_3, keras

pytestmark = pytest.mark.usefixtures("repeatable")
AUTO = {"microbatch_size": "auto"}


@functools.lru_cache(None)
def probe(scenario: str, setting: str, limit: int | None = None) -> dict:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    if limit is not None:
        environment["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(limit)
    program = str(Path(__file__).with_name("out_of_memory_probe.py"))
    run = [sys.executable, program, scenario, setting]
    done = subprocess.run(
        run, capture_output=True, check=True, text=True, timeout=600, env=environment
    )
    return json.loads(done.stdout.splitlines()[-1])


def check_same(result, expected, updates):
    # Plain Keras counts the end of a data set of unknown length as one more.
    assert result["updates"] == updates
    np.testing.assert_allclose(result["loss"], expected["loss"], rtol=TOLERANCE["float32"])
    for one, other in paired(result["weights"], expected["weights"]):
        np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE["float32"])


@pytest.mark.slow
@pytest.mark.matrix  # takes a minute, as does the demo, of which CI tests the same
def test_a_batch_that_does_not_fit_trains_with_auto():
    expected = probe("convolutional", "null")
    died = probe("convolutional", "null", 100)
    assert died["error"] == "ResourceExhaustedError"
    result = probe("convolutional", json.dumps(AUTO), 100)
    assert 1 < result["size"] < 512
    check_same(result, expected, 3)


def fits(scenario, size, limit):
    return "updates" in probe(scenario, f'{{"microbatch_size": {size}}}', limit)


@pytest.mark.slow
@pytest.mark.matrix  # takes minutes: an allocator waits for seconds before it gives up
@pytest.mark.parametrize(("scenario", "limit"), [("perceptron", 20), ("convolutional", 100)])
def test_auto_is_within_a_quarter_of_the_largest_that_really_fits(scenario, limit):
    """Each size that is tried here trains in a process of its own."""
    size = probe(scenario, json.dumps(AUTO), limit)["size"]
    largest, too_large = round(0.75 * size), 512
    assert fits(scenario, largest, limit)
    assert not fits(scenario, too_large, limit)
    while too_large - largest > 0.1 * largest:
        middle = (largest + too_large) // 2
        if fits(scenario, middle, limit):
            largest = middle
        else:
            too_large = middle
    assert 0.75 * largest <= size


@pytest.mark.slow
@pytest.mark.skipif(not IS_KERAS_3, reason="verify is for Keras 3")
def test_what_is_verified_if_the_full_batch_does_not_fit():
    result = probe("verified", '{"microbatch_size": 300}', 20)
    assert result["ok"]
    assert 0 < result["samples"] < 512
    # Or the full batch would be compared with itself.
    assert result["microbatch_size"] <= result["samples"] // 2
    assert any("does not fit the device" in note for note in result["notes"])
    assert result["accumulated"]["peak"] < result["full"]["peak"] <= 20 * 2**20


@pytest.mark.slow
def test_trials_and_the_check_fit_where_only_a_micro_batch_fits():
    size = {"microbatch_size": 64}
    bare = probe("perceptron", json.dumps({**size, "check": "off", "coupled": False}), 200)
    limit = -(-bare["peak"] // 2**20)
    assert not fits("perceptron", 512, limit)
    found = probe("perceptron", json.dumps({**size, "check": "raise"}), limit)
    check_same(found, bare, 3)
    # But for one activation, that is there or not yet when another goes.
    assert found["peak"] <= bare["peak"] + 64 * 64 * 64 * 4


@pytest.mark.slow
@pytest.mark.matrix
def test_a_number_is_obeyed_and_its_failure_suggests_one_that_fits():
    larger = probe("perceptron", '{"microbatch_size": 512}', 20)
    assert "out of memory" in larger["message"]
    assert 'microbatch_size="auto"' in larger["message"]
    (suggested,) = re.findall(r"about (\d+) would fit", larger["message"])
    assert fits("perceptron", int(suggested), 20)


@pytest.mark.slow
@pytest.mark.matrix  # takes a minute; what it shows is tested without a limit, too
def test_a_longer_batch_later_is_run_again_with_smaller_micro_batches():
    expected = probe("longer_later", "null")
    assert probe("longer_later", "null", 60)["error"] == "ResourceExhaustedError"
    result = probe("longer_later", json.dumps(AUTO), 60)
    assert result["messages"]
    assert result["size"] < 64
    check_same(result, expected, 4)


@pytest.mark.slow
@pytest.mark.matrix  # not in CI: oneDNN sometimes crashes when memory runs out
@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 has no exact batch normalisation")
def test_less_is_stored_between_stages_where_memory_runs_out():
    setting = json.dumps({"microbatch_size": 16, "batch_norm": "exact"})
    expected, found = probe("normalised", setting), probe("normalised", setting, 22)
    check_same(found, expected, 2)
    assert not expected["messages"]
    assert any("less stored between" in one for one in found["messages"])


@pytest.mark.slow
@pytest.mark.matrix
def test_with_memory_enough_auto_is_the_whole_batch():
    result = probe("convolutional", json.dumps(AUTO))
    assert result["size"] == 512
    check_same(result, probe("convolutional", "null"), 3)


@pytest.mark.slow
@pytest.mark.matrix
def test_when_one_sample_does_not_fit_an_error_says_how_much_is_missing():
    result = probe("too_large", json.dumps(AUTO), 60)
    assert result["error"] == "ContextError"
    assert "one sample" in result["message"]
    assert "60.0 MiB" in result["message"]
    (missing,) = re.findall(r"about ([\d.]+) MiB are missing", result["message"])
    # One tensor of 60,000 × 128 numbers fits, and is 29 MiB; the next does not.
    assert 1 < float(missing) < 30


@pytest.mark.slow
@pytest.mark.matrix
def test_a_loop_without_fit_trains_with_auto():
    result = probe("loop", json.dumps(AUTO), 100)
    assert 1 < result["size"] < 512
    check_same(result, probe("loop", "null"), 2)


def loop_problem():
    """A loss that draws random numbers and changes a variable."""
    w, calls = tf.Variable([1.0, 2.0]), tf.Variable(0)
    seeds = keras.random.SeedGenerator(3)
    faults = [0]

    def count():
        faults[0] -= 1
        if faults[0] == 0:
            raise MemoryError("injected")

    def loss_fn(x):
        calls.assign_add(1)
        with tf.control_dependencies([tf.py_function(count, [], [])]):
            noise = keras.random.normal([2], seed=seeds)
        return tf.reduce_mean(x @ tf.reshape(w + noise, [2, 1]))

    return loss_fn, w, calls, seeds, faults


@pytest.mark.parametrize("fault", [1, 2, 3])
@pytest.mark.skipif(not IS_KERAS_3, reason="it draws with keras.random")
def test_a_loop_begins_again_as_if_nothing_had_happened(fault, monkeypatch):
    """At every micro-batch of 8 + 8 + 1 samples; then with 4 + 4 + 4 + 4 + 1."""
    x = tf.random.stateless_normal([17, 2], [0, 1])
    results = []
    for first, broken in ((8, fault), (4, 0)):
        loss_fn, w, calls, seeds, faults = loop_problem()
        choose = lambda *_, first=first: ChosenSize(first, 0, None)  # noqa: E731
        monkeypatch.setattr(bigbatch.loops.auto_size, "largest_that_fits", choose)
        faults[0] = broken
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss, (gradient,) = bigbatch.value_and_gradients(loss_fn, [w], (x,), **AUTO)
        assert len(caught) == bool(broken)
        assert bigbatch.microbatch_size(loss_fn) == 4
        state = seeds.state.numpy().tolist()
        results.append((float(loss), gradient.numpy().tolist(), int(calls), state))
    assert results[0] == results[1]


def test_a_loop_on_a_device_with_memory_takes_the_whole_batch_and_is_traced_once():
    w, traces = tf.Variable(2.0), []

    def loss_fn(x):
        traces.append(x.shape)
        return tf.reduce_mean(w * x)

    for count in (6, 4, 9):
        x = tf.range(float(count))
        loss, gradients = bigbatch.value_and_gradients(loss_fn, {"w": w}, (x,), **AUTO)
        assert float(loss) == pytest.approx(count - 1)
        assert float(gradients["w"]) == pytest.approx((count - 1) / 2)
    assert bigbatch.microbatch_size(loss_fn) == 6  # of the first batch
    assert len(traces) == 1


def test_a_loop_with_another_forward_pass_is_another_loop():
    w, x = tf.Variable(2.0), tf.constant([1.0, 2.0, 3.0])

    def loss_fn(outputs, x):
        return tf.reduce_mean(outputs)

    for factor in (1.0, 10.0):
        forward = lambda x, factor=factor: factor * w * x  # noqa: E731
        loss, _ = bigbatch.value_and_gradients(
            loss_fn, [w], (x,), coupled=True, forward=forward, **AUTO
        )
        assert float(loss) == pytest.approx(4 * factor)


def test_trials_leave_no_trace_in_optimizers_of_the_users():
    """Whose variables are made when they are first applied."""

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)
            self.other = keras.optimizers.Adam(0.01)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.other.apply_gradients(zip(gradients, self.trainable_variables))
            return {"loss": loss}

    results = []
    for setting in (None, AUTO):
        keras.utils.set_random_seed(0)
        model = Own()
        model.compile()
        if setting:
            bigbatch.accumulate(model, **setting)
        model.fit(DENSE_X, DENSE_Y, batch_size=21, shuffle=False, verbose=0)
        results.append([variable.numpy() for variable in model.other.variables])
    for one, other in paired(*results):
        np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE["float32"])


def test_auto_in_a_graph_is_refused():
    w = tf.Variable(2.0)

    def loss_fn(x):
        return tf.reduce_mean(w * x)

    with pytest.raises(ContextError, match=r"inside a tf\.function"):
        tf.function(lambda x: bigbatch.value_and_gradients(loss_fn, [w], (x,), **AUTO))(
            tf.ones([4])
        )
    assert bigbatch.microbatch_size(loss_fn) is None


class Faulty(keras.layers.Layer):
    """Runs out of memory in the call that `calls` says, counted down."""

    calls = 0

    def call(self, x):
        def count(x):
            Faulty.calls -= 1
            if Faulty.calls == 0:
                raise MemoryError("injected")
            return x

        if tf.executing_eagerly():  # samples that are only looked at
            return x
        y = tf.py_function(count, [x], x.dtype)
        y.set_shape(x.shape)
        return x + 0 * tf.stop_gradient(y)


def faulty_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(8, "tanh"),
            keras.layers.Dropout(0.5, seed=2),
            Faulty(),
            keras.layers.Dense(3),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def everything(model):
    variables = [*model.variables, *model.optimizer.variables]
    return [variable.numpy() for variable in variables]


@pytest.mark.parametrize("fault", [1, 2, 3, 4, 5])
def test_recovery_is_as_if_nothing_had_happened(fault, monkeypatch):
    """At every micro-batch of the first batch (10 + 10 + 1 samples), and in the second."""
    monkeypatch.setattr(Faulty, "calls", -1)
    monkeypatch.setattr(AutoSlices, "_choose", lambda *_: 10)
    model = bigbatch.accumulate(faulty_model(), **AUTO)
    states = []

    class Inject(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 0:
                Faulty.calls = fault

    with pytest.warns(UserWarning, match="out of memory with micro-batches of 10"):
        history = model.fit(
            DENSE_X,
            DENSE_Y,
            batch_size=21,
            shuffle=False,
            verbose=0,
            callbacks=[Inject()],
        )
    assert bigbatch.microbatch_size(model) == 5
    states.append(everything(model))

    Faulty.calls = -1
    twin = faulty_model()
    sizes = iter([10, 5, 5] if fault > 3 else [5, 5, 5])  # of each of three batches

    class Resize(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            vars(twin)["_bigbatch_hooks"].trainer.feed.size = next(sizes)

    monkeypatch.setattr(AutoSlices, "_choose", lambda *_: 5)
    bigbatch.accumulate(twin, **AUTO)
    expected = twin.fit(
        DENSE_X, DENSE_Y, batch_size=21, shuffle=False, verbose=0, callbacks=[Resize()]
    )
    for one, other in paired(states[0], everything(twin)):
        np.testing.assert_array_equal(one, other)
    assert history.history == expected.history


class FaultyOptimizer(keras.optimizers.SGD):
    """Runs out of memory when it updates the second weight."""

    is_faulty = False

    def update_step(self, gradient, variable, *learning_rate):
        def check(gradient):
            if FaultyOptimizer.is_faulty:
                raise MemoryError("injected")
            return gradient

        if variable.shape == (8, 3):
            shape = gradient.shape
            gradient = tf.py_function(check, [gradient], gradient.dtype)
            gradient.set_shape(shape)
        super().update_step(gradient, variable, *learning_rate)


def test_an_update_that_fails_itself_stops_training(monkeypatch):
    monkeypatch.setattr(AutoSlices, "_choose", lambda *_: 10)
    model = bigbatch.accumulate(dense(), **AUTO)
    model.compile(FaultyOptimizer(0.1), "mse")
    model.fit(DENSE_X, DENSE_Y, batch_size=21, verbose=0)
    monkeypatch.setattr(FaultyOptimizer, "is_faulty", True)
    with pytest.raises(ContextError, match="in the middle of an update"):
        model.fit(DENSE_X, DENSE_Y, batch_size=21, verbose=0)
    assert bigbatch.microbatch_size(model) == 10


def test_trials_leave_no_trace():
    model = bigbatch.accumulate(faulty_model(), **AUTO)
    untouched = faulty_model()
    seen = []
    choose = AutoSlices._choose

    def spy(self, trainer, data):
        seen.append(everything(model))
        size = choose(self, trainer, data)
        seen.append(everything(model))
        return size

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoSlices, "_choose", spy)
        patch.setattr(Faulty, "calls", -1)
        history = model.fit(DENSE_X, DENSE_Y, batch_size=21, shuffle=False, verbose=0)
    for one, other in paired(*seen):
        np.testing.assert_array_equal(one, other)
    expected = untouched.fit(DENSE_X, DENSE_Y, batch_size=21, shuffle=False, verbose=0)
    assert bigbatch.microbatch_size(model) == 21  # there is memory enough for the whole batch
    np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-6)
    for one, other in paired(everything(model), everything(untouched)):
        np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE["float32"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("coupled", [False, True])
def test_replicas_agree_on_one_size(size, coupled, mirrored, monkeypatch):
    if size:
        monkeypatch.setattr(AutoSlices, "_choose", lambda *_: size)
    case = COUPLED_CASES["sim_clr"] if coupled else CASES["masked"]
    with mirrored.scope():
        result = case.train(lambda m: bigbatch.accumulate(m, **AUTO, coupled=coupled))
    comparison.check_same(result, case.train(), TOLERANCE["float32"])
    assert bigbatch.microbatch_size(result.model) == (size or 11)  # of batches of 21


def test_after_load_model(tmp_path, monkeypatch):
    monkeypatch.setattr(AutoSlices, "_choose", lambda *_: 4)
    results = []
    for setting in (None, AUTO):
        keras.utils.set_random_seed(0)
        model = dense()
        model.compile(keras.optimizers.Adam(0.01), "mse")
        model.fit(DENSE_X, DENSE_Y, batch_size=21, shuffle=False, verbose=0)
        model.save(tmp_path / "model.keras")
        model = keras.models.load_model(tmp_path / "model.keras")
        if setting:
            bigbatch.accumulate(model, **setting)
        model.fit(DENSE_X, DENSE_Y, batch_size=21, shuffle=False, verbose=0)
        results.append(everything(model))
    for one, other in paired(*results):
        np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE["float32"])


@pytest.mark.parametrize("options", [{"jit_compile": True}, {"run_eagerly": True}], ids=str)
def test_with_compile_options(options, monkeypatch):
    case = CASES["dense"].compiled(steps_per_execution=2, **options)
    monkeypatch.setattr(AutoSlices, "_choose", lambda *_: 8)
    result = case.train(lambda model: bigbatch.accumulate(model, **AUTO))
    comparison.check_same(result, CASES["dense"].train(), TOLERANCE["float32"])
