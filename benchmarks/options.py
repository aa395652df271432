"""What `NoiseScale`, `coupled=True` and `microbatch_size="auto"` cost."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np

import bigbatch
from benchmarks.candidates import MICROBATCH, Split
from benchmarks.measuring import WARM_UP, Settings, interleaved, ratio, table, warm_up, write
from bigbatch.core.noise import ALL_OF_FIRST, ONE_IN

K = 8
MODELS = 3
"""Models per candidate: two of a kind differ in speed, tiny ones by 5 % and more."""
COLUMNS = ("the same again", "NoiseScale", "Monitor", "coupled=True")


class Coupled(Split):
    """Split mode with a loss that may meet rows: one more forward pass."""

    coupled = True


class Auto(Split):
    """Split mode with a size that is found by trying."""

    setting = "auto"


def _models(kind: Any, work: Any, *callbacks: Any) -> list[Any]:
    """Return models of a kind, each with callbacks of its own."""
    lists = [[make() for make in callbacks] for _ in range(MODELS)]
    return [(kind(work, False, callbacks=own), own) for own in lists]


def run(settings: Settings) -> None:
    """Measure, and write `options.md`."""
    warm_up()
    rows = []
    for work in settings.works("tiny", "transformer", "wide", "convolutional"):
        keras.utils.set_random_seed(0)
        # As many that every round has the same part of updates that are looked at.
        x, y = work.data(MICROBATCH * K * max(work.updates, ONE_IN))
        candidates: dict[str, list[Any]] = {
            "plain": _models(Split, work),
            "the same again": _models(Split, work),
            "NoiseScale": _models(Split, work, bigbatch.NoiseScale),
            "Monitor": _models(Split, work, bigbatch.Monitor),
        }
        if work.name != "convolutional":  # BatchNormalization lets samples meet
            candidates["coupled=True"] = _models(Coupled, work)
        for model, (noise,) in candidates["NoiseScale"]:
            while noise.estimate.updates < ALL_OF_FIRST:
                model.run(x, y, K)
        runs = {
            (one, index): functools.partial(candidates[one][index][0].run, x, y, K)
            for index in range(MODELS)
            for one in candidates
        }
        by_model = interleaved(runs, settings.rounds)
        times = {
            one: np.mean([by_model[one, index] for index in range(MODELS)], 0)
            for one in candidates
        }
        # No limit: after the trial of the whole batch it is the full batch.
        first = Auto(work, False).run(x, y, K) / times["plain"][0]
        steady = {one: values[WARM_UP:] for one, values in times.items()}
        cells = [
            ratio(steady[one], steady["plain"]) if one in steady else "–" for one in COLUMNS
        ]
        rows.append([work.name, *cells, f"{first:.2f}"])
        print("  ".join(rows[-1]), flush=True)
    headings = ("work", *COLUMNS, "first epoch with auto")
    notes = [
        f"Split mode, micro-batches of {MICROBATCH}, k = {K}: time per update relative to the "
        f"same without, mean of {MODELS} models each. *The same again* is the same once more "
        "with other models: what chance does. "
        f"`NoiseScale` has seen its first {ALL_OF_FIRST} updates and looks at one in {ONE_IN}. "
        "For `auto`: the first epoch, in which it tries sizes, relative to the first epoch of "
        "a fixed size; both trace."
    ]
    write(settings, "options", "What options cost", table(headings, rows), notes)
