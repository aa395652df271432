"""`NoiseScale` and `Monitor` see what happens, and change nothing."""

from __future__ import annotations

import csv
import importlib.util

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from bigbatch.core.noise import Estimate, NoiseScaleEstimator
from bigbatch.engine import statistics as statistics_module
from bigbatch.errors import ContextError
from comparison import check_same_models, paired
from fit_cases import CASES, DENSE_X, MODES

from problems import TOLERANCE, largest_difference
from stack import BACKEND, IS_KERAS_2_10, keras, only_on_tensorflow, with_loss_scale

SAMPLES, BATCH, SIZE = 70, 35, 10
"""Two updates, each of micro-batches of 10, 10, 10 and 5 samples."""

rng = np.random.default_rng(0)
X = rng.normal(size=(SAMPLES, 6)).astype("float32")
Y = rng.normal(size=(SAMPLES, 2)).astype("float32")
TOKENS = rng.integers(0, 9, size=(SAMPLES, 4))  # with repeated ids


def dense():
    layers = keras.layers
    return keras.Sequential([keras.Input((6,)), layers.Dense(5, "tanh"), layers.Dense(2)])


def embedding():
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((4,)), layers.Embedding(9, 3), layers.Flatten(), layers.Dense(2)]
    )


MODELS = {"dense": (dense, X), "sparse": (embedding, TOKENS)}


def setting_of(mode):
    if mode == "split":
        return {"microbatch_size": SIZE}, BATCH
    return {"accumulation_steps": 4}, SIZE


def expected_estimate(model, x, parts_of_batches):
    """The same from plain gradients: the oracle."""
    estimator, optimizer = NoiseScaleEstimator(), keras.optimizers.SGD(0.01)
    variables = model.trainable_variables

    def gradients(rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x[rows]) - Y[rows]))
        return [tf.convert_to_tensor(one) for one in tape.gradient(loss, variables)]

    def squared_norm(tensors):
        return sum(float(np.sum(np.square(one.numpy().astype("float64")))) for one in tensors)

    for parts in parts_of_batches:
        norms = [squared_norm(gradients(rows)) for rows in parts]
        whole = gradients(slice(parts[0].start, parts[-1].stop))
        sizes = [rows.stop - rows.start for rows in parts]
        estimator.add(sizes, norms, squared_norm(whole))
        optimizer.apply_gradients(zip(whole, variables))
    return estimator.estimate


def parts_of(mode):
    sizes = [[10, 10, 10, 5]] * 2 if mode == "split" else [[10] * 4, [10] * 3]
    start, batches = 0, []
    for batch in sizes:
        batches.append([])
        for size in batch:
            batches[-1].append(slice(start, start + size))
            start += size
    return batches


def check_same_estimate(estimate: Estimate, expected: Estimate):
    assert estimate.updates == expected.updates == 2
    np.testing.assert_allclose(estimate.average, expected.average, rtol=1e-3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", ["plain", "loss scaling"])
@pytest.mark.parametrize("name", MODELS)
@only_on_tensorflow
def test_the_estimate_is_that_of_plain_gradients(name, mode, optimizer):
    make, x = MODELS[name]
    keras.utils.set_random_seed(2)
    model = make()
    copy = make()
    copy.set_weights(model.get_weights())
    expected = expected_estimate(copy, x, parts_of(mode))
    sgd = keras.optimizers.SGD(0.01)
    if optimizer == "loss scaling":
        sgd = with_loss_scale(sgd, 1024.0)
    model.compile(sgd, "mse")
    setting, size = setting_of(mode)
    bigbatch.accumulate(model, **setting)
    noise = bigbatch.NoiseScale()
    history = model.fit(x, Y, batch_size=size, shuffle=False, verbose=0, callbacks=[noise])
    check_same_estimate(noise.estimate, expected)
    assert "noise_scale" in history.history
    assert largest_difference(model, copy) <= TOLERANCE["float32"]


@only_on_tensorflow
def test_the_estimate_with_jit_compile(mode):
    make, x = MODELS["sparse"]
    keras.utils.set_random_seed(2)
    model, copy = make(), make()
    copy.set_weights(model.get_weights())
    expected = expected_estimate(copy, x, parts_of(mode))
    model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=True)
    setting, size = setting_of(mode)
    bigbatch.accumulate(model, **setting)
    noise = bigbatch.NoiseScale()
    model.fit(x, Y, batch_size=size, shuffle=False, verbose=0, callbacks=[noise])
    check_same_estimate(noise.estimate, expected)


def masked():
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((4,)), layers.Embedding(9, 3, mask_zero=True), layers.Dense(2)]
    )


def test_replicas_are_more_micro_batches_with_masks(mirrored):
    """A micro-batch's part in the gradient is by valid tokens, and its size by samples."""
    y = np.stack([Y] * 4, 1)
    with mirrored.scope():
        keras.utils.set_random_seed(2)
        model = masked()
        model.compile(keras.optimizers.SGD(0.01), "mse")
    copy, estimator = masked(), NoiseScaleEstimator()
    copy.set_weights(model.get_weights())

    def gradient(rows, valid):
        with tf.GradientTape() as tape:
            error = tf.reduce_mean(tf.square(copy(TOKENS[rows]) - y[rows]), -1)
            loss = tf.reduce_sum(error * (TOKENS[rows] > 0)) / valid
        found = tape.gradient(loss, copy.trainable_variables)
        return [tf.convert_to_tensor(one).numpy().astype("float64") for one in found]

    def squared_norm(arrays):
        return sum(float(np.sum(np.square(one))) for one in arrays)

    parts = [slice(0, 10), slice(10, 15), slice(15, 25), slice(25, 30)]
    sizes = [part.stop - part.start for part in parts]
    valid = TOKENS[:30].size if IS_KERAS_2_10 else (TOKENS[:30] > 0).sum()
    # The part of each in the gradient of the batch, as if its samples were the whole batch.
    norms = [
        squared_norm(gradient(part, valid)) * (30 / size) ** 2
        for part, size in zip(parts, sizes)
    ]
    estimator.add(sizes, norms, squared_norm(gradient(slice(0, 30), valid)))
    bigbatch.accumulate(model, microbatch_size=10)
    noise = bigbatch.NoiseScale()
    model.fit(TOKENS[:30], y[:30], batch_size=30, shuffle=False, verbose=0, callbacks=[noise])
    np.testing.assert_allclose(noise.estimate.average, estimator.estimate.average, rtol=1e-3)


def test_replicas_are_more_micro_batches(mirrored):
    with mirrored.scope():
        keras.utils.set_random_seed(2)
        model = dense()
        model.compile(keras.optimizers.SGD(0.01), "mse")
    copy = dense()
    copy.set_weights(model.get_weights())
    # Of 30 samples each replica has 15: micro-batches of 10 and 5 on each.
    parts = [
        [slice(s + a, s + b) for a, b in ((0, 10), (10, 15), (15, 25), (25, 30))]
        for s in (0, 30)
    ]
    expected = expected_estimate(copy, X, parts)
    bigbatch.accumulate(model, microbatch_size=10)
    noise = bigbatch.NoiseScale()
    monitor = bigbatch.Monitor()
    history = model.fit(
        X[:60], Y[:60], batch_size=30, shuffle=False, verbose=0, callbacks=[monitor, noise]
    )
    check_same_estimate(noise.estimate, expected)
    assert history.history["micro_batches"] == [8]
    assert history.history["effective_batch_size"] == [30]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["dense", "two outputs", "own train_step"])
def test_training_is_the_same_with_and_without(name, mode):
    case = CASES[name]
    callbacks = [bigbatch.NoiseScale(), bigbatch.Monitor()]
    model, history = case.accumulate(mode, callbacks=callbacks)
    expected = case.accumulate(mode).model
    # XLA makes one program of an update and what is noted of it, and may round otherwise.
    check_same_models(model, expected, 1e-6 if BACKEND == "jax" else 0)
    assert len(history["noise_scale"]) == len(history["updates"]) == 2


def test_monitor_counts_and_every_logger_has_it(mode, tmp_path):
    setting, size = MODES[mode]
    model = CASES["dense"].make_model()
    model.compile("sgd", "mse")
    bigbatch.accumulate(model, **setting)
    log = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    history = model.fit(
        DENSE_X,
        CASES["dense"].y,
        batch_size=size,
        epochs=2,
        verbose=0,
        callbacks=[log, bigbatch.Monitor()],  # the logger first
    ).history
    updates = int(model.optimizer.iterations)
    assert sum(history["updates"]) == updates
    assert history["updates"][0] == history["updates"][1]
    assert history["effective_batch_size"][0] == len(DENSE_X) / history["updates"][0]
    assert history["micro_batches"][0] >= history["updates"][0]
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["updates"]) for row in rows] == history["updates"]
    assert "peak_memory" in rows[0]


def test_monitor_of_a_coupled_loss():
    model = dense()
    model.compile("sgd", "mse")
    bigbatch.accumulate(model, microbatch_size=SIZE, coupled=True)
    history = model.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[bigbatch.Monitor()])
    assert history.history["micro_batches"] == [8]
    assert history.history["effective_batch_size"] == [BATCH]


@only_on_tensorflow
def test_what_is_noted_is_read_once_and_undone_with_the_rest(monkeypatch):
    """Python reads what has been noted since it last did, if there was room for it."""
    monkeypatch.setattr(statistics_module, "_ROOM", 4)
    noted = np.random.default_rng(3).uniform(1, 2, (14, 2))
    statistics, expected = statistics_module.UpdateStatistics(dense()), [Estimate()]
    statistics.with_noise = True

    def note(index):
        parts, mean = tf.constant(noted[index])
        samples, count = (tf.constant(number, tf.float64) for number in (8, 2))
        statistics.note(count, samples, [(parts, mean)])

    def check(estimate):
        assert statistics.estimate.updates == estimate.updates
        np.testing.assert_allclose(statistics.estimate.average, estimate.average, rtol=1e-14)

    for index, (parts, mean) in enumerate(noted):
        expected.append(expected[-1].with_update(parts, mean, 8.0, 2.0))
        note(index)
        if index in (0, 2, 6, 7):
            check(expected[-1])
    last = Estimate()
    for parts, mean in noted[-4:]:  # of six since the last time, four are there
        last = last.with_update(parts, mean, 8.0, 2.0)
    check(last)
    before = [one.numpy() for one in statistics.variables]
    note(0)
    assert statistics.estimate.updates == 5
    for variable, value in paired(statistics.variables, before):  # as a trial of a size does
        variable.assign(value)
    check(last)


def test_a_second_fit_without_them_does_not_log():
    model = dense()
    model.compile("sgd", "mse")
    bigbatch.accumulate(model, microbatch_size=SIZE)
    first, second = bigbatch.NoiseScale(), bigbatch.NoiseScale()
    model.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[first])
    assert list(model.fit(X, Y, batch_size=BATCH, verbose=0).history) == ["loss"]
    model.fit(X, Y, batch_size=BATCH, epochs=3, verbose=0, callbacks=[second])
    assert second.estimate.updates == 6  # a new callback starts anew
    assert len(second.history) == 3
    if importlib.util.find_spec("matplotlib"):  # in every environment but some of the matrix
        assert second.plot().axes


@pytest.mark.filterwarnings("ignore:bigbatch. nothing is accumulated")
def test_one_micro_batch_says_nothing():
    model = dense()
    model.compile("sgd", "mse")
    bigbatch.accumulate(model, microbatch_size=SIZE)
    noise = bigbatch.NoiseScale()
    history = model.fit(X, Y, batch_size=SIZE, verbose=0, callbacks=[noise])
    assert noise.critical_batch_size is None
    assert noise.interval is None
    assert np.isnan(history.history["noise_scale"][0])
    assert "not yet known" in noise.advice()


def test_a_model_that_does_not_accumulate():
    model = dense()
    model.compile("sgd", "mse")
    with pytest.raises(ContextError, match=r"accumulate\(model"):
        model.fit(X, Y, verbose=0, callbacks=[bigbatch.NoiseScale()])
    monitored = model.fit(X, Y, verbose=0, callbacks=[bigbatch.Monitor()])
    assert list(monitored.history) == ["loss"]


def test_monitor_is_not_in_the_progress_bar(capsys):
    model = dense()
    model.compile("sgd", "mse")
    bigbatch.accumulate(model, microbatch_size=SIZE)
    options = {"batch_size": BATCH, "verbose": 2}
    history = model.fit(X, Y, callbacks=[bigbatch.Monitor()], **options).history
    shown = capsys.readouterr().out
    assert "loss: " in shown
    assert "updates: " not in shown
    assert "peak_memory" not in shown
    assert history["effective_batch_size"] == [BATCH]
    # What a callback of the user logs is shown, as always.
    model.fit(X, Y, callbacks=[bigbatch.NoiseScale()], **options)
    assert "noise_scale: " in capsys.readouterr().out


def test_a_callback_that_comes_in_the_middle_of_training():
    class Evaluate(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.evaluate(X, Y, verbose=0, callbacks=[bigbatch.Monitor()])

    model = dense()
    model.compile("sgd", "mse")
    bigbatch.accumulate(model, microbatch_size=SIZE)
    with pytest.raises(ContextError, match="among the callbacks of fit"):
        model.fit(X, Y, verbose=0, callbacks=[Evaluate()])


def test_noise_of_a_coupled_loss():
    model = dense()
    model.compile("sgd", "mse")
    bigbatch.accumulate(model, microbatch_size=SIZE, coupled=True)
    with pytest.raises(ContextError, match="coupled"):
        model.fit(X, Y, verbose=0, callbacks=[bigbatch.NoiseScale()])
