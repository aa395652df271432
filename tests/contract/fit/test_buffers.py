"""Gradients in `fit` keep their kind, and are added up in at least float32."""

from __future__ import annotations

import numpy as np

import bigbatch
from comparison import check_same
from fit_cases import MODES, Case

from problems import TOLERANCE
from stack import build, keras, new_optimizers, only_on_tensorflow, set_policy


def spy_on_updates(monkeypatch):
    seen = []
    update_step = new_optimizers().SGD.update_step

    def spy(self, gradient, variable, *learning_rate):
        seen.append((type(gradient).__name__, gradient.dtype.name))
        return update_step(self, gradient, variable, *learning_rate)

    monkeypatch.setattr(new_optimizers().SGD, "update_step", spy)
    return seen


def table(rows=1000):
    return keras.Sequential([keras.Input((4,), dtype="int32"), keras.layers.Embedding(rows, 2)])


X, Y = np.arange(168).reshape(42, 4) % 50, np.ones((42, 4, 2))


@only_on_tensorflow
def test_sparse_gradients_stay_sparse(monkeypatch, mode):
    seen = spy_on_updates(monkeypatch)
    model = table()
    model.compile(new_optimizers().SGD(0.1), "mse")
    setting, size = MODES[mode]
    bigbatch.accumulate(model, **setting)
    model.fit(X, Y, batch_size=size, verbose=0)
    assert {kind for kind, _ in seen} == {"IndexedSlices"}


def test_repeated_rows_are_kept_apart_as_in_the_full_batch(mode):
    """Keras' Adam does not add up repeated rows: it must get what the full batch would."""
    adam = lambda: keras.optimizers.Adam(0.1)  # noqa: E731
    case = Case(lambda: table(50), X, Y, optimizer=adam, fit={"epochs": 3})
    check_same(case.accumulate(mode), case.train(), TOLERANCE["float32"])


def test_sums_of_half_precision_are_kept_in_float32(mode):
    """1 + 2**-11 is lost in float16: 512 micro-batches would add up to 1, not 1.25."""
    set_policy("float16")
    try:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(keras.optimizers.SGD(1.0), lambda y, y_pred: y_pred * y)
        build(model.optimizer, model.trainable_variables)
        model.set_weights([np.zeros((1, 1))])
        x = np.ones((512, 1), "float16")
        y = np.full((512, 1), 2.0**-11, "float16") * 512 / 513
        x, y = np.concatenate([[[1]], x]), np.concatenate([[[512.0]], y])
        setting = {"microbatch_size": 1} if mode == "split" else {"accumulation_steps": 513}
        bigbatch.accumulate(model, **setting)
        size = 513 if mode == "split" else 1
        model.fit(x, y, batch_size=size, shuffle=False, verbose=0)
    finally:
        set_policy("float32")
    exact = -float(np.mean(y.astype("float16").astype("float64")))
    np.testing.assert_allclose(model.get_weights()[0].item(), exact, rtol=2**-11)
