"""What else `fit` does on torch: precision, errors, what is left behind."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import pytest
import torch

import bigbatch
from bigbatch.backends.torch import data as batches
from bigbatch.backends.torch import sums
from bigbatch.backends.torch.keras3 import Keras3OnTorch
from bigbatch.engine.microbatch import MicroBatch
from comparison import check_same, check_same_models, largest_difference
from fit_cases import DENSE_X, DENSE_Y, TOKEN_Y, TOKENS, Case, masked
from fixes import refused
from torch_cases import CASES, OwnTrainStep

layers = keras.layers
TOLERANCE = 5e-6


@contextlib.contextmanager
def policy(name):
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize(
    ("name", "tolerance"),
    # Rounded to 11 or 8 bits in every micro-batch; a mean of means is off by 2e-2.
    [("mixed_float16", 2e-5), ("mixed_bfloat16", 2e-4)],
)
def test_mixed_precision(name, tolerance, mode):
    with policy(name):
        case = Case(
            lambda: keras.Sequential(
                [
                    keras.Input((5,)),
                    layers.Dense(8, "tanh"),
                    layers.Dense(3, dtype="float32"),
                ]
            )
        )
        expected, found = case.train(), case.accumulate(mode)
    assert found.training.iterations == expected.training.iterations == 6
    weights = (one.model.get_weights() for one in (found, expected))
    assert largest_difference(*weights) <= tolerance


def test_sums_of_sixteen_bit_gradients_have_more_digits():
    """Sums of many small numbers: in bfloat16 they would stop growing at 2^8 of them."""

    def train(**setting):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((1,)), layers.Dense(1, dtype="bfloat16")])
        model.compile(keras.optimizers.SGD(1.0), "mae")
        if setting:
            bigbatch.accumulate(model, **setting)
        x = np.ones((1024, 1), "float32")
        model.fit(x, 100 * x, batch_size=1024, verbose=0)
        return np.asarray(model.get_weights()[1], "float32")

    assert train(microbatch_size=1) == pytest.approx(train(), rel=1e-2)


def test_grad_is_the_buffer_and_holds_the_gradient_afterwards():
    model = bigbatch.accumulate(CASES["regularised"].build(), microbatch_size=8)
    plain = CASES["regularised"].build()
    for one in (model, plain):
        one.train_on_batch(DENSE_X, DENSE_Y)
    pairs = zip(model.trainable_weights, plain.trainable_weights)
    for one, other in pairs:
        np.testing.assert_allclose(one.value.grad, other.value.grad, atol=1e-6)


@pytest.mark.filterwarnings("ignore:bigbatch. nothing is accumulated")
def test_one_micro_batch_is_plain_training_bit_for_bit():
    for name in ("regularised", "masked", "own train_step"):
        for setting in ({"microbatch_size": 1000}, {"accumulation_steps": 1}):
            found = CASES[name].train(lambda m, s=setting: bigbatch.accumulate(m, **s))
            warns = ["nothing is accumulated"] if "microbatch_size" in setting else []
            # Where the loss counts for its elements under a mask, it is divided by them last.
            tolerance = TOLERANCE if name == "masked" else 0
            check_same(found, CASES[name].train(), tolerance, warns=warns)


def test_train_on_batch_and_restore():
    case = CASES["dense"]
    plain, model = case.build(), bigbatch.accumulate(case.build(), accumulation_steps=3)
    for start in (0, 10, 20, 30, 40):
        model.train_on_batch(DENSE_X[start : start + 10], DENSE_Y[start : start + 10])
    assert int(model.optimizer.iterations.numpy()) == 1
    bigbatch.restore(model)  # applies what is left
    for rows in (slice(0, 30), slice(30, 50)):
        plain.train_on_batch(DENSE_X[rows], DENSE_Y[rows])
    check_same_models(model, plain, TOLERANCE)
    for one in (model, plain):
        one.train_on_batch(DENSE_X, DENSE_Y)
    check_same_models(model, plain, TOLERANCE)
    assert "zero_grad" not in vars(model)


def test_data_loaders(mode):
    data = torch.utils.data.TensorDataset(*map(torch.Tensor, (DENSE_X, DENSE_Y)))

    def loader(size):
        return torch.utils.data.DataLoader(data, batch_size=size)

    case = CASES["dense"]
    setting, size = {
        "split": ({"microbatch_size": 8}, 21),
        "window": ({"accumulation_steps": 3}, 7),
    }[mode]
    fed = Case(**{**vars(case), "x": loader(21), "y": None, "fit": {"batch_size": None}})
    expected = fed.train()
    fed = Case(**{**vars(fed), "x": loader(size)})
    check_same(
        fed.train(lambda model: bigbatch.accumulate(model, **setting)), expected, TOLERANCE
    )


def test_data_loaders_of_batches():
    """Their `batch_size` does not tell how many samples a batch has: nothing is warned of."""
    batches = [(DENSE_X[:20], DENSE_Y[:20]), (DENSE_X[20:40], DENSE_Y[20:40])]

    def first(batch):
        return tuple(map(torch.as_tensor, batch[0]))

    loader = torch.utils.data.DataLoader(batches, batch_size=1, collate_fn=first)
    case = Case(CASES["dense"].make_model, loader, None, fit={"batch_size": None})
    found = case.train(lambda model: bigbatch.accumulate(model, microbatch_size=8))
    check_same(found, case.train(), TOLERANCE)


TOKEN_WEIGHTS = np.random.default_rng(7).random(TOKENS.shape).astype("float32")


def test_sample_weights_under_a_mask_are_not_changed():
    weights = TOKEN_WEIGHTS
    case = Case(masked, TOKENS, TOKEN_Y, fit={"sample_weight": weights})
    check_same(case.accumulate("split"), case.train(), TOLERANCE)
    model = bigbatch.accumulate(case.build(), microbatch_size=8)
    given = weights.copy()
    model.train_on_batch(TOKENS, TOKEN_Y, sample_weight=given)
    np.testing.assert_array_equal(given, weights)


def test_several_batches_per_call_are_refused():
    model = bigbatch.accumulate(
        CASES["dense"].compiled(steps_per_execution=2).build(), microbatch_size=8
    )
    before = model.get_weights()
    with refused("leave steps_per_execution out of compile()"):
        model.fit(DENSE_X, DENSE_Y, verbose=0)
    assert largest_difference(model.get_weights(), before) == 0
    model.compile("sgd", "mse")
    model.fit(DENSE_X, DENSE_Y, verbose=0)


def test_a_batch_that_cannot_be_cut_is_refused():
    x, y = torch.ones(20, 5), torch.ones(21, 3)
    with refused("slice or stack the tensors of the batch to one length"):
        batches.checked_count((x, y))
    assert batches.checked_count((x, y[:20])) == 20


def test_what_torch_compile_would_do_is_said():
    case = CASES["dense"].compiled(jit_compile=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = case.accumulate("split")
    assert any("jit_compile=True has no effect" in one for one in found.warnings)
    check_same_models(found.model, CASES["dense"].train().model, TOLERANCE)


class NeverClears(OwnTrainStep):
    def train_step(self, data):
        x, y = data
        loss = self.compute_loss(x, y, self(x, training=True))
        loss.backward()
        variables = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in variables], variables)
        return {"my_loss": loss}


def test_a_step_that_does_not_clear_its_gradients_is_refused():
    model = bigbatch.accumulate(Case(NeverClears).build(), microbatch_size=8)
    model(DENSE_X)
    before = model.get_weights()
    with refused("call self.zero_grad() in train_step, before loss.backward()"):
        model.fit(DENSE_X, DENSE_Y, batch_size=21, verbose=0)
    assert largest_difference(model.get_weights(), before) == 0
    model = bigbatch.accumulate(Case(OwnTrainStep).build(), microbatch_size=8)
    model.fit(DENSE_X, DENSE_Y, batch_size=21, verbose=0)


def test_a_failed_batch_has_not_happened(mode):
    class Fails(layers.Layer):
        def call(self, x):
            assert float(x.detach().abs().max()) < 1e6, "the bad sample"
            return x

    def build():
        keras.utils.set_random_seed(1)
        norm = layers.BatchNormalization()
        model = keras.Sequential(
            [keras.Input((5,)), layers.Dropout(0.2, seed=1), Fails(), norm, layers.Dense(3)]
        )
        model.compile("adam", "mse", metrics=["mae"])
        return model

    def state(model):
        variables = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
        return [one.numpy() for one in variables]

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations.numpy()) == 1 and not seen:
                seen.extend(state(self.model))

    seen = []
    setting, size = {
        "split": ({"microbatch_size": 8}, 21),
        "window": ({"accumulation_steps": 3}, 7),
    }[mode]
    model = bigbatch.accumulate(build(), **setting)
    bad = DENSE_X.copy()
    bad[35] = 1e12
    with pytest.raises(AssertionError, match="the bad sample"):
        model.fit(bad, DENSE_Y, batch_size=size, callbacks=[Note()], shuffle=False, verbose=0)
    assert largest_difference(state(model), seen) == 0


def test_without_tensorflow():
    """In a process that can import neither TensorFlow nor JAX."""
    probe = Path(__file__).parent.parent / "without_tensorflow_probe.py"
    run = subprocess.run(
        [sys.executable, str(probe)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout.splitlines()[-1]) <= TOLERANCE


# Wrong versions, on which the tests of equality fail.


def check_differs(name, mode="split"):
    found, expected = CASES[name].accumulate(mode, {"check": "off"}), CASES[name].train()
    with pytest.raises(AssertionError, match="not the same"):
        check_same(found, expected, TOLERANCE)


def not_weighing():
    """Return a block in which the terms of a batch are counted before it runs."""
    return mock.patch.object(MicroBatch, "_can_weigh", return_value=False)


def test_a_mean_of_means_differs():
    with not_weighing(), mock.patch.object(MicroBatch, "correction", return_value=None):
        check_differs("masked")


def test_sums_that_are_cleared_by_every_micro_batch_differ():
    nothing = contextlib.nullcontext()
    with mock.patch.object(sums.GradientSums, "adding", return_value=nothing):
        check_differs("dense")


def test_weights_that_the_mask_is_multiplied_into_differ():
    case = Case(masked, TOKENS, TOKEN_Y, fit={"sample_weight": TOKEN_WEIGHTS})
    value_of = Keras3OnTorch.value_of

    def twice(self, loss, y, y_pred, weight, by):
        if not torch.is_tensor(by):  # where the loss is tried
            return value_of(self, loss, y, y_pred, weight, by)
        loss(y, y_pred, weight)
        return loss(y, y_pred, weight)

    with mock.patch.object(Keras3OnTorch, "value_of", twice):
        found = case.accumulate("split", {"check": "off"})
    with pytest.raises(AssertionError, match="not the same"):
        check_same(found, case.train(), TOLERANCE)
