"""What surrounds training in real life: threads, processes that load data, Ctrl-C."""

from __future__ import annotations

import threading

import keras
import numpy as np
import pytest

import bigbatch
from comparison import check_same_models, paired
from fit_cases import BATCH, DENSE_X, DENSE_Y, MODES, dense

from problems import TOLERANCE, largest_difference


def compiled():
    keras.utils.set_random_seed(3)
    model = dense()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


@pytest.mark.parametrize("mode", MODES)
def test_two_models_in_two_threads(mode):
    """Each trains its own model; what one traces does not show up in the other."""
    setting, size = MODES[mode]
    expected = [compiled() for _ in range(2)]
    models = [compiled() for _ in range(2)]
    errors = []
    targets = DENSE_Y, 2 * DENSE_Y
    for model, y in paired(expected, targets):
        model.fit(DENSE_X, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0)

    def fit_accumulated(model, y):
        try:
            bigbatch.accumulate(model, **setting)
            model.fit(DENSE_X, y, batch_size=size, epochs=3, shuffle=False, verbose=0)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=fit_accumulated, args=pair) for pair in paired(models, targets)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for model, plain in paired(models, expected):
        check_same_models(model, plain, TOLERANCE["float32"])


class Loaded(keras.utils.PyDataset):
    """Batches that other threads or processes load."""

    def __init__(self, size, **options):
        super().__init__(**options)
        self.size = size

    def __len__(self):
        return -(-len(DENSE_X) // self.size)

    def __getitem__(self, index):
        rows = slice(index * self.size, (index + 1) * self.size)
        return DENSE_X[rows], DENSE_Y[rows]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # fork among threads
@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
@pytest.mark.parametrize("mode", MODES)
def test_data_that_workers_load(mode, processes):
    setting, size = MODES[mode]
    expected, model = compiled(), bigbatch.accumulate(compiled(), **setting)
    expected.fit(Loaded(BATCH), epochs=2, shuffle=False, verbose=0)
    data = Loaded(size, workers=2, use_multiprocessing=processes)
    model.fit(data, epochs=2, shuffle=False, verbose=0)
    check_same_models(model, expected, TOLERANCE["float32"])


class Interrupts(keras.callbacks.Callback):
    """Presses Ctrl-C in the middle of a window."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            raise KeyboardInterrupt


@pytest.mark.parametrize("mode", MODES)
def test_after_ctrl_c_the_model_can_be_used(mode):
    """It is as after the last update, and trains on as if the window had never begun."""
    setting, size = MODES[mode]
    updates = 2 if mode == "split" else 0  # two batches, or two of the three of a window
    expected = compiled()
    if updates:
        expected.fit(
            DENSE_X[: 2 * BATCH],
            DENSE_Y[: 2 * BATCH],
            batch_size=BATCH,
            shuffle=False,
            verbose=0,
        )
    model = bigbatch.accumulate(compiled(), **setting)
    options = {"batch_size": size, "shuffle": False, "verbose": 0}
    with pytest.raises(KeyboardInterrupt):
        model.fit(DENSE_X, DENSE_Y, callbacks=[Interrupts()], **options)
    assert int(model.optimizer.iterations) == updates
    # Without an update the optimizer of `expected` has no slots yet.
    assert largest_difference(model, expected) <= TOLERANCE["float32"]
    for one, batch_size in ((expected, BATCH), (model, size)):
        one.fit(DENSE_X, DENSE_Y, **{**options, "batch_size": batch_size})
    check_same_models(model, expected, TOLERANCE["float32"])
    assert np.isfinite(model.predict(DENSE_X, verbose=0)).all()
