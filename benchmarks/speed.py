"""Time per update, relative to the limit and to the full batch."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np

from benchmarks import plots
from benchmarks.candidates import (
    FULL_BATCH,
    IN_FIT,
    IN_LOOPS,
    LIMIT,
    LOOP_FULL,
    LOOP_LIMIT,
    MICROBATCH,
)
from benchmarks.measuring import (
    Settings,
    mean_ratio,
    relative,
    table,
    with_models,
    write,
)
from benchmarks.work import WORK, Work

K = 8
COMPILED = ("convolutional", "transformer", "wide", "tiny")
HEADINGS = (
    "work",
    "XLA",
    "candidate",
    "relative to the limit",
    "to the full batch",
    "samples per second",
)


def run(settings: Settings) -> None:
    """Measure, and write `speed.md` and `speed.png`."""
    pairs = [(work, jit) for work in settings.works(*WORK) for jit in (False, True)]
    rows: list[list[str]] = []
    means: dict[str, dict[str, float]] = {}
    for work, jit_compile in pairs:
        if jit_compile and work.name not in COMPILED:
            continue
        for group, limit, full in (
            (IN_FIT, LIMIT, FULL_BATCH),
            (IN_LOOPS, LOOP_LIMIT, LOOP_FULL),
        ):
            times = measure(work, group, jit_compile, settings.rounds)
            samples = work.updates * K * MICROBATCH
            for name, values in times.items():
                ratios = [mean_ratio(values, times[one]) for one in (limit, full)]
                speed = f"{samples / np.median(values):,.0f}"
                xla = "yes" if jit_compile else "no"
                rows.append([work.name, xla, name, *ratios, speed])
                print("  ".join(rows[-1]), flush=True)
                label = work.name + (", XLA" if jit_compile else "")
                middle = float(np.mean(relative(values, times[limit])))
                means.setdefault(label, {})[name] = middle
    notes = [
        f"Micro-batches of {MICROBATCH}, k = {K}, Adam. Mean and standard error over three "
        "models of each kind (embedding: two), of the median of the ratios of each round; "
        "candidates take turns. The limit makes the same passes and one update, and adds "
        "nothing up. Samples per second change with the machine; ratios hardly do."
    ]
    write(settings, "speed", "Time per update", table(HEADINGS, rows), notes)
    plots.speed(means, settings.results / "speed.png")


def measure(
    work: Work, group: dict[str, Any], jit_compile: bool, rounds: int
) -> dict[str, Any]:
    """Return the times of the candidates, a row per model."""
    keras.utils.set_random_seed(0)
    x, y = work.data(MICROBATCH * K * work.updates)

    def make() -> dict[str, Any]:
        return {
            name: functools.partial(one(work, jit_compile).run, x, y, K)
            for name, one in group.items()
        }

    return with_models(make, min(work.models, rounds), rounds)
