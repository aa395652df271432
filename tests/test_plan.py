"""`bigbatch.plan`: what it predicts, chooses, says and leaves alone."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from bigbatch.cli import main
from bigbatch.errors import ArgumentError
from bigbatch.planner.plan import Measurement, Parts
from comparison import paired
from fit_cases import DENSE_X, DENSE_Y, dense

MIB = 2**20


@functools.lru_cache(None)
def probe(*arguments, limit=None):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    if limit is not None:
        environment["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(limit)
    program = str(Path(__file__).with_name("plan_probe.py"))
    done = subprocess.run(
        [sys.executable, program, *map(str, arguments)],
        capture_output=True,
        check=True,
        text=True,
        timeout=600,
        env=environment,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "batch"),
    [
        pytest.param("convolutional", 1024, marks=pytest.mark.matrix),  # takes a minute
        pytest.param("transformer", 512, marks=pytest.mark.matrix),  # takes 30 s
        pytest.param("perceptron", 16384, marks=pytest.mark.matrix),  # takes 20 s
    ],
)
def test_four_times_the_size_is_predicted_to_5_percent(model, batch):
    result = probe(model, batch)
    assert result["most"] == batch  # or nothing is measured to compare with
    assert result["predicted"] == pytest.approx(result["peak"], rel=0.05)
    # From process to process, and in `fit`, TensorFlow runs operations in another order, by
    # how long they took: a few large tensors are in memory together, or not.
    assert result["predicted"] == pytest.approx(result["training"], rel=0.2)


@pytest.mark.slow
@pytest.mark.matrix
def test_a_small_device_plans_for_a_large_one():
    here, there = probe("perceptron", 16384, limit=105), probe("perceptron", 16384)
    assert here["most"] < there["most"] == 16384
    assert here["peak"] == pytest.approx(there["peak"], rel=0.2)  # by the order, as above


def made_up(limit=300 * MIB, replicas=1):
    """A plan for batch 256 where 100 MiB are fixed and each sample takes two."""
    measured = [Measurement(n, (100 + 2 * n) * MIB) for n in (1, 2, 4, 8, 16, 32, 64)]
    parts = Parts(40 * MIB, 40 * MIB, 20 * MIB, MIB, 2 * MIB)
    return bigbatch.Plan(256, replicas, limit, parts, tuple(measured))


def test_a_plan_is_the_largest_handy_size_that_leaves_a_margin():
    plan = made_up()
    # 100 + 2 n ≤ 0.95 · 300 for n ≤ 92; no power of two or divisor of 256 is near that.
    assert (plan.microbatch_size, plan.microbatches) == (92, 3)
    assert made_up(limit=250 * MIB).microbatch_size == 64  # of 68
    assert plan.peak(128) == 356 * MIB
    text = str(plan)
    for part in (
        "batch 256 as 3 × 92 samples",
        "about 284.0 MiB of 300.0 MiB",
        "95%",
        "weights",
    ):
        assert part in text
    assert "92 samples are the most" in text
    assert max(map(len, text.splitlines())) <= 88


def test_plans_at_the_ends():
    assert made_up(limit=2**40).microbatch_size == 256
    assert "nothing to accumulate" in str(made_up(limit=2**40))
    nothing = made_up(limit=90 * MIB)
    assert (nothing.microbatch_size, nothing.microbatches) == (0, 0)
    assert "17.4 MiB are missing" in str(nothing)  # of 102 / 0.95
    assert "does not fit" in str(nothing)
    failed = dataclasses.replace(made_up(), too_large=64)
    assert failed.microbatch_size == 63  # whatever is predicted
    assert "of 64 samples ran out of memory" in str(failed)
    two = made_up(replicas=2)
    assert (two.share, two.microbatch_size, two.microbatches) == (128, 92, 2)


def test_a_plan_for_machines_notebooks_and_eyes():
    plan = made_up()
    read = json.loads(json.dumps(plan.to_dict()))
    assert read["microbatch_size"] == 92
    assert read["peaks"]["92"] == plan.peak(92)
    assert read["parts"]["activations_per_sample"] == 2 * MIB
    html = plan._repr_html_()
    assert html.count("<tr>") == 1 + 9 + 1 + 5  # two tables with headings; 92 and 256 are shown
    assert "<td style='font-weight: bold'>92</td>" in html
    (axes,) = plan.plot().axes
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["predicted", "measured", "limit", "chosen: 92"]
    with pytest.raises(AttributeError):
        plan.batch_size = 3


def test_a_plan_where_memory_cannot_be_measured_says_so_and_draws_no_line():
    remark = "the memory of the device cannot be measured here"
    plan = dataclasses.replace(made_up(), is_rough=True, remarks=(remark,))
    text = str(plan)
    assert "(memory cannot be measured here)" in text.replace("\n", " ")
    assert f"- {remark}" in text
    assert text.count("about ") > str(made_up()).count("about ")
    (axes,) = plan.plot().axes
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["rough: memory of the process", "limit", "chosen: 92"]


def test_a_plan_on_this_device_says_whether_memory_was_measured():
    model = compiled()
    plan = bigbatch.plan(model, DENSE_X, DENSE_Y, batch_size=8, verbose=False)
    count = tf.config.experimental.get_memory_info
    can_count = False
    with contextlib.suppress(ValueError):  # or nothing at all is counted
        before = count("CPU:0")["current"]
        small = tf.raw_ops.Empty(shape=[1000], dtype=tf.uint8)
        can_count = count("CPU:0")["current"] > before  # oneDNN counts large tensors alone
        del small
    assert plan.is_rough is not can_count
    assert ("cannot be measured here" in str(plan)) is not can_count


def compiled():
    model = dense()
    model.compile("adam", "mse")
    return model


def everything(model):
    return [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]


def test_a_plan_leaves_the_model_as_it_was():
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5, seed=2),
            keras.layers.Dense(3),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    model.fit(DENSE_X, DENSE_Y, verbose=0)
    before, function = everything(model), model.train_function
    plan = bigbatch.plan(
        model, DENSE_X, DENSE_Y, batch_size=32, measure_time=True, verbose=False
    )
    for one, other in paired(everything(model), before):
        np.testing.assert_array_equal(one, other)
    assert model.train_function is function
    assert [one.microbatch_size for one in plan.measured] == [1, 2, 4, 8, 16, 32]
    assert all(one.seconds > 0 for one in plan.measured)
    assert "time per update" in str(plan)
    assert len(plan.plot().axes) == 2


def test_parts_are_those_of_the_model():
    model = compiled()
    x, y = DENSE_X.astype("float32"), DENSE_Y.astype("float32")
    plan = bigbatch.plan(model, x, y, batch_size=32, verbose=False)
    weights = 4 * sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)
    assert plan.parts.weights == plan.parts.gradients == weights
    assert plan.parts.optimizer == sum(
        variable.numpy().nbytes for variable in model.optimizer.variables
    )
    assert plan.parts.batch == x[:32].nbytes + y[:32].nbytes


def test_the_longest_samples_of_a_data_set_are_planned_for():
    model = keras.Sequential([keras.Input((None, 3)), keras.layers.GlobalAveragePooling1D()])
    model.add(keras.layers.Dense(1))
    model.compile("sgd", "mse")
    batches = [(np.ones((4, n, 3), "float32"), np.ones((4, 1), "float32")) for n in (5, 50, 7)]
    types = (tf.TensorSpec([None, None, 3]), tf.TensorSpec([None, 1]))
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=types)
    plan = bigbatch.plan(model, data, batch_size=4, verbose=False)
    assert plan.parts.batch == 4 * (50 * 3 + 1) * 4
    with pytest.raises(ArgumentError, match="without end"):
        bigbatch.plan(model, data.repeat(), batch_size=4)


class Batches(keras.utils.PyDataset):
    """Batches as lists, without targets."""

    num_batches = 3

    def __getitem__(self, index):
        return [{"a": np.ones((4, 3)), "b": np.ones((4, index + 1, 3))}, None]


def test_nested_inputs_without_targets():
    inputs = {"a": keras.Input((3,), name="a"), "b": keras.Input((None, 3), name="b")}
    pooled = keras.layers.GlobalAveragePooling1D()(inputs["b"])
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs["a"] + pooled))
    model.compile("adam", loss=None)
    model.compute_loss = lambda x, y, y_pred, *_, **__: tf.reduce_mean(y_pred)
    plan = bigbatch.plan(model, Batches(), batch_size=8, verbose=False)
    assert plan.parts.batch == 8 * (3 + 3 * 3) * 4  # float32, as in fit


@pytest.mark.parametrize("coupled", [False, True])
def test_on_replicas_and_as_accumulate_is_set(mirrored, coupled):
    with mirrored.scope():
        model = bigbatch.accumulate(compiled(), microbatch_size=4, coupled=coupled)
    before = [weight.numpy() for weight in model.weights]
    plan = bigbatch.plan(model, DENSE_X, DENSE_Y, batch_size=21, verbose=False)
    assert (plan.replicas, plan.share, plan.microbatch_size) == (2, 11, 11)
    for one, other in paired(model.weights, before):
        np.testing.assert_array_equal(one.numpy(), other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "a model"}, "a Keras 3 model"),
        ({"model": keras.Sequential([keras.layers.Dense(1)])}, "not been compiled"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"memory_limit": "much"}, "memory_limit='much'"),
        ({"x": tf.data.Dataset.from_tensors((DENSE_X, DENSE_Y))}, "y or sample_weight"),
    ],
    ids=["model", "not compiled", "batch_size", "memory_limit", "y twice"],
)
def test_bad_input(change, message):
    arguments = {"model": compiled(), "x": DENSE_X, "y": DENSE_Y, "batch_size": 8, **change}
    model, x = arguments.pop("model"), arguments.pop("x")
    with pytest.raises(ArgumentError, match=message):
        bigbatch.plan(model, x, **arguments)


FACTORY = """
import numpy as np
import keras

def make():
    layers = keras.layers.Dense(256), keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile("adam", "mse")
    return model, np.ones((64, 8), "float32"), np.ones((64, 1), "float32")

def wrong():
    return 3
"""


@pytest.mark.slow
def test_the_command(tmp_path):
    (tmp_path / "train.py").write_text(FACTORY)
    command = [sys.executable, "-m", "bigbatch.cli", "plan", "train:make", "--batch-size", "64"]
    run = lambda *options: subprocess.run(  # noqa: E731
        [*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    done = run("--json", "--memory-limit", "8GiB", "--plot", "plan.png", "--time")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["microbatch_size"] == 64
    assert "measuring micro-batches of 64" in done.stderr  # progress does not mix with results
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    too_small = run("--memory-limit", "10kB")
    assert too_small.returncode == 1
    assert "are missing" in too_small.stdout


@pytest.mark.parametrize("factory", ["nowhere:make", "train", "train:nothing", "train:wrong"])
def test_the_command_says_what_is_wrong_with_a_factory(factory, tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["plan", factory, "--batch-size", "8"]) == 2
    assert factory in capsys.readouterr().err


def test_the_command_explains_itself_by_example(capsys):
    with pytest.raises(SystemExit) as end:
        main(["plan", "--help"])
    assert end.value.code == 0
    assert "bigbatch plan train:make --batch-size 256" in capsys.readouterr().out
