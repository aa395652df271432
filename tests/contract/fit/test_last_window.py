"""The last, short window of an epoch in `fit`: applied, in time, with the weight it has."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import tensorflow as tf

import bigbatch
from comparison import check_same, check_same_models
from fit_cases import BATCH, CASES, DENSE_X, DENSE_Y, MODES, Case, dense

from problems import TOLERANCE
from stack import IS_KERAS_3, PyDataset, keras, set_steps_per_execution

STEPS, SIZE = MODES["window"][0]["accumulation_steps"], MODES["window"][1]


def compiled(**setting):
    keras.utils.set_random_seed(3)
    model = dense()
    model.compile("adam", "mse", metrics=["mae"])
    if setting:
        bigbatch.accumulate(model, **setting)
    return model


class Iterations(keras.callbacks.Callback):
    """Notes how many updates there were at each event."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _note(self, event):
        self.seen.append((event, int(self.model.optimizer.iterations)))

    def on_train_batch_end(self, batch, logs=None):
        self._note("batch")

    def on_test_begin(self, logs=None):
        self._note("validation")

    def on_epoch_end(self, epoch, logs=None):
        self._note("epoch")


def test_it_is_applied_before_validation_and_the_end_of_the_epoch():
    model, callback = compiled(accumulation_steps=2), Iterations()
    model.fit(
        DENSE_X,
        DENSE_Y,
        batch_size=10,
        validation_data=(DENSE_X, DENSE_Y),
        callbacks=[callback],
        verbose=0,
    )
    batches = [("batch", updates) for updates in (0, 1, 1, 2, 3)]
    assert callback.seen == [*batches, ("validation", 3), ("epoch", 3)]


def test_of_data_whose_end_is_not_known_it_is_applied_when_that_comes():
    data = tf.data.Dataset.from_tensor_slices((DENSE_X, DENSE_Y)).batch(10)
    data = data.filter(lambda *_: True)  # of unknown length
    model, callback = compiled(accumulation_steps=2), Iterations()
    # So Keras 3 finds the end.
    warns = pytest.warns(UserWarning, match="ran out of data") if IS_KERAS_3 else nullcontext()
    with warns:
        model.fit(
            data,
            validation_data=(DENSE_X, DENSE_Y),
            callbacks=[callback],
            shuffle=False,
            verbose=0,
        )
    batches = [("batch", updates) for updates in (0, 1, 1, 2, 2)]
    assert callback.seen == [*batches, ("validation", 3), ("epoch", 3)]


@pytest.mark.parametrize("batches", [7, 8, 9, 10])
def test_data_that_ends_too_early(batches):
    """`fit` is promised ten batches, and a window waits for those that do not come."""

    def generate():
        for start in range(0, 4 * batches, 4):
            yield DENSE_X[start : start + 4], DENSE_Y[start : start + 4]

    def fit(model, **options):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*ran out of data")
            model.fit(generate(), steps_per_epoch=10, shuffle=False, verbose=0, **options)

    model = compiled(accumulation_steps=4)
    fit(model)
    expected = compiled()
    ends = [*range(0, 4 * batches, 16), 4 * batches]
    for start, end in zip(ends, ends[1:]):
        expected.train_on_batch(DENSE_X[start:end], DENSE_Y[start:end])
    check_same_models(model, expected, TOLERANCE["float32"])
    # And the next window is a new one.
    for one in (model, expected):
        one.fit(
            DENSE_X, DENSE_Y, batch_size=4 if one is model else 16, shuffle=False, verbose=0
        )
    check_same_models(model, expected, TOLERANCE["float32"])


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 stops when data ends too early")
def test_data_that_ends_too_early_in_every_epoch():
    """Keras starts the data anew when it hears of the end, and only then."""
    data = tf.data.Dataset.from_tensor_slices((DENSE_X, DENSE_Y)).batch(10)
    data = data.filter(lambda *_: True)  # five batches, which nobody knows

    def fit(model, data):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*ran out of data")
            return model.fit(data, steps_per_epoch=6, epochs=4, shuffle=False, verbose=0)

    model, expected = compiled(accumulation_steps=4), compiled()
    history = fit(model, data)
    for _ in range(4):
        for start, end in ((0, 40), (40, 50)):
            expected.train_on_batch(DENSE_X[start:end], DENSE_Y[start:end])
    assert int(model.optimizer.iterations) == 8
    assert min(history.history["loss"]) > 0
    check_same_models(model, expected, TOLERANCE["float32"])


@pytest.mark.parametrize(("execution", "steps"), [(4, 2), (5, 3), (3, 4), (2, 8)])
def test_executions_that_do_not_divide_the_epoch(execution, steps):
    model, expected, callback = compiled(accumulation_steps=steps), compiled(), Iterations()
    set_steps_per_execution(model, execution)
    options = {"epochs": 2, "shuffle": False, "verbose": 0}
    model.fit(DENSE_X, DENSE_Y, batch_size=5, callbacks=[callback], **options)
    expected.fit(DENSE_X, DENSE_Y, batch_size=5 * steps, **options)
    assert len([1 for event, _ in callback.seen if event == "batch"]) == 2 * -(-10 // execution)
    check_same_models(model, expected, TOLERANCE["float32"])


def test_an_own_fit_that_trains_and_evaluates_on_other_data_first():
    class Own(keras.Sequential):
        def fit(self, x, y, **options):
            super().fit(x[:14], y[:14], **options)
            self.evaluate(x[:7], y[:7], batch_size=7, verbose=0)
            return super().fit(x, y, **options)

    case = Case(
        lambda: Own([keras.Input((5,)), keras.layers.Dense(3)]),
        optimizer=lambda: "adam",
        fit={"epochs": 1},
    )
    result = case.train(lambda m: bigbatch.accumulate(m, accumulation_steps=2), batch_size=7)
    check_same(result, case.train(batch_size=14), TOLERANCE["float32"])


class Batches(PyDataset):
    """Notes which batches are taken, and when an epoch ends."""

    def __init__(self):
        super().__init__(**({"workers": 1} if IS_KERAS_3 else {}))
        self.events = []

    def __len__(self):
        return 7

    def __getitem__(self, index):
        self.events.append(index)
        return DENSE_X[6 * index : 6 * index + 6], DENSE_Y[6 * index : 6 * index + 6]

    def on_epoch_end(self):
        self.events.append("end")


@pytest.mark.parametrize("steps", [2, 3, 7, 9])
def test_every_batch_is_taken_before_the_data_hears_of_the_end(steps):
    """Or a `PyDataset` that shuffles there would give some twice and some not at all."""
    data, model, expected = Batches(), compiled(accumulation_steps=steps), compiled()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*more than the 7 batches")
        model.fit(data, epochs=2, shuffle=False, verbose=0)
    first = data.events.index("end", data.events.index(6))
    assert set(range(7)) <= set(data.events[:first])
    rows = slice(0, 42)
    size = 6 * steps
    expected.fit(
        DENSE_X[rows], DENSE_Y[rows], batch_size=size, epochs=2, shuffle=False, verbose=0
    )
    assert int(model.optimizer.iterations) == int(expected.optimizer.iterations)
    check_same_models(model, expected, TOLERANCE["float32"])


def test_steps_per_epoch_is_honoured_exactly():
    """Four batches per epoch in windows of three, from a data set without end."""

    data = tf.data.Dataset.from_tensor_slices((DENSE_X, DENSE_Y)).repeat().batch(5)
    model = compiled(accumulation_steps=3)
    model.fit(data, steps_per_epoch=4, epochs=2, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 4
    expected = compiled()
    for start, end in ((0, 15), (15, 20), (20, 35), (35, 40)):
        expected.train_on_batch(DENSE_X[start:end], DENSE_Y[start:end])
    check_same_models(model, expected, TOLERANCE["float32"])


def test_a_window_longer_than_the_epoch_still_trains():
    model = compiled(accumulation_steps=100)
    with pytest.warns(UserWarning, match="accumulation_steps=100 is more than the 8 batches"):
        model.fit(DENSE_X, DENSE_Y, batch_size=SIZE, epochs=2, shuffle=False, verbose=0)
    expected = compiled()
    expected.fit(DENSE_X, DENSE_Y, batch_size=50, epochs=2, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 2
    check_same_models(model, expected, TOLERANCE["float32"])


def test_repeated_fits_leak_nothing(mode):
    setting, size = MODES[mode]
    model, expected = compiled(**setting), compiled()
    for rows in (slice(0, 50), slice(0, 28), slice(10, 50)):
        x, y = DENSE_X[rows], DENSE_Y[rows]
        for one, batch_size in ((model, size), (expected, BATCH)):
            one.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
    check_same_models(model, expected, TOLERANCE["float32"])


def test_a_window_that_train_on_batch_left_open_is_applied_by_fit_and_restore():
    model, expected = compiled(accumulation_steps=3), compiled()
    model.train_on_batch(DENSE_X[:5], DENSE_Y[:5])
    assert int(model.optimizer.iterations) == 0
    model.fit(DENSE_X, DENSE_Y, batch_size=SIZE, shuffle=False, verbose=0)
    model.train_on_batch(DENSE_X[:6], DENSE_Y[:6])
    bigbatch.restore(model)
    expected.train_on_batch(DENSE_X[:5], DENSE_Y[:5])
    expected.fit(DENSE_X, DENSE_Y, batch_size=BATCH, shuffle=False, verbose=0)
    expected.train_on_batch(DENSE_X[:6], DENSE_Y[:6])
    check_same_models(model, expected, TOLERANCE["float32"])


def test_training_that_is_stopped_in_the_middle_of_a_window():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 3

    model = compiled(accumulation_steps=3)
    model.fit(DENSE_X, DENSE_Y, batch_size=7, callbacks=[Stop()], shuffle=False, verbose=0)
    expected = compiled()
    for start, end in ((0, 21), (21, 28)):
        expected.train_on_batch(DENSE_X[start:end], DENSE_Y[start:end])
    check_same_models(model, expected, TOLERANCE["float32"])


def test_evaluation_in_the_middle_of_a_window_does_not_end_it():
    class Evaluate(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.model.evaluate(DENSE_X, DENSE_Y, verbose=0)

    model, _ = CASES["dense"].accumulate("window", callbacks=[Evaluate()])
    expected, _ = CASES["dense"].train()
    check_same_models(model, expected, TOLERANCE["float32"])


@pytest.mark.parametrize("devices", ["one device", "two replicas"])
def test_a_schedule_from_updates_made(devices, mirrored):
    asked = []

    def schedule(updates):
        asked.append(updates)
        return 1 + updates % 3

    def prepare(model):
        bigbatch.accumulate(model, accumulation_steps=schedule)
        asked.clear()  # it was tried

    case = Case(dense, optimizer=lambda: "adam")
    with mirrored.scope() if devices == "two replicas" else nullcontext():
        model, _ = case.train(prepare, batch_size=10)
    expected = compiled()
    for start, end in ((0, 10), (10, 30), (30, 50), (0, 10), (10, 30), (30, 50)):
        expected.train_on_batch(DENSE_X[start:end], DENSE_Y[start:end])
    assert asked == [0, 1, 2, 3, 4, 5]
    check_same_models(model, expected, TOLERANCE["float32"])


def test_the_reported_loss_of_a_short_window_is_that_of_the_full_batch(mode):
    case = CASES["own train_step"]  # logs numbers of its own, those of the last batch
    check_same(case.accumulate(mode), case.train(), TOLERANCE["float32"])
