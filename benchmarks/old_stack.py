"""What `peer.py` runs in the environment of gradient-accumulator."""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import tensorflow as tf
from gradient_accumulator import GradientAccumulateModel

import bigbatch
from benchmarks.measuring import with_models
from benchmarks.work import WORK, loss, time_of_epoch

MICROBATCH, K, MODELS = 16, 8, 3
FULL_BATCH, PEER, WINDOW, SPLIT = (
    "full batch",
    "gradient-accumulator",
    "bigbatch, window",
    "bigbatch, split",
)


def candidates(work: Any) -> dict[str, tuple[Any, int]]:
    """Return new models, and the size of the batches that each is trained with."""
    inner = work.make_model()
    peer = GradientAccumulateModel(accum_steps=K, inputs=inner.inputs, outputs=inner.outputs)
    window = bigbatch.accumulate(work.make_model(), accumulation_steps=K)
    split = bigbatch.accumulate(work.make_model(), microbatch_size=MICROBATCH)
    return {
        FULL_BATCH: (work.make_model(), MICROBATCH * K),
        PEER: (peer, MICROBATCH),
        WINDOW: (window, MICROBATCH),
        SPLIT: (split, MICROBATCH * K),
    }


def measure(work: Any, rounds: int) -> dict[str, Any]:
    """Return the times of every candidate, a row per model, a column per round."""
    x, y = work.data(MICROBATCH * K * work.updates)

    def make() -> dict[str, Any]:
        runs = {}
        for name, (model, size) in candidates(work).items():
            model.compile(tf.keras.optimizers.Adam(1e-4), loss())
            runs[name] = functools.partial(time_of_epoch, model, x, y, batch_size=size)
        return runs

    times = with_models(make, MODELS, rounds)
    return {name: values.tolist() for name, values in times.items()}


def main() -> None:
    found: dict[str, Any] = {}
    for name, work in WORK.items():
        if not work.peer:
            continue
        try:
            found[name] = measure(work, int(sys.argv[1]))
        except Exception as error:
            found[name] = f"fails: {type(error).__name__}"
    print(json.dumps(found))


if __name__ == "__main__":
    main()
