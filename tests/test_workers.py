"""Many machines: two real processes on this one, connected by TensorFlow's own collectives."""

from __future__ import annotations

import json

import numpy as np
import pytest

from problems import TOLERANCE, embedding_problem, optimizers, train_full_batch
from workers.cluster import WorkerError, run_workers

UPDATES = 3


@pytest.mark.slow
def test_two_workers_equal_the_full_batch():
    expected = train_full_batch(embedding_problem(), optimizers()["adam"], UPDATES)
    for output in run_workers("accumulator.py"):
        weights = [np.array(values) for values in json.loads(output.splitlines()[-1])]
        for one, two in zip(weights, expected.get_weights()):
            np.testing.assert_allclose(one, two, rtol=0, atol=TOLERANCE["float64"])


@pytest.mark.slow
def test_when_a_worker_dies_none_is_left_behind():
    with pytest.raises(WorkerError, match=r"exit codes \[-?\d+, 3\]"):
        run_workers("accumulator.py", "die", timeout=120)
