"""What `peer.py` runs in the environment of gradient-accumulator."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from gradient_accumulator import GradientAccumulateModel

from benchmarks.work import WORK, loss

MICROBATCH, K = 16, 8


def epoch(model: Any, x: Any, y: Any, size: int) -> float:
    """Return how long an epoch takes, without what comes before and after it."""
    clock = [0.0, 0.0]
    callback = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda *_: clock.__setitem__(0, time.perf_counter()),
        on_epoch_end=lambda *_: clock.__setitem__(1, time.perf_counter()),
    )
    model.fit(x, y, batch_size=size, shuffle=False, verbose=0, callbacks=[callback])
    return clock[1] - clock[0]


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
        [epoch(wrapped, x, y, MICROBATCH), epoch(plain, x, y, MICROBATCH * K)]
        for _ in range(rounds + 1)
    ]
    return np.array(times[1:]).T.tolist()


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
    # As arrays again, for ratios.
    print(json.dumps({"times": times, "errors": errors}))


if __name__ == "__main__":
    main()
