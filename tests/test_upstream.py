"""`make upstream` accumulates, sees what differs, and permits only what is listed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from upstream.outcomes import differences_of, outcomes_of_programs, row_of
from upstream.page import page_of
from upstream.permitted import PERMITTED, Permitted

SUITE = """
import keras
import numpy as np


class CountsItsSamples(keras.layers.Layer):
    seen = []

    def call(self, x):
        self.seen.append(x.shape[0])
        return x


def test_batches_are_not_cut():
    layer = CountsItsSamples()
    model = keras.Sequential([keras.Input((2,)), layer, keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    layer.seen.clear()
    model.fit(np.ones((6, 2)), np.ones((6, 1)), batch_size=6, verbose=0)
    assert set(layer.seen) <= {6, None}


def test_a_layer_with_a_trainer():
    trainer = next(kind for kind in keras.Model.__mro__ if "fit" in vars(kind))

    class Model(trainer, keras.layers.Dense):
        def __init__(self):
            keras.layers.Dense.__init__(self, 1)
            trainer.__init__(self)

    model = Model()
    model.compile("sgd", "mse")
    history = model.fit(np.ones((6, 2)), np.ones((6, 1)), batch_size=6, verbose=0)
    assert int(model.optimizer.iterations) == 1
    assert history.history["loss"][0] > 0


def test_that_fails_by_itself():
    assert False
"""


@pytest.mark.slow
def test_the_plugin_accumulates_in_every_fit(tmp_path):
    suite = tmp_path / "test_suite.py"
    suite.write_text(SUITE)
    outcomes = {}
    for mode, setting in {
        "plain": "",
        "split": "microbatch_size=4",
        "window": "accumulation_steps=2",
    }.items():
        file = tmp_path / f"{mode}.json"
        environment = {
            "PYTHONPATH": str(Path(__file__).parent),
            "BIGBATCH_UPSTREAM": setting,
            "BIGBATCH_OUTCOMES": str(file),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, str(suite)]
        done = subprocess.run(
            [*command, "-p", "upstream.plugin", "--rootdir", str(tmp_path)],
            env={**os.environ, **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert file.exists(), done.stdout + done.stderr
        outcomes[mode] = json.loads(file.read_text())
    cut = "test_suite.py::test_batches_are_not_cut"
    found = differences_of(outcomes, permitted=())
    assert [(one.name, one.mode) for one in found] == [(cut, "split"), (cut, "window")]
    assert row_of("suite", outcomes, "abc").passed == {"plain": 2, "split": 1, "window": 1}


def test_what_did_not_run_differs():
    outcomes = {"plain": {"a": "passed", "b": "failed: x"}, "split": {}}
    assert [one.name for one in differences_of(outcomes, permitted=())] == ["a"]


def test_only_what_is_listed_is_permitted():
    outcomes = {"plain": {"t[a]": "passed", "u": "passed"}, "split": {"t[a]": "failed: y"}}
    listed = Permitted("t[[]*", ("split",), "a reason", "1")
    literal = Permitted("t[a]", ("split",), "a reason", "1")
    other_mode = Permitted("*", ("window",), "a reason", "1")
    for permitted, expected in (((literal,), ["u"]), ((other_mode,), ["t[a]", "u"])):
        found = differences_of(outcomes, permitted)
        assert [one.name for one in found if one.permitted is None] == expected
    assert not listed.covers("t[a]", "split")  # brackets stand for themselves


@pytest.mark.parametrize(
    ("difference", "error", "differs"),
    [(1e-6, None, False), (1e-2, None, True), (float("nan"), None, True), (0.0, "Oh", True)],
)
def test_programs_differ_by_their_weights(difference, error, differs):
    comparison = {"name": "p", "mode": "split", "difference": difference, "error": error}
    found = differences_of(outcomes_of_programs([comparison]), permitted=())
    assert bool(found) is differs


def test_every_permitted_difference_has_a_reason_and_an_end():
    for one in PERMITTED:
        assert one.reason.endswith(".")
        assert one.until.endswith(".")


def test_the_page_names_what_differs():
    outcomes = {"plain": {"new": "passed"}, "split": {"new": "failed: z"}}
    settings = {"plain": "", "split": "microbatch_size=2", "window": "accumulation_steps=2"}
    rows, found = [row_of("suite", outcomes, "abc1234")], differences_of(outcomes, permitted=())
    text = page_of(rows, found, settings, {"keras": "3"})
    assert "**Not permitted:**" in text
    assert "- split: `new`" in text
    assert "| suite | 1 | 1 | 0 | abc1234 |" in text
