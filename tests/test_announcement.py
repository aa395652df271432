"""What `fit` says before training."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf

import bigbatch

from stack import IS_KERAS_3, keras

X, Y = np.ones((100, 5)), np.ones((100, 3))
layers = keras.layers


def said(capsys, setting, x=X, y=Y, model_layers=(), **fit):
    model = keras.Sequential([keras.Input((5,)), *model_layers, layers.Dense(3)])
    model.compile("sgd", "mse")
    bigbatch.accumulate(model, **setting)
    model.fit(x, y, **{"verbose": 2, "shuffle": False, **fit})
    printed = capsys.readouterr().out
    lines = [
        line for line in printed.splitlines() if "bigbatch: " in line or line[:9] == " " * 9
    ]
    assert max(map(len, lines), default=0) <= 100
    # A line that is too long is continued, indented.
    joined = re.sub(r"\n {10}(?=\S)", " ", printed)
    return [line for line in joined.splitlines() if line.startswith("bigbatch: ")]


@pytest.mark.parametrize(
    ("setting", "batch_size", "expected"),
    [
        (
            {"microbatch_size": 4},
            20,
            "batch 20 = 4 samples × 5 micro-batches, 5 updates per epoch",
        ),
        (
            {"microbatch_size": 7},
            30,
            "batch 30 = 5 micro-batches of up to 7 samples, 4 updates per epoch, "
            "the last of 10 samples",
        ),
        (
            {"accumulation_steps": 3},
            10,
            "batch 30 = 10 samples × 3 micro-batches, 4 updates per epoch, "
            "the last of 1 micro-batch",
        ),
        (
            {"accumulation_steps": lambda updates: 2},
            10,
            "batches per update by a schedule, an epoch ends with an update",
        ),
    ],
)
def test_how_batches_are_made_up(capsys, setting, batch_size, expected):
    lines = said(capsys, setting, batch_size=batch_size)
    assert lines == [f"bigbatch: {expected}, gradient buffer 72 B"]


def test_a_data_set_of_unknown_batch_size(capsys):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(30)
    (line,) = said(capsys, {"microbatch_size": 8}, x=data, y=None)
    assert line.startswith("bigbatch: each batch in micro-batches of 8, 4 updates per epoch")
    (line,) = said(
        capsys, {"accumulation_steps": 2}, x=data.repeat(), y=None, steps_per_epoch=5
    )
    assert line.startswith(
        "bigbatch: 2 batches of the data set per update, 3 updates per epoch, "
        "the last of 1 micro-batch"
    )


def test_replicas(capsys, mirrored):
    with mirrored.scope():
        lines = said(capsys, {"microbatch_size": 5}, batch_size=20)
    assert lines[0].startswith("bigbatch: batch 20 = 5 samples × 2 micro-batches × 2 replicas,")


@pytest.mark.parametrize(
    ("batch_norm", "expected"),
    [
        (
            "pooled",
            "normalises with micro-batch statistics; its moving statistics are pooled over the "
            "batch" + (' (batch_norm="exact" equals the full batch)' if IS_KERAS_3 else ""),
        ),
        (
            "microbatch",
            "normalises with micro-batch statistics and its moving statistics follow every "
            "micro-batch",
        ),
        ("frozen", "is frozen"),
    ],
)
def test_how_layers_normalise_by_name(capsys, batch_norm, expected):
    def model_layers():
        # Random draws are those of the full batch.
        return layers.BatchNormalization(name="norm"), layers.Dropout(0.5, name="drop")

    setting = {"microbatch_size": 4, "batch_norm": batch_norm}
    lines = said(capsys, setting, model_layers=model_layers())
    assert len(lines) == 2
    assert lines[1].startswith(f"bigbatch: BatchNormalization {expected}")
    assert lines[1].endswith(": norm")
    # One micro-batch per batch is the full batch.
    plain = {"microbatch_size": 100, "batch_norm": batch_norm}
    assert len(said(capsys, plain, model_layers=model_layers(), batch_size=100)) == 1


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 has no exact batch normalisation")
@pytest.mark.parametrize(
    ("batch_norm", "expected"),
    [
        ("exact", "all boundaries stored"),  # of one stage
        (bigbatch.ExactBatchNorm("all"), "all boundaries stored"),
        (bigbatch.ExactBatchNorm(8, storage="host"), "boundaries of every 8th stage stored"),
    ],
)
def test_exact_batch_normalisation_and_its_cost(capsys, batch_norm, expected):
    setting = {"microbatch_size": 4, "batch_norm": batch_norm}
    lines = said(capsys, setting, model_layers=[layers.BatchNormalization(name="norm")])
    is_on_host = getattr(batch_norm, "storage", "") == "host"
    where = ", with boundaries in the memory of the host" if is_on_host else ""
    assert lines[1] == f"bigbatch: exact batch normalisation: norm{where}"
    assert expected in lines[2]
    assert "convolutions and matrix products run 1.00 times" in lines[2]
    assert len(lines) == 3  # and nothing that could not be checked


@pytest.mark.parametrize("verbose", [0, 2])
def test_it_warns_if_nothing_is_accumulated(capsys, verbose):
    with pytest.warns(UserWarning, match="no larger than microbatch_size=50. Pass a larger"):
        lines = said(capsys, {"microbatch_size": 50}, batch_size=50, verbose=verbose)
    expected = "bigbatch: batch 50 = 50 samples × 1 micro-batch, 2 updates per epoch"
    assert [line[: len(expected)] for line in lines] == [expected] * (verbose > 0)
    # As the message says; and all samples in one batch are what there is.
    assert said(capsys, {"microbatch_size": 49}, batch_size=50)
    assert said(capsys, {"microbatch_size": 50}, batch_size=100)
    assert said(capsys, {"microbatch_size": 500}, batch_size=100)


@pytest.mark.skipif(not IS_KERAS_3, reason="the wrappers are of Keras 3")
def test_it_warns_if_a_wrapper_trains_a_copy():
    pytest.importorskip("sklearn")

    def make():
        model = keras.Sequential([keras.Input((5,)), layers.Dense(1)])
        model.compile("sgd", "mse")
        return bigbatch.accumulate(model, microbatch_size=4)

    wrapper = keras.wrappers.SKLearnRegressor(make(), fit_kwargs={"verbose": 0})
    with pytest.warns(UserWarning, match="Pass them a function"):
        wrapper.fit(X, X[:, 0])
    # As the message says; other copies are of use without training.
    keras.models.clone_model(wrapper.model)
    made = keras.wrappers.SKLearnRegressor(lambda X, y: make(), fit_kwargs={"verbose": 0})  # noqa: N803
    made.fit(X, X[:, 0])
    assert int(made.model_.optimizer.iterations.numpy()) == 4
    assert bigbatch.microbatch_size(made.model_) == 4
    # Which may itself make a copy.
    base = make()

    def copied(X, y):  # noqa: N803
        return bigbatch.accumulate(keras.models.clone_model(base), microbatch_size=4)

    keras.wrappers.SKLearnRegressor(copied, fit_kwargs={"verbose": 0}).fit(X, X[:, 0])


def test_it_is_silent_with_verbose_0_and_says_it_once_per_fit(capsys):
    assert said(capsys, {"microbatch_size": 4}, verbose=0) == []
    options = {"validation_data": (X, Y), "epochs": 2}
    assert len(said(capsys, {"microbatch_size": 4}, **options)) == 1


def test_positional_verbose(capsys):
    model = keras.Sequential([keras.Input((5,)), layers.Dense(3)])
    model.compile("sgd", "mse")
    bigbatch.accumulate(model, microbatch_size=4)
    model.fit(X, Y, 20, 1, 0)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("batch_size", [20, 100])
def test_what_auto_has_chosen(capsys, batch_size):
    lines = said(capsys, {"microbatch_size": "auto"}, batch_size=batch_size)
    assert lines[0].startswith("bigbatch: each batch in micro-batches as large as the memory")
    assert lines[1].startswith("bigbatch: the whole batch fits, nothing is accumulated: about ")


def test_many_layers_with_long_names(capsys):
    """`said` checks that no line is wider than 100 columns."""
    norms = [
        layers.BatchNormalization(name=f"a_normalisation_{'x' * 20}_{i}") for i in range(9)
    ]
    lines = said(capsys, {"microbatch_size": 4}, model_layers=norms)
    assert lines[1].endswith(" and 4 more")
