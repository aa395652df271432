"""What is saved, copied or exported is the plain model with its plain optimizer."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from comparison import check_same, largest_difference
from fit_cases import BATCH, CASES, DENSE_X, DENSE_Y, MODES, Case, dense

from problems import TOLERANCE
from problems import largest_difference as weight_difference
from stack import IS_KERAS_2_10, IS_KERAS_3, keras, load_model

PLAIN = {"fit", "make_train_function", "_maybe_symbolic_build", "_bigbatch_hooks"}
no_native_format = pytest.mark.skipif(
    IS_KERAS_2_10, reason="Keras 2.10 has no format .keras, only older ones"
)


def is_plain(model):
    return not PLAIN & set(vars(model))


def test_restore_leaves_nothing_behind(mode):
    model, _ = CASES["dense"].accumulate(mode)
    before = set(vars(CASES["dense"].train().model))
    assert bigbatch.restore(model) is model
    assert set(vars(model)) == before
    model.fit(DENSE_X, DENSE_Y, verbose=0)


@no_native_format
def test_a_loaded_model_is_plain_and_can_be_accumulated_again(tmp_path, mode):
    setting, size = MODES[mode]
    model, _ = CASES["dense"].accumulate(mode)
    model.save(tmp_path / "model.keras")
    loaded = load_model(tmp_path / "model.keras")
    assert is_plain(loaded)
    assert weight_difference(loaded, model) == 0
    expected, _ = CASES["dense"].train()
    expected.fit(DENSE_X, DENSE_Y, batch_size=BATCH, shuffle=False, verbose=0)
    bigbatch.accumulate(loaded, **setting)
    loaded.fit(DENSE_X, DENSE_Y, batch_size=size, shuffle=False, verbose=0)
    assert weight_difference(loaded, expected) <= TOLERANCE["float32"]


@no_native_format
@pytest.mark.sampled(2)
def test_it_loads_and_trains_where_bigbatch_is_not_installed(tmp_path, mode):
    model, _ = CASES["dense"].accumulate(mode)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    np.savez(tmp_path / "data.npz", x=DENSE_X, y=DENSE_Y)
    program = Path(__file__).parents[2] / "without_bigbatch_probe.py"
    output = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    weights = [np.array(values) for values in json.loads(output.splitlines()[-1])]
    expected, _ = CASES["dense"].train()
    expected.fit(DENSE_X, DENSE_Y, batch_size=BATCH, shuffle=False, verbose=0)
    assert largest_difference(weights, expected.get_weights()) <= TOLERANCE["float32"]


@pytest.mark.parametrize("how", ["clone", "pickle", "deepcopy"])
def test_copies_are_plain(how, mode):
    model, _ = CASES["dense"].accumulate(mode)
    copied = {
        "clone": keras.models.clone_model,
        "pickle": lambda model: pickle.loads(pickle.dumps(model)),
        "deepcopy": copy.deepcopy,
    }[how](model)
    assert is_plain(copied)
    copied.compile("sgd", "mse")
    copied.fit(DENSE_X, DENSE_Y, verbose=0)
    assert not is_plain(model)


@pytest.mark.skipif(IS_KERAS_3, reason="formats of Keras 2")
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
@pytest.mark.parametrize("name", ["model.h5", "saved_model"])
def test_older_formats(name, tmp_path, mode):
    """What goes on from them is what goes on from the file of a plain model."""
    loaded = []
    for train in (functools.partial(CASES["dense"].accumulate, mode), CASES["dense"].train):
        model, _ = train()
        path = str(tmp_path / str(len(loaded)) / name)
        model.save(path)
        loaded.append(load_model(path))
        assert is_plain(loaded[-1])
        assert weight_difference(loaded[-1], model) == 0
        loaded[-1].fit(DENSE_X, DENSE_Y, batch_size=BATCH, shuffle=False, verbose=0)
    assert weight_difference(*loaded) <= TOLERANCE["float32"]


@pytest.mark.skipif(IS_KERAS_2_10, reason="Keras 2.10 has no export()")
def test_export(tmp_path, mode):
    model, _ = CASES["dense"].accumulate(mode)
    model.export(str(tmp_path / "exported"), **({"verbose": False} if IS_KERAS_3 else {}))
    loaded = tf.saved_model.load(str(tmp_path / "exported"))
    served = loaded.serve(tf.constant(DENSE_X, tf.float32))
    np.testing.assert_allclose(served, model.predict(DENSE_X, verbose=0), rtol=1e-5, atol=1e-6)


def test_callbacks_that_write(tmp_path, mode):
    def best_model(folder, train):
        path = tmp_path / folder
        # With ".keras" the callback of Keras 2.13 fails by itself.
        best = path / ("best.keras" if IS_KERAS_3 else "best.h5")
        callbacks = [
            keras.callbacks.ModelCheckpoint(str(best), "loss", save_best_only=True),
            keras.callbacks.EarlyStopping("loss", min_delta=100, patience=1),
            keras.callbacks.TensorBoard(path / "logs", update_freq="batch"),
            keras.callbacks.CSVLogger(path / "log.csv"),
        ]
        path.mkdir()
        _, history = train(callbacks=callbacks, epochs=9)
        assert len(history["loss"]) == 2  # stopped early
        assert list((path / "logs" / "train").iterdir())
        assert len((path / "log.csv").read_text().splitlines()) == 3
        return load_model(best)

    case = CASES["dense"]
    result = best_model("result", functools.partial(case.accumulate, mode))
    expected = best_model("expected", case.train)
    assert weight_difference(result, expected) <= TOLERANCE["float32"]


def test_killed_and_resumed(tmp_path, mode):
    """`BackupAndRestore` goes on from the last epoch, to the weights of a run never killed."""

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations == 8:  # in the third epoch
                raise KeyboardInterrupt

    case = Case(dense, optimizer=lambda: "adam", fit={"epochs": 4})

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path / "backup")

    with pytest.raises(KeyboardInterrupt):
        case.accumulate(mode, callbacks=[backup(), Kill()])
    # From another seed: everything comes from the backup.
    resumed = case.accumulate(mode, callbacks=[backup()], seed=4)
    expected = case.accumulate(mode)
    logs = {name: values[2:] for name, values in expected.history.items()}
    check_same(resumed, replace(expected, history=logs), 0)


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras, when it saves
def test_saving_in_the_middle_of_a_window_is_warned_of(tmp_path):
    callback = keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=4)
    with pytest.warns(
        UserWarning, match=r"BackupAndRestore\(save_freq=4\) saves in the middle"
    ):
        CASES["dense"].accumulate("window", callbacks=[callback])
