"""How time per update grows: with k, the number of variables, their bytes, replicas."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import multiprocessing
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
from benchmarks.measuring import WARM_UP, Settings, interleaved, ratio, table, write
from benchmarks.work import SMALLEST, WORK, Work, tiny, wide

STEPS = (1, 2, 4, 8, 16, 32, 64)
REPLICAS = (2, 4)
FIT = (LIMIT, FULL_BATCH, SPLIT, WINDOW, KERAS)
LOOPS = (LOOP_LIMIT, LOOP_FULL, BATCHES, ACCUMULATOR, BY_HAND)


def run(settings: Settings) -> None:
    """Measure, and write `growth.md` and `growth.png`."""
    settings = dataclasses.replace(settings, rounds=min(settings.rounds, 3))
    every = settings.works("tiny", "wide", "transformer", "convolutional")
    lines, curves = ["## With k, in `fit`", ""], {}
    lines += _steps(
        [(work, jit) for work in every for jit in (False, True)], FIT, settings, curves
    )
    lines += ["", "## With k, in loops", ""]
    lines += _steps([(work, False) for work in every[:2]], LOOPS, settings, {})
    lines += ["", "## With the number of variables", ""]
    makers = {
        2 * (layers + 1): Work(functools.partial(tiny, layers)) for layers in (4, 49, 499)
    }
    lines += _sizes("variables", settings.some(makers.items()), settings)
    lines += ["", "## With the bytes of the variables", ""]
    widths = settings.some((256, 1024, 4096))
    makers = {
        f"{4 * (width * (512 + width)) / 2**20:.0f} MiB": Work(functools.partial(wide, width))
        for width in widths
    }
    lines += _sizes("parameters", makers.items(), settings)
    lines += ["", "## With replicas", ""]
    lines += _replicas(settings)
    notes = [
        f"Micro-batches of {MICROBATCH}, Adam; ratios of times per update. Replicas: the "
        "transformer, `MirroredStrategy` on as many logical CPUs of the same cores, the same "
        f"batch, micro-batches of {MICROBATCH} on each."
    ]
    write(settings, "growth", "How time grows", lines, notes)
    plots.growth(settings.some(STEPS, 2), curves, settings.results / "growth.png")


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
    spawned = multiprocessing.get_context("spawn")  # devices are made before TensorFlow starts
    rows = []
    for count in settings.some(REPLICAS):
        with concurrent.futures.ProcessPoolExecutor(1, spawned) as pool:
            times = pool.submit(_on_replicas, count, settings).result()
        rows.append([count, *(ratio(times[one], times[FULL_BATCH]) for one in (SPLIT, WINDOW))])
        print("  ".join(map(str, rows[-1])), flush=True)
    return table(("replicas", "split, to the full batch on them", "window"), rows)


def _on_replicas(count: int, settings: Settings) -> dict[str, Any]:
    import tensorflow as tf

    (device,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        device, [tf.config.LogicalDeviceConfiguration()] * count
    )
    strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(count)])
    work = SMALLEST if settings.is_smoke else WORK["transformer"]
    x, y = work.data(MICROBATCH * 8 * 2)
    with strategy.scope():
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
