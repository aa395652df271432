"""A `train_step` on JAX is a program: every update gets the gradient of the whole batch."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

import bigbatch
from bigbatch.backends.jax import dependence
from bigbatch.backends.jax.steps import UpdateResults
from bigbatch.core.passes import NONE, Plan
from bigbatch.engine import passes
from comparison import check_same
from fit_cases import mostly_matrix
from jax_apply_cases import CODE, PROGRAMS, REAL, Gan, case_of

TOLERANCE = 5e-6
"""float32 has seven digits, weights are about one, and a few updates add up their rounding."""
PASSES = {
    "gan": 2,
    "wgan-gp": 4,
    "clipped weights": 3,
    "clipped and logged": 4,
    "four optimizers": 1,
    "teacher": 1,
    "adapter": 1,
    "captions": 3,
    "late logs": 2,
    "gan with average": 2,
    "in a scope": 2,
}
"""How often the micro-batches of each program run: as on TensorFlow."""
QUICK = {"check": "off"}


def passes_of(fitted):
    return len(vars(fitted.model)["_bigbatch_hooks"].trainer.phases.passes)


@pytest.fixture(scope="module")
def expected():
    """Return a function that gives the full batch of a program, trained once."""
    known = {}

    def train(name):
        if name not in known:
            known[name] = case_of(name).train(epochs=1)
        return known[name]

    return train


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_update_is_that_of_the_full_batch(name, expected):
    found = case_of(name).accumulate("split", QUICK, epochs=1)
    check_same(found, expected(name), TOLERANCE)
    assert passes_of(found) == PASSES[name]


@pytest.mark.parametrize(
    "name", mostly_matrix(PROGRAMS, ["gan with average", "clipped weights"])
)
def test_in_window_mode(name, expected):
    found = case_of(name).accumulate("window", QUICK, epochs=1)
    check_same(found, expected(name), TOLERANCE)


@pytest.mark.parametrize("name", mostly_matrix(PROGRAMS, ["gan with average"]))
def test_run_eagerly(name, expected):
    case = case_of(name).compiled(run_eagerly=True)
    check_same(case.accumulate("split", QUICK, epochs=1), expected(name), TOLERANCE)


@pytest.mark.parametrize("name", mostly_matrix(PROGRAMS, ["gan"]))
def test_the_check_finds_nothing_and_changes_nothing(name, expected, capsys):
    found = case_of(name).accumulate("split", {"check": "raise"}, epochs=1, verbose=2)
    check_same(found, expected(name), TOLERANCE)
    is_said = f"bigbatch: {PASSES[name]} passes over each batch" in capsys.readouterr().out
    assert is_said == (PASSES[name] > 1)


# Wrong versions, each of which is found.


def skip(monkeypatch):
    """Earlier updates are skipped, not made again."""
    monkeypatch.setattr(UpdateResults, "assign", lambda _: None)


def simultaneous(monkeypatch):
    """All gradients are those of the weights before the batch."""
    monkeypatch.setattr(passes, "plan_of", lambda _: Plan())


def not_settled(monkeypatch):
    """What is assigned after the last update sees the weights before it."""
    real = passes.plan_of
    monkeypatch.setattr(passes, "plan_of", lambda order: replace(real(order), settles=False))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("gan", skip),
        ("gan", simultaneous),
        ("captions", simultaneous),
        ("teacher", not_settled),
        ("clipped weights", not_settled),
    ],
)
def test_a_wrong_version_is_found(name, wrong, expected, monkeypatch):
    right = expected(name)
    wrong(monkeypatch)
    with pytest.raises(AssertionError, match="not the same"):
        check_same(case_of(name).accumulate("split", QUICK, epochs=1), right, 1e-4)


def test_a_batch_that_fails_in_a_later_pass_has_not_happened():
    class Fails(Gan):
        fails = False

        def of_fake(self, values, code):
            if self.fails:  # when the second pass is traced for another size
                raise KeyError("on purpose")
            return super().of_fake(values, code)

    model = case_of("gan", Fails).build(
        lambda model: bigbatch.accumulate(model, microbatch_size=8, check="off")
    )
    model.fit(REAL[:24], CODE[:24], batch_size=24, verbose=0)
    before = [np.asarray(one) for one in model.variables]
    assert int(model.of_critic.iterations) == 1
    runs = vars(model)["_bigbatch_hooks"].trainer.phases.passes[1].runs
    step, runs._step = runs._step, lambda *_: model.of_fake(None, None)
    model.fails = True
    with pytest.raises(KeyError):
        model.fit(REAL[:24], CODE[:24], batch_size=24, verbose=0)
    metrics = {id(v) for one in model.metrics for v in one.variables}
    for variable, value in zip(model.variables, before):
        if id(variable) not in metrics:  # which `fit` resets
            np.testing.assert_array_equal(np.asarray(variable), value)
    runs._step, model.fails = step, False
    model.fit(REAL[:24], CODE[:24], batch_size=24, verbose=0)
    assert int(model.of_critic.iterations) == 2


def test_on_which_update_values_depend():
    """A mark in the trace, also through a function that is compiled by itself."""

    def function(x, weight):
        once = checkpoint_name(weight - x[0], "bigbatch: update 0")
        inner = jax.jit(lambda a, b: (a * b, a))(x, once)
        twice = checkpoint_name(inner[0][0], "bigbatch: update 1")
        return x, once, *inner, twice + inner[1], checkpoint_name(weight, "of the user")

    checkpoint_name = jax.ad_checkpoint.checkpoint_name
    jaxpr = jax.make_jaxpr(function)(np.ones(3), 1.0).jaxpr
    assert dependence.last_updates(jaxpr) == [NONE, 0, 0, NONE, 1, NONE]
