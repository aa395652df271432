"""Many machines: two real processes on this one, connected by TensorFlow's own collectives."""

from __future__ import annotations

import json

import numpy as np
import pytest

import out_of_memory_probe
from comparison import largest_difference
from coupled_cases import COUPLED_CASES
from exact_cases import WORKERS
from fit_cases import CASES

from problems import TOLERANCE, embedding_problem, optimizers, train_full_batch
from workers.cluster import WorkerError, run_workers

UPDATES = 3
MODES = ("split", "window")


@pytest.mark.slow
def test_two_workers_equal_the_full_batch():
    expected = train_full_batch(embedding_problem(), optimizers()["adam"], UPDATES)
    for output in run_workers("accumulator.py"):
        weights = [np.array(values) for values in json.loads(output.splitlines()[-1])]
        assert largest_difference(weights, expected.get_weights()) <= TOLERANCE["float64"]


@pytest.mark.slow
def test_when_a_worker_dies_none_is_left_behind():
    with pytest.raises(WorkerError, match=r"exit codes \[-?\d+, 3\]"):
        run_workers("accumulator.py", "die", timeout=240)


@pytest.mark.slow
def test_fit_on_two_workers_equals_the_full_batch_on_one_device():
    outputs = [json.loads(output.splitlines()[-1]) for output in run_workers("fit.py")]
    coupled = [("metrics", COUPLED_CASES["metrics"])]
    plain = [(name, CASES[name]) for name in ("two outputs", "own train_step")]
    exact = [("exact", WORKERS)]
    for name, case in (*plain, *coupled, *exact):
        model, history = case.train(batch_size=20)
        logs = model.evaluate(case.x, case.y, verbose=0, return_dict=True)
        for result in (output[f"{name}, {mode}"] for output in outputs for mode in MODES):
            difference = largest_difference(result["weights"], model.get_weights())
            assert difference <= TOLERANCE["float32"]
            compared = [(result["history"], history)]
            # Keras evaluates the mean of what replicas have by themselves.
            if name not in ("two outputs", *dict(coupled)):
                compared.append((result["logs"], logs))
            for one, two in compared:
                assert one.keys() == two.keys()
                for key, values in two.items():
                    np.testing.assert_allclose(one[key], values, rtol=TOLERANCE["float32"])


@pytest.mark.slow
def test_fit_stops_with_an_error_when_a_worker_dies():
    with pytest.raises(WorkerError, match=r"exit codes \[1, 3\]") as error:
        run_workers("fit.py", "die", timeout=300, patience=120)
    assert "another worker" in str(error.value)


@pytest.mark.slow
@pytest.mark.matrix  # takes over a minute
@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # of unknown length
def test_workers_agree_on_a_size_when_only_one_is_short_of_memory():
    outputs = [json.loads(output.splitlines()[-1]) for output in run_workers("auto.py")]
    cases = {name: CASES[name].train(batch_size=20) for name in ("masked", "two outputs")}
    for name, (model, history) in {
        "longer later": out_of_memory_probe.train(out_of_memory_probe.longer_later, None),
        **cases,
    }.items():
        for result in (output[name] for output in outputs):
            difference = largest_difference(result["weights"], model.get_weights())
            assert difference <= TOLERANCE["float32"]
            for key, values in history.items():
                np.testing.assert_allclose(result["history"][key], values, rtol=1e-5)
        assert len({output[name]["size"] for output in outputs}) == 1
    assert outputs[0]["longer later"]["size"] < 32  # of batches of 64 on two workers
    assert outputs[0]["messages"] == outputs[1]["messages"] != []
    assert outputs[0]["noise"] == outputs[1]["noise"]
    assert outputs[0]["noise"][1] > 0  # as if nobody had looked it would be negative
