"""How time per update grows: with k, the number of variables, their bytes, replicas."""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
from typing import Any

import keras
import numpy as np

from benchmarks import plots
from benchmarks.candidates import FULL_BATCH, IN_FIT, KERAS, LIMIT, MICROBATCH, SPLIT, WINDOW
from benchmarks.measuring import WARM_UP, Settings, interleaved, ratio, table, write
from benchmarks.work import SMALLEST, WORK, Work, tiny, wide

STEPS = (1, 2, 4, 8, 16, 32, 64)
REPLICAS = (2, 4)


def run(settings: Settings) -> None:
    """Measure, and write `growth.md` and `growth.png`."""
    lines = ["## With k", ""]
    curves: dict[str, dict[str, list[float]]] = {}
    rows = []
    for work in settings.works("tiny", "wide", "transformer", "convolutional"):
        for k, times in _with_k(work, settings):
            name, per = work.name, times[FULL_BATCH]
            for candidate, values in times.items():
                relative = float(np.median(values / times[LIMIT]))
                curves.setdefault(name, {}).setdefault(candidate, []).append(relative)
            ours = [ratio(times[one], times[LIMIT]) for one in (SPLIT, WINDOW, KERAS)]
            rows.append([name, k, *ours, ratio(times[SPLIT], per)])
            print("  ".join(map(str, rows[-1])), flush=True)
    headings = ("work", "k", *(f"{one}, to the limit" for one in (SPLIT, WINDOW, KERAS)))
    lines += table((*headings, "split, to the full batch"), rows)
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
        "batch."
    ]
    write(settings, "growth", "How time grows", lines, notes)
    plots.growth(settings.some(STEPS, 2), curves, settings.results / "growth.png")


def _with_k(work: Work, settings: Settings) -> Any:
    keras.utils.set_random_seed(0)
    candidates = {
        name: IN_FIT[name](work, False) for name in (LIMIT, FULL_BATCH, SPLIT, WINDOW, KERAS)
    }
    for k in settings.some(STEPS, 2):
        updates = max(1, 16 // k) if work.name == "tiny" else max(1, 4 // k)
        x, y = work.data(MICROBATCH * k * updates)
        runs = {
            name: functools.partial(candidate.run, x, y, k)
            for name, candidate in candidates.items()
        }
        times = interleaved(runs, min(settings.rounds, 3))
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
        times = interleaved(runs, min(settings.rounds, 3))
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
        times = interleaved(runs, min(settings.rounds, 3))
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
