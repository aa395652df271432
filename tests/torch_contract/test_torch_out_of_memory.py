"""Out of memory on torch, for real: in processes whose address space is limited."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = Path(__file__).parent.parent / "torch_out_of_memory_probe.py"
TOLERANCE = 5e-6  # one update in float32


def probe(what):
    # What is freed goes back at once, or it would be there to be used below the limit.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    run = subprocess.run(
        [sys.executable, str(PROBE), what],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_size_that_was_chosen_before_is_halved():
    found = probe("recovers")
    assert found["size"] < 64
    assert "out of memory with micro-batches of 64 samples" in found["warnings"][0]
    assert found["iterations"] == 2
    assert found["difference"] <= TOLERANCE
    assert found["difference of logs"] <= TOLERANCE


@pytest.mark.slow
def test_auto_chooses_a_size_that_fits():
    found = probe("auto")
    assert found["size"] < 64
    assert found["difference"] <= TOLERANCE


@pytest.mark.slow
def test_a_size_that_does_not_fit_changes_nothing():
    found = probe("fixed")
    said = ("can't allocate memory", "could not create a primitive")  # torch, or oneDNN
    assert any(one in found["error"] for one in said)
    assert found["error"].startswith("OutOfMemoryError")
    assert found["changed"] == 0
    assert found["random"]
