"""Counts in place of times: what a micro-batch costs does not grow by accident."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from bigbatch.loops import buffers

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import counts
from benchmarks.work import SMALLEST, loss

NOTED = json.loads((ROOT / "benchmarks/results/counts.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("backend", counts.PACKAGES)
def test_counts_are_the_noted_ones(backend):
    noted = NOTED[backend]
    if noted["versions"] != counts.versions(backend):
        pytest.skip(f"noted with {noted['versions']}: other versions make other graphs")
    found = counts.differences(noted, counts.counted_on(backend))
    assert not found, "\n".join(
        [*found, "If that is intended: python -m benchmarks counts, and say why."]
    )


def test_an_operation_more_for_each_gradient_is_found(monkeypatch):
    def counted():
        update = counts.accumulator(
            SMALLEST.make_model(), loss(), *map(tf.constant, SMALLEST.data(counts.BATCH))
        )
        with counts.graphs_made() as graphs:
            update()
        return {"tiny": {"operations": counts.operations(graphs)}}

    before = counted()
    assert counts.differences(before, counted()) == []
    add_to = buffers.add_to
    monkeypatch.setattr(buffers, "add_to", lambda place, value: add_to(place, value * 1.0))
    (found,) = counts.differences(before, counted())
    assert found.startswith("tiny: operations")


def test_what_is_noted_and_no_longer_counted_is_found():
    assert counts.differences({"tiny": {"bytes": 100}}, {}) == [
        "tiny: bytes 100 noted, None counted"
    ]
    assert counts.differences({"tiny": {"bytes": 100}}, {"tiny": {"bytes": 129}}) == []
    assert counts.differences({"tiny": {"bytes": 100}}, {"tiny": {"bytes": 131}})
