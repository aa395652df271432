"""What `peer.py` runs in the environment of gradient-accumulator."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import tensorflow as tf
from gradient_accumulator import GradientAccumulateModel

from benchmarks.work import WORK, loss, time_of_epoch

MICROBATCH, K = 16, 8


def measure(work: Any, rounds: int) -> list[list[float]]:
    """Return the times of the peer and of the full batch, round by round."""
    plain, wrapped = work.make_model(), work.make_model()
    wrapped = GradientAccumulateModel(
        accum_steps=K, inputs=wrapped.inputs, outputs=wrapped.outputs
    )
    for model in (plain, wrapped):
        model.compile(tf.keras.optimizers.Adam(1e-4), loss())
    x, y = work.data(MICROBATCH * K * work.updates)
    times = [
        [
            time_of_epoch(wrapped, x, y, batch_size=MICROBATCH),
            time_of_epoch(plain, x, y, batch_size=MICROBATCH * K),
        ]
        for _ in range(rounds + 2)
    ]
    return np.array(times[2:]).T.tolist()


def main() -> None:
    times: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for name, work in WORK.items():
        if not work.peer:
            continue
        try:
            times[name] = measure(work, int(sys.argv[1]))
        except Exception as error:
            times[name], errors[name] = None, f"fails: {type(error).__name__}"
    print(json.dumps({"times": times, "errors": errors}))


if __name__ == "__main__":
    main()
