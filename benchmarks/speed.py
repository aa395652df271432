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
from benchmarks.measuring import WARM_UP, Settings, interleaved, ratio, table, write
from benchmarks.work import WORK, Work

K = 8
MODELS = 2
"""Models per candidate: two of a kind differ in speed."""
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
    medians: dict[str, dict[str, float]] = {}
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
                relative, to_full = ratio(values, times[limit]), ratio(values, times[full])
                speed = f"{samples / np.median(values):,.0f}"
                xla = "yes" if jit_compile else "no"
                rows.append([work.name, xla, name, relative, to_full, speed])
                print("  ".join(rows[-1]), flush=True)
                label = work.name + (", XLA" if jit_compile else "")
                middle = float(np.median(values / times[limit]))
                medians.setdefault(label, {})[name] = middle
    notes = [
        f"Micro-batches of {MICROBATCH}, k = {K}, Adam. Median and quartiles of the ratios of "
        f"each round, {MODELS} models of each kind; candidates take turns. The limit makes "
        "the same passes and one update, and adds nothing up. Samples per second change with "
        "the machine; ratios hardly do."
    ]
    write(settings, "speed", "Time per update", table(HEADINGS, rows), notes)
    plots.speed(medians, settings.results / "speed.png")


def measure(
    work: Work, group: dict[str, Any], jit_compile: bool, rounds: int
) -> dict[str, Any]:
    """Return the times of the candidates, round by round, with new models halfway."""
    keras.utils.set_random_seed(0)
    x, y = work.data(MICROBATCH * K * work.updates)
    times: dict[str, Any] = dict.fromkeys(group, np.array([]))
    for part in np.array_split(np.arange(rounds), MODELS):
        if not len(part):
            continue
        runs = {
            name: functools.partial(make(work, jit_compile).run, x, y, K)
            for name, make in group.items()
        }
        for name, values in interleaved(runs, len(part)).items():
            times[name] = np.append(times[name], values[WARM_UP:])
    return times
