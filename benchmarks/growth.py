"""How time per update grows: with k, the number of variables, their bytes, replicas."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import keras
import numpy as np

from benchmarks import plots
from benchmarks.candidates import (
    ACCUMULATOR,
    BATCHES,
    BY_HAND,
    FULL_BATCH,
    IN_FIT,
    IN_LOOPS,
    KERAS,
    LIMIT,
    LOOP_FULL,
    LOOP_LIMIT,
    MICROBATCH,
    SPLIT,
    WINDOW,
)
from benchmarks.measuring import (
    REPLICAS,
    WARM_UP,
    Settings,
    in_new_process,
    interleaved,
    mirrored,
    ratio,
    table,
    write,
)
from benchmarks.speed import COMPILED
from benchmarks.work import DEEP, WIDE, Work

STEPS = (1, 2, 4, 8, 16, 32, 64)
FIT = (LIMIT, FULL_BATCH, SPLIT, WINDOW, KERAS)
LOOPS = (LOOP_LIMIT, LOOP_FULL, BATCHES, ACCUMULATOR, BY_HAND)


def run(settings: Settings) -> None:
    """Measure, and write `growth.md` and `growth.png`."""
    settings = dataclasses.replace(settings, rounds=min(settings.rounds, 3))
    works = settings.works("tiny", "wide", "transformer", "convolutional", "embedding")
    lines, curves = ["## With k, in `fit`", ""], {}
    lines += _steps(_pairs(works), FIT, settings, curves)
    lines += ["", "## With k, in loops", ""]
    lines += _steps([(work, False) for work in works[:2]], LOOPS, settings, {})
    lines += ["", "## With the number of variables", ""]
    lines += _sizes("variables", settings.some(DEEP.items()), settings)
    lines += ["", "## With the bytes of the variables", ""]
    lines += _sizes("parameters", settings.some(WIDE.items()), settings)
    lines += ["", "## With replicas", ""]
    lines += _replicas(settings)
    notes = [
        f"Micro-batches of {MICROBATCH}, Adam; ratios of times per update. Replicas: the "
        "transformer, `MirroredStrategy` on as many logical CPUs of the same cores, the same "
        f"batch, micro-batches of {MICROBATCH} on each. What is missing here is in "
        "[speed.md](speed.md) for k = 8: loops of other work and with XLA, mixed bfloat16."
    ]
    write(settings, "growth", "How time grows", lines, notes)
    plots.growth(settings.some(STEPS, 2), curves, settings.results / "growth.png")


def _pairs(works: list[Work]) -> list[tuple[Work, bool]]:
    """Return work as it is, and what of it XLA compiles."""
    as_it_is = [(work, False) for work in works]
    return as_it_is + [(work, True) for work in works if work.name in COMPILED]


def _steps(
    works: list[tuple[Work, bool]], names: tuple[str, ...], settings: Settings, curves: Any
) -> list[str]:
    """Return a table of ratios for every k; note the medians of `fit` without XLA in `curves`.

    The first of `names` is the limit, the second the full batch.
    """
    limit, full, *others = names
    rows = []
    for work, jit_compile in works:
        for k, times in _with_k(work, jit_compile, names, settings):
            if not jit_compile:
                for name in others:
                    relative = float(np.median(times[name] / times[limit]))
                    curves.setdefault(work.name, {}).setdefault(name, []).append(relative)
            ratios = [ratio(times[one], times[limit]) for one in others]
            to_full = ratio(times[others[0]], times[full])
            rows.append([work.name, "yes" if jit_compile else "no", k, *ratios, to_full])
            print("  ".join(map(str, rows[-1])), flush=True)
    headings = (f"{one}, to the limit" for one in others)
    return table(("work", "XLA", "k", *headings, f"{others[0]}, to the full batch"), rows)


def _with_k(work: Work, jit_compile: bool, names: tuple[str, ...], settings: Settings) -> Any:
    keras.utils.set_random_seed(0)
    candidates = {name: {**IN_FIT, **IN_LOOPS}[name](work, jit_compile) for name in names}
    for k in settings.some(STEPS, 2):
        updates = max(4, 64 // k) if work.name == "tiny" else max(2, 16 // k)
        x, y = work.data(MICROBATCH * k * updates)
        runs = {
            name: functools.partial(candidate.run, x, y, k)
            for name, candidate in candidates.items()
        }
        times = interleaved(runs, settings.rounds)
        yield k, {name: values[WARM_UP:] for name, values in times.items()}


def _replicas(settings: Settings) -> list[str]:
    """Return a table for `MirroredStrategy` on logical CPUs, which share the same cores."""
    rows = []
    for count in settings.some(REPLICAS):
        times = in_new_process(_on_replicas, count, settings)
        rows.append([count, *(ratio(times[one], times[FULL_BATCH]) for one in (SPLIT, WINDOW))])
        print("  ".join(map(str, rows[-1])), flush=True)
    return table(("replicas", "split, to the full batch on them", "window"), rows)


def _on_replicas(count: int, settings: Settings) -> dict[str, Any]:
    (work,) = settings.works("transformer")
    with mirrored(count).scope():
        x, y = work.data(MICROBATCH * 8 * 2)
        runs = {
            name: functools.partial(IN_FIT[name](work, False).run, x, y, 8)
            for name in (FULL_BATCH, SPLIT, WINDOW)
        }
        times = interleaved(runs, settings.rounds)
    return {name: values[WARM_UP:] for name, values in times.items()}


def _sizes(what: str, makers: Any, settings: Settings) -> list[str]:
    rows = []
    for size, work in makers:
        keras.utils.set_random_seed(0)
        x, y = work.data(MICROBATCH * 8 * 2)
        runs = {
            name: functools.partial(IN_FIT[name](work, False).run, x, y, 8)
            for name in (LIMIT, FULL_BATCH, SPLIT, WINDOW)
        }
        times = interleaved(runs, settings.rounds)
        first = [f"{times[name][0] / times[FULL_BATCH][0]:.2f}" for name in (SPLIT, WINDOW)]
        steady = {name: values[WARM_UP:] for name, values in times.items()}
        ours = [ratio(steady[name], steady[LIMIT]) for name in (SPLIT, WINDOW)]
        rows.append([size, *ours, *first])
        print("  ".join(map(str, rows[-1])), flush=True)
    return table(
        (
            what,
            "split, to the limit",
            "window, to the limit",
            "first call of split, to that of the full batch",
            "of window",
        ),
        rows,
    )
