"""A `train_step` in torch is a program: every update gets the gradient of the whole batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import bigbatch
from bigbatch.backends.torch import accumulation
from bigbatch.backends.torch.rollback import UpdateResults
from bigbatch.core.passes import Plan
from bigbatch.engine import passes
from comparison import check_equals_full_batch, check_same, paired
from fit_cases import mostly_matrix
from torch_apply_cases import CODE, PROGRAMS, REAL, Gan, case_of

TOLERANCE = 5e-6
"""float32 has seven digits, weights are about one, and a few updates add up their rounding."""
PASSES = {
    "gan": 2,
    "wgan-gp": 4,
    "clipped weights": 3,
    "four optimizers": 1,
    "teacher": 1,
    "teacher in torch": 1,
    "adapter": 1,
    "captions": 3,
    "distiller": 1,
    "late logs": 2,
    "logs by python": 2,
    "gan with average": 2,
    "gan of modules": 2,
}
"""How often the micro-batches of each program run: as on TensorFlow in a graph."""


def passes_of(fitted):
    return len(vars(fitted.model)["_bigbatch_hooks"].trainer.phases.passes)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_update_is_that_of_the_full_batch(name):
    case = case_of(name)
    expected = case.train(epochs=1)
    for mode in ("split", "window"):
        found = case.accumulate(mode, epochs=1)
        check_same(found, expected, TOLERANCE)
        assert passes_of(found) == PASSES[name]


@pytest.mark.parametrize("name", mostly_matrix(PROGRAMS, ["gan", "teacher"]))
def test_every_update_is_that_of_the_full_batch_for_other_sizes(name):
    check_equals_full_batch(case_of(name), TOLERANCE, sizes=(1, 20), windows=(7,))


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


def every_time(monkeypatch):
    """What is the same for all samples changes with every micro-batch."""
    learn = accumulation.SameForAll.learn

    def nothing(self, told):
        learn(self, told._replace(once=[]))

    monkeypatch.setattr(accumulation.SameForAll, "learn", nothing)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("gan", skip),
        ("gan", simultaneous),
        ("captions", simultaneous),
        ("gan with average", not_settled),
        ("teacher", not_settled),
        ("teacher", every_time),
        pytest.param("wgan-gp", every_time, marks=pytest.mark.matrix),
    ],
)
@pytest.mark.filterwarnings("ignore::bigbatch.NotEqualWarning")
def test_a_wrong_version_is_found(name, wrong, monkeypatch):
    expected = case_of(name).train(epochs=1)
    wrong(monkeypatch)
    found = case_of(name).accumulate("split", {"check": "off"}, epochs=1)
    with pytest.raises(AssertionError, match="not the same"):
        check_same(found, expected, 1e-4)


def test_the_passes_are_said(capsys):
    case_of("gan").accumulate("split", epochs=1, verbose=2)
    said = capsys.readouterr().out
    assert "bigbatch: 2 passes over each batch" in said
    assert "not checked" not in said
    case_of("adapter").accumulate("split", epochs=1, verbose=2)
    said = capsys.readouterr().out
    assert "passes over each batch" not in said
    assert "not checked" not in said


class Fails(Gan):
    """Its second update fails for a sample of the last micro-batch."""

    def train_step(self, data):
        logs = super().train_step(data)
        fake = self.critic(self.generator(data[1]))
        assert bool(torch.all(data[0][:, 0] != 0)), "the bad sample"
        self.update(self.of_generator, torch.mean(fake), self.generator)
        return logs


def test_a_batch_that_fails_in_a_later_pass_has_not_happened(mode):
    real = REAL.copy()
    real[20] = 0
    setting, size = {
        "split": ({"microbatch_size": 8}, 21),
        "window": ({"accumulation_steps": 3}, 7),
    }[mode]
    model = case_of("gan", Fails).build(lambda model: bigbatch.accumulate(model, **setting))
    model.fit(REAL[:21], CODE[:21], batch_size=size, shuffle=False, verbose=0)
    variables = [*model.variables, *model.of_critic.variables, *model.of_generator.variables]
    before = [one.numpy().copy() for one in variables]
    with pytest.raises(AssertionError, match="the bad sample"):
        model.fit(real[:21], CODE[:21], batch_size=size, shuffle=False, verbose=0)
    metrics = {id(v) for one in model.metrics for v in one.variables}
    for variable, value in paired(variables, before):
        if id(variable) not in metrics:  # which `fit` resets
            np.testing.assert_array_equal(variable.numpy(), value)
