"""What needs processes of its own: no TensorFlow, little memory, several devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers.cluster import run_workers

HERE = Path(__file__).parent


def run(program, *arguments):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment.pop("XLA_FLAGS", None)
    environment.pop("JAX_ENABLE_X64", None)
    command = [sys.executable, str(HERE / program), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_it_trains_where_tensorflow_is_not_installed():
    found = run("without_tensorflow_probe.py")
    assert found["tensorflow"] is False
    assert found["split"] <= 5e-6
    assert found["window"] <= 5e-6


@pytest.mark.slow
def test_out_of_memory_is_recovered_inside_fit():
    """Real: the address space of the process is limited, and XLA fails to allocate."""
    found = run("out_of_memory_probe.py", "auto")
    assert "error" not in found
    assert "out of memory with micro-batches of 96" in found["warnings"][0]
    assert 0 < found["size"] < 96
    assert found["updates"] == 2
    assert found["difference"] <= 5e-6


@pytest.mark.slow
def test_out_of_memory_with_a_fixed_size_says_what_fits_and_changes_nothing():
    found = run("out_of_memory_probe.py", "fixed")
    assert "microbatch_size=96, with which the device runs out of memory" in found["error"]
    assert "would fit" in found["error"]
    assert found["weights are as before"]
    assert found["updates"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_several_devices_equal_one_and_reduce_once(devices, tmp_path):
    """Masks, clipping, tails, dropout, batches that do not divide by the devices.

    Collectives are counted in all programs that were compiled.
    """
    found = run("devices_probe.py", str(devices), str(tmp_path))
    for way in ("split", "odd", "streamed", "no sum", "parts of weights"):
        assert found[way] <= 5e-6, way
    assert found["half the batch"] > 1e-2  # the negative control
    # Nothing in micro-batches, and one all-reduce of everything for an update.
    assert found["collectives of split"] == {"add": 0, "add_on_shards": 0, "reduced": 1}
    # The same program reduces what another model has added up.
    assert found["collectives of odd"] == {"add": 0, "add_on_shards": 0}
    # Another one for the numbers that are logged before a window is complete.
    assert found["collectives of streamed"]["add_on_shards"] == 0
    assert found["collectives of streamed"]["reduced"] == 1
    # What a device cannot add up by itself is reduced in every micro-batch, and that is said.
    assert found["collectives of no sum"]["add"] > 0
    (line,) = found["said"]
    assert "'largest/largest' is not a sum over" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "cases"),
    [
        (1, ["split", "streamed"]),
        pytest.param(2, ["split", "streamed", "summed"], marks=pytest.mark.matrix),
    ],
)
def test_two_processes_equal_one_and_reduce_once(devices, cases, tmp_path, monkeypatch):
    """Real ones. Masks, clipping, dropout, tails, weights, metrics; as plain Keras there."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    probe = str(HERE / "processes_probe.py")
    arguments = str(devices), str(tmp_path), *cases
    for output in run_workers(probe, *arguments, workers=2, timeout=200):
        (found,) = (json.loads(line) for line in output.splitlines() if line[:1] == "{")
        assert found["processes"] == 2
        assert found["plain"] <= 1e-12
        for way in cases:
            assert found[way] <= 1e-8, way  # in float64: see docs/guides/jax.md, "Precision"
        assert found["smaller batch"] > 1e-3  # the negative control
        for way in cases:
            # Nothing in micro-batches, and one program that reduces, once per update.
            programs = found[f"collectives of {way}"]
            assert programs["add_on_shards"] == 0
            assert programs["reduced_of_all"] == 1
        assert "several processes train, where 'largest/largest' is not a sum" in found["error"]
