"""A `train_step` is a program: every update gets the gradient of the whole batch.

Every value is computed with the weights that are in force when the full-batch step computes it,
whether updates follow each other or come from one forward pass.
"""

from __future__ import annotations

import collections
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from apply_cases import CODE, PROGRAMS, REAL, Gan, case_of, gradients_of
from bigbatch.backends.tensorflow.rollback import UpdateResults
from bigbatch.core.passes import ALL_UPDATES, NONE, Order, Pass, Plan, plan_of
from bigbatch.engine import passes
from comparison import check_equals_full_batch, check_same, paired
from fit_cases import Case, mostly_matrix

from stack import IS_KERAS_3, keras

pytestmark = pytest.mark.skipif(not IS_KERAS_3, reason="the programs are written for Keras 3")
EXACT = 1e-12
PASSES = {
    "gan": 2,
    "wgan-gp": 4,
    "clipped weights": 3,
    "four optimizers": 1,
    "teacher": 1,
    "adapter": 1,
    "captions": 3,
    "distiller": 1,
    "late logs": 2,
    "gan with average": 2,
}
"""How often the micro-batches of each program run."""


def passes_of(fitted):
    return len(vars(fitted.model)["_bigbatch_hooks"].trainer.phases.passes)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_update_is_that_of_the_full_batch(name, float64):
    case = case_of(name)
    expected = case.train(epochs=1)
    for mode in ("split", "window"):
        found = case.accumulate(mode, epochs=1)
        check_same(found, expected, EXACT)
        assert passes_of(found) == PASSES[name]


@pytest.mark.matrix
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_update_is_that_of_the_full_batch_for_other_sizes(name, float64):
    check_equals_full_batch(case_of(name), EXACT, sizes=(1, 20), windows=(7,))


WITH_DRAWS = ("wgan-gp",)
"""Programs that draw random numbers: Keras draws the same ones on every replica."""


@pytest.mark.parametrize(
    "name", mostly_matrix([n for n in PROGRAMS if n not in WITH_DRAWS], ["gan", "adapter"])
)
def test_on_replicas(name, mode, float64, mirrored):
    with mirrored.scope():
        found = case_of(name).accumulate(mode, epochs=1)
    check_same(found, case_of(name).train(epochs=1), EXACT)


@pytest.mark.parametrize("name", mostly_matrix(PROGRAMS, ["gan with average", "wgan-gp"]))
def test_run_eagerly(name, mode, float64):
    case = case_of(name).compiled(run_eagerly=True)
    found = case.accumulate(mode, epochs=1)
    check_same(found, case.train(epochs=1), EXACT)
    assert passes_of(found) == PASSES[name]


@pytest.mark.parametrize("name", mostly_matrix(PROGRAMS, ["gan with average"]))
def test_compiled_by_xla(name, mode, float64):
    found = case_of(name).compiled(jit_compile=True).accumulate(mode, epochs=1)
    check_same(found, case_of(name).train(epochs=1), EXACT)


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
        ("gan with average", not_settled),
        ("teacher", not_settled),
    ],
)
def test_a_wrong_version_is_found(name, wrong, float64, monkeypatch):
    expected = case_of(name).train(epochs=1)
    wrong(monkeypatch)
    with pytest.raises(AssertionError, match="not the same"):
        check_same(case_of(name).accumulate("split", epochs=1), expected, 1e-6)


# The plan.


@pytest.mark.parametrize(
    ("gradients", "values", "state", "plan"),
    [
        ([NONE], NONE, NONE, Plan()),
        ([NONE, NONE, NONE], NONE, NONE, Plan()),
        ([NONE], NONE, 0, Plan(settles=True)),
        ([NONE], 0, 0, Plan((Pass(0, 1, gives_logs=False), Pass(1, 1)))),
        ([NONE, 0], NONE, NONE, Plan((Pass(0, 1, gives_logs=False), Pass(1, 2)))),
        ([NONE, 0], 0, 1, Plan((Pass(0, 1, gives_logs=False), Pass(1, 2)), settles=True)),
        ([NONE, NONE, 0, 1], 1, 1, Plan((Pass(0, 2, gives_logs=False), Pass(2, 4)))),
    ],
)
def test_as_few_passes_as_can_be(gradients, values, state, plan):
    changed = [[] for _ in gradients]
    assert plan_of(Order(changed, gradients, values, state)) == plan
    assert plan.runs_again == (plan != Plan())
    assert Plan().passes == (ALL_UPDATES,)


def test_independent_updates_are_traced_once():
    traced = []

    class Traced(PROGRAMS["four optimizers"]):
        def train_step(self, data):
            traced.append(data)
            return super().train_step(data)

    case_of("four optimizers", Traced).accumulate("split", epochs=1)
    assert len(traced) == 1


def test_the_passes_are_said(capsys):
    case_of("wgan-gp").accumulate("split", epochs=1, verbose=2)
    said = capsys.readouterr().out
    assert "bigbatch: 4 passes over each batch" in said
    case_of("adapter").accumulate("split", epochs=1, verbose=2)
    assert "passes over each batch" not in capsys.readouterr().out


class Fails(Gan):
    """Its second update fails for a sample of the last micro-batch."""

    def train_step(self, data):
        logs = super().train_step(data)
        with tf.GradientTape() as tape:
            fake = self.critic(self.generator(data[1]))
            bad = tf.debugging.check_numerics(fake / data[0][:, :1], "there")
            loss = tf.reduce_mean(bad)
        self.of_generator.apply(*gradients_of(tape, loss, self.generator))
        return logs


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_batch_that_fails_in_a_later_pass_has_not_happened(mode, run_eagerly):
    real = REAL.copy()
    real[20] = 0
    case = replace(case_of("gan", Fails), x=real).compiled(run_eagerly=run_eagerly)
    setting, size = {
        "split": ({"microbatch_size": 8}, 21),
        "window": ({"accumulation_steps": 3}, 7),
    }[mode]
    model = case.build(lambda model: bigbatch.accumulate(model, **setting))
    model.fit(REAL[:21], CODE[:21], batch_size=size, shuffle=False, verbose=0)
    variables = [*model.variables, *model.of_critic.variables, *model.of_generator.variables]
    before = [one.numpy() for one in variables]
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.fit(real[:21], CODE[:21], batch_size=size, shuffle=False, verbose=0)
    metrics = {id(v) for one in model.metrics for v in one.variables}
    for variable, value in paired(variables, before):
        if id(variable) not in metrics:  # which `fit` resets
            np.testing.assert_array_equal(variable.numpy(), value)


class Counting(PROGRAMS["teacher"]):
    """Python code, which cannot be traced, counts the batches and keeps what it has seen."""

    def __init__(self):
        super().__init__()
        self.batches = 0
        self.seen_losses = []

    def train_step(self, data):
        self.batches += 1
        if self.batches % 2:  # every other batch is trained on with other targets
            data = data[0], -data[1]
        logs = super().train_step(data)
        self.seen_losses.append(logs["loss"])
        return {**logs, "rate": self.optimizer.learning_rate, "n": self.optimizer.iterations}


def test_python_code_counts_batches(mode, float64):
    case = case_of("teacher", Counting).compiled(run_eagerly=True)
    expected = case.train(epochs=1)
    found = case.accumulate(mode, epochs=1)
    check_same(found, expected, EXACT)
    assert found.model.batches == expected.model.batches
    assert np.isfinite([float(loss) for loss in found.model.seen_losses]).all()


class Notes:
    """An object of the user's."""

    def __init__(self):
        self.losses = []


class Remembering(keras.Sequential):
    """Python code keeps losses in objects that it has, and trains on what it remembers."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.bank, self.notes = [], Notes()
        self.recent = {"losses": collections.deque(maxlen=50)}

    def train_step(self, data):
        x, y = data
        self.bank.append(tf.reduce_mean(y, 0))
        logs = super().train_step((x, y + len(self.bank) * self.bank[0]))
        self.notes.losses.append(logs["loss"])
        self.recent["losses"].append(logs["loss"])
        return logs


@pytest.mark.filterwarnings("ignore:bigbatch. nothing is accumulated")
def test_trying_leaves_nothing_in_python_objects(float64):
    """One micro-batch per batch is plain Keras, whatever a step remembers."""
    make = lambda: Remembering([keras.Input((4,)), keras.layers.Dense(3)])  # noqa: E731
    case = Case(make, REAL, CODE).compiled(run_eagerly=True)
    expected = case.train()
    with pytest.warns(bigbatch.NotEqualWarning):  # cut, it would remember more
        found = case.train(lambda m: bigbatch.accumulate(m, microbatch_size=50))
    check_same(replace(found, warnings=()), expected, EXACT)
    for one in (found.model, expected.model):
        kept = one.bank, one.notes.losses, one.recent["losses"]
        assert [len(some) for some in kept] == [len(expected.model.bank)] * 3
        assert all(np.isfinite(np.asarray(value)).all() for some in kept for value in some)


class CountsSamples(keras.Sequential):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.counted = 0

    def train_step(self, data):
        self.counted += int(data[0].shape[0])
        return super().train_step(data)


def test_python_code_that_counts_samples_is_named(float64):
    make = lambda: CountsSamples([keras.Input((4,)), keras.layers.Dense(3)])  # noqa: E731
    with pytest.warns(bigbatch.NotEqualWarning, match=r"\.counted'"):
        Case(make, REAL, CODE).compiled(run_eagerly=True).accumulate("split", epochs=1)
