"""Levels and storage of exact batch normalisation: plain arithmetic, run without a framework.

A toy net of blocks h ← w·h/S with S = Σ w·h over all micro-batches stands for batch
normalisation. Its operations are run pass by pass, as planned, on plain numbers.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbatch.core.exact import ExactBatchNorm, Storage
from bigbatch.core.stages import Operation, Stages
from bigbatch.core.storage import passes
from bigbatch.errors import ArgumentError

SAMPLES = [3.0, 5.0, 11.0]


def net(blocks: int, short_branch: bool = False) -> tuple[list[Operation], dict]:
    """Return the operations of a net, forward and backward, and what each computes."""
    listed: list[Operation] = []
    compute = {}

    def add(name, inputs=(), function=None, **options):
        listed.append(Operation(name, tuple(inputs), (name,), **options))
        compute[name] = function
        return name

    x = h = add("x", is_sample=True)
    saved = []
    for i in range(blocks):
        y = add(f"y{i}", [h], lambda h, w=1.0 + i: w * h, is_costly=True)
        s = add(f"s{i}", [y], is_sum=True)
        saved.append((h, y, s))
        h = add(f"h{i}", [y, s], lambda y, s: y / s)
    loss = [h, f"h{0}"] if short_branch else [h]
    out = add("loss", loss, lambda *parts: sum(part**2 for part in parts))
    seed = add("seed", [x], lambda x: x / sum(SAMPLES), is_seed=True)
    d = add("d_last", [seed, h], lambda seed, h: 2 * seed * h)
    for i in reversed(range(blocks)):
        h, y, s = saved[i]
        if short_branch and i == 0 and blocks > 1:
            early = add("d_short", [seed, "h0"], lambda seed, h: 2 * seed * h)
            d = add("d_both", [d, early], lambda a, b: a + b)
        local = add(f"ds_local{i}", [d, y, s], lambda d, y, s: -d * y / s**2)
        ds = add(f"ds{i}", [local], is_sum=True, gradient_of=s)
        dy = add(f"dy{i}", [d, s, ds], lambda d, s, ds: d / s + ds)
        add(f"dw{i}", [dy, h], lambda dy, h: dy * h, is_costly=True)
        d = add(f"dh{i}", [dy], lambda dy, w=1.0 + i: dy * w)
    return listed, {"compute": compute, "results": [out, *(f"dw{i}" for i in range(blocks))]}


def simultaneously(operations, about) -> list[float]:
    """Run all micro-batches side by side, operation by operation: the specification."""
    values = {"x": SAMPLES}
    for one in operations:
        if one.is_sum:
            values[one.name] = [sum(values[one.inputs[0]])] * len(SAMPLES)
        elif one.name != "x":
            columns = zip(*(values[name] for name in one.inputs))
            values[one.name] = [about["compute"][one.name](*column) for column in columns]
    return [sum(values[name]) for name in about["results"]]


def in_stages(operations, about, every, refills=True) -> tuple[list[float], int]:
    """Run passes as planned; return results, and how many tensors are stored at most."""
    stages = Stages(operations, about["results"])
    known: dict = {}
    stored: dict = {}
    totals = dict.fromkeys(range(len(about["results"])), 0.0)
    most = 0
    for one in passes(stages, every, refills=refills):
        sums = dict.fromkeys((operation.name for operation in one.sums), 0.0)
        new = {name: [] for name in one.stores}
        for i, sample in enumerate(SAMPLES):
            values = {**known, "x": sample}
            values.update((name, stored[name][i]) for name in one.reads)
            for operation in one.operations:
                if operation.name not in values:
                    inputs = [values[name] for name in operation.inputs]
                    values[operation.name] = about["compute"][operation.name](*inputs)
            for name in new:
                new[name].append(values[name])
            for operation in one.sums:
                sums[operation.name] += values[operation.inputs[0]]
            for position in one.results:
                totals[position] += values[about["results"][position]]
        known.update(sums)
        stored.update(new)
        most = max(most, len(stored))
        for name in one.frees:
            del stored[name]
    assert not stored, "everything that is stored is freed"
    return list(totals.values()), most


@pytest.mark.parametrize("short_branch", [False, True])
@pytest.mark.parametrize("every", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("refills", [True, False])
@pytest.mark.parametrize("blocks", [0, 1, 2, 7])
def test_passes_compute_what_micro_batches_do_side_by_side(
    blocks, refills, every, short_branch
):
    if short_branch and not blocks:
        return
    operations, about = net(blocks, short_branch)
    found, _ = in_stages(operations, about, every, refills)
    assert found == pytest.approx(simultaneously(operations, about), rel=1e-12)


def test_fewer_checkpoints_store_less():
    operations, about = net(16)
    choices = [(1, True), (4, True), (4, False)]
    most = [in_stages(operations, about, *choice)[1] for choice in choices]
    assert most[1] < most[0] / 1.5
    assert most[2] < most[1]


def test_the_backward_pass_mirrors_the_forward_pass():
    operations, about = net(4, short_branch=True)
    stages = Stages(operations, about["results"])
    assert stages.depth == 4
    assert [stages.level[f"s{i}"] for i in range(4)] == [0, 1, 2, 3]
    assert [stages.level[f"ds{i}"] for i in range(4)] == [7, 6, 5, 4]
    assert stages.level["loss"] == 4
    # The short branch could run with the loss, and would then need what is far away.
    assert stages.level["d_short"] == stages.level["d_both"] == 7


def test_without_a_beginning_of_the_backward_pass_the_results_are_the_same():
    operations, about = net(3)
    plain = [replace(one, is_seed=False) for one in operations]
    found, _ = in_stages(plain, about, 2)
    assert found == pytest.approx(simultaneously(operations, about), rel=1e-12)


def metric(*, kept: bool) -> Stages:
    """Return the stages of a variable that is read, added to and assigned after a sum."""
    operations = [
        Operation("x", (), ("x",), is_sample=True),
        Operation("s", ("x",), ("s",), is_sum=True),
        Operation("read", (), ("read",), reads=("v",)),
        Operation("add", ("read", "s"), ("added",)),
        Operation("assign", ("added",), (), changes=("v",)),
        Operation("read again", (), ("new",), reads=("v",)),
    ]
    return Stages(operations, ["new"], ["v"] if kept else [])


def test_what_every_micro_batch_changes_is_read_in_the_pass_that_changes_it():
    stages = metric(kept=True)
    names = ("read", "add", "assign", "read again")
    assert {stages.level[name] for name in names} == {1}
    assert all(stages.is_local[name] for name in names)
    order = [one.name for one in passes(stages, 1)[-1].operations]
    assert order == list(names)


def test_what_depends_on_sums_alone_changes_once():
    stages = metric(kept=False)
    assert not any(stages.is_local[name] for name in ("read", "add", "assign", "read again"))
    assert not stages.changed
    assert stages.level["read again"] == 1, "it comes after the change, which needs the sum"


def test_a_draw_is_stored_and_not_made_again():
    operations = [
        Operation("x", (), ("x",), is_sample=True),
        Operation("draw", ("x",), ("draw",), is_unrepeatable=True),
        Operation("s", ("draw",), ("s",), is_sum=True),
        Operation("out", ("draw", "s"), ("out",)),
    ]
    first, last = passes(Stages(operations, ["out"]), 100)
    assert first.stores == last.reads == last.frees == {"draw"}
    assert [one.name for one in last.operations] == ["out"]


@pytest.mark.parametrize(("every", "number"), [("all", 1), (8, 8), ("auto", 7)])
def test_choices_of_what_is_stored(every, number):
    assert Storage(ExactBatchNorm(every)).choice(53).every == number


def test_less_and_less_is_stored_if_that_is_open():
    storage = Storage(ExactBatchNorm())
    assert storage.take_all()
    found = [storage.choice(53)]
    while storage.take_less():
        found.append(storage.choice(53))
    assert found == [(1, True), (7, True), (14, False), (53, False)]
    fixed = Storage(ExactBatchNorm(8))
    assert not fixed.take_all()
    assert not fixed.take_less()
    assert fixed.choice(53) == (8, False)


@pytest.mark.parametrize("wrong", [{"checkpoint_every": 0}, {"checkpoint_every": "some"}])
def test_a_wrong_number_is_an_error(wrong):
    with pytest.raises(ArgumentError, match="checkpoint_every"):
        ExactBatchNorm(**wrong)


def test_a_wrong_storage_is_an_error():
    with pytest.raises(ArgumentError, match="host"):
        ExactBatchNorm(storage="disk")
