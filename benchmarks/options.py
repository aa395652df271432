"""What `NoiseScale`, `coupled=True` and `microbatch_size="auto"` cost."""

from __future__ import annotations

import functools
from typing import Any

import keras

import bigbatch
from benchmarks.candidates import MICROBATCH, Split
from benchmarks.measuring import Settings, mean_ratio, table, warm_up, with_models, write
from benchmarks.work import Work

K = 8
MODELS = {"tiny": 12, "transformer": 4, "wide": 10, "convolutional": 10}
"""How many of each kind; two of one kind differ by more than what is looked for."""
COLUMNS = ("NoiseScale", "Monitor", "coupled=True")


class Coupled(Split):
    """Split mode with a loss that may meet rows: one more forward pass."""

    coupled = True


class Auto(Split):
    """Split mode with a size that is found by trying."""

    setting = "auto"


def run(settings: Settings) -> None:
    """Measure, and write `options.md`."""
    warm_up()
    rows = []
    for work in settings.works("tiny", "transformer", "wide", "convolutional"):
        keras.utils.set_random_seed(0)
        x, y = work.data(MICROBATCH * K * work.updates)
        make = functools.partial(_runs, work, x, y)
        times = with_models(make, MODELS.get(work.name, 1), settings.rounds)
        plain, auto = (kind(work, False).run(x, y, K) for kind in (Split, Auto))
        cells = [
            mean_ratio(times[one], times["plain"]) if one in times else "–" for one in COLUMNS
        ]
        rows.append([work.name, *cells, f"{auto / plain:.2f}"])
        print("  ".join(rows[-1]), flush=True)
    headings = ("work", *COLUMNS, "first epoch with auto")
    notes = [
        f"Split mode, micro-batches of {MICROBATCH}, k = {K}: time per update relative to the "
        "same without, mean and standard error over several models each ("
        + ", ".join(f"{name}: {count}" for name, count in MODELS.items())
        + "). For `auto`: the first epoch, in which it tries sizes, relative to the first "
        "epoch of a fixed size; both trace."
    ]
    write(settings, "options", "What options cost", table(headings, rows), notes)


def _runs(work: Work, x: Any, y: Any) -> dict[str, Any]:
    """Return one run of new models for each option, and one without."""
    noise = bigbatch.NoiseScale()
    candidates = {
        "plain": Split(work, False),
        "NoiseScale": Split(work, False, callbacks=[noise]),
        "Monitor": Split(work, False, callbacks=[bigbatch.Monitor()]),
    }
    if work.name != "convolutional":  # BatchNormalization lets samples meet
        candidates["coupled=True"] = Coupled(work, False)
    return {name: functools.partial(one.run, x, y, K) for name, one in candidates.items()}
