"""The guide's recipe for several processes: equal to one, one exchange per update."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import torch

GUIDE = Path(__file__).parent.parent.parent / "docs/guides/torch.md"
TOLERANCE = 1e-6  # three updates of float32
COUNTED = """
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks as hooks
exchanges = []
def counting(state, bucket):
    exchanges.append(1)
    return hooks.allreduce_hook(state, bucket)
parallel.register_comm_hook(None, counting)
"""


def recipe():
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    (block,) = [block for block in blocks if "DistributedDataParallel(model)" in block]
    made = "parallel = DistributedDataParallel(model)\n"
    assert block.count(made) == 1
    return block.replace(made, made + COUNTED) + "print('exchanges', len(exchanges))\n"


def trained(script, directory):
    """Return the weights and the number of exchanges, by two processes."""
    (directory / "train.py").write_text(script)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **place, "RANK": str(rank), "WORLD_SIZE": "2"}
        command = [sys.executable, "train.py"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, cwd=directory, env=environment, **pipes))
    outputs = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    model, _, _ = build()
    model.load_weights(directory / "trained.weights.h5")
    return model.get_weights(), int(outputs[0][0].split("exchanges ")[1])


def build():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)]
    )
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.05)
    optimizer.build(model.trainable_variables)
    return model, optimizer, keras.losses.MeanSquaredError()


def by_one_process():
    model, optimizer, loss_fn = build()
    random = np.random.default_rng(0)
    x = torch.tensor(random.normal(size=(26, 8)), dtype=torch.float32)
    y = torch.tensor(random.normal(size=(26, 1)), dtype=torch.float32)
    for _ in range(3):
        model.zero_grad()
        loss_fn(y, model(x)).backward()
        with torch.no_grad():
            weights = model.trainable_variables
            optimizer.apply([weight.value.grad for weight in weights], weights)
    return model.get_weights()


def largest(some, others):
    return max(float(np.abs(one - other).max()) for one, other in zip(some, others))


@pytest.mark.slow
def test_two_processes_with_different_numbers_of_samples_equal_one(tmp_path):
    weights, exchanges = trained(recipe(), tmp_path)
    assert exchanges == 3  # one per update: all gradients are in one bucket
    assert largest(weights, by_one_process()) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.matrix
def test_the_mean_over_processes_differs(tmp_path):
    """The negative control: each process takes the mean of its own samples."""
    script = recipe()
    wrong = script.replace("* processes / samples", "/ len(x)")
    assert wrong != script
    weights, _ = trained(wrong, tmp_path)
    assert largest(weights, by_one_process()) > 1e-4
