"""Bytes and time per update between two processes, and what they say for many more."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring import Settings, table, write

ROOT = Path(__file__).parents[1]
REPLICAS = (2, 8, 64, 1024)
STEPS = (1, 8, 64)


def run(settings: Settings) -> None:
    """Measure, and write `workers.md`."""
    sys.path.insert(0, str(ROOT / "tests"))
    from workers.cluster import run_workers

    script = str(Path(__file__).with_name("worker.py"))
    output = run_workers(script, *(["smoke"] if settings.is_smoke else []), timeout=900)[0]
    measured = json.loads(output.splitlines()[-1])
    size = measured["gradient bytes"]
    rows = [
        [
            name,
            one["reductions"],
            f"{one['bytes'] / 2**20:.2f}",
            f"{one['bytes'] / size:.2f}",
            f"{one['seconds'] / measured['updates']['bigbatch, k = 1']['seconds']:.2f}",
        ]
        for name, one in measured["updates"].items()
    ]
    lines = table(
        (
            "an update of each worker",
            "reductions",
            "MiB on the loopback",
            "in gradient sets",
            "time, to k = 1",
        ),
        rows,
    )
    alpha, beta = cost_of_reduction(measured["reductions"])
    lines += ["", *_model(alpha, beta, measured, size)]
    notes = [
        "Two `MultiWorkerMirroredStrategy` processes on 127.0.0.1, the wide net "
        f"({size / 2**20:.1f} MiB of gradients), micro-batches of 16 on each worker, in `fit`. "
        "Bytes are those of the loopback interface: both directions, headers, and what workers "
        "tell each other besides. Of the two reductions of `fit` one is of a single number: "
        "TensorFlow's iterator asks whether any worker has data left."
    ]
    write(settings, "workers", "Past one machine", lines, notes)


def cost_of_reduction(measured: list[tuple[int, float]]) -> tuple[float, float]:
    """Return α and β of α + β · bytes, from sizes and seconds, each as important."""
    sizes, seconds = np.array(measured).T
    design = np.stack([np.ones_like(sizes), sizes], 1) / seconds[:, None]
    (alpha, beta), *_ = np.linalg.lstsq(design, np.ones_like(seconds), rcond=None)
    return max(0.0, float(alpha)), float(beta)


def reduction(alpha: float, beta: float, size: int, replicas: int) -> float:
    """Return the seconds of a ring reduction: 2(R - 1) messages of 1/R of the bytes each."""
    messages = 2 * (replicas - 1)
    return messages * (alpha / 2 + beta * size / replicas)


def _model(alpha: float, beta: float, measured: dict[str, Any], size: int) -> list[str]:
    rows = []
    for k, local in measured["local"].items():
        predicted = local + reduction(alpha, beta, size, 2)
        found = measured["updates"][f"bigbatch, k = {k}"]["seconds"]
        rows.append([k, f"{predicted / found:.2f}"])
    one_pass = (measured["local"]["8"] - measured["local"]["1"]) / 7
    rest = max(0.0, measured["local"]["1"] - one_pass)
    scaling = []
    for replicas in REPLICAS:
        cells = [replicas]
        for every in (False, True):
            for k in STEPS:
                busy = k * one_pass + rest
                waiting = reduction(alpha, beta, size, replicas) * (k if every else 1)
                cells.append(f"{busy / (busy + waiting):.0%}")
        scaling.append(cells)
    return [
        "## The cost model",
        "",
        "An update on R replicas takes k passes, one ring reduction of the gradients, and the "
        "optimizer: T = k · c + 2(R − 1) · (α + β · B / R) + a, with α the time of a message, "
        "β that of a byte, B the bytes of one gradient set.",
        "",
        f"Measured here by reductions of {len(measured['reductions'])} sizes between the two "
        f"processes: α = {1e3 * alpha / 2:.2f} ms, 1/β = {1 / beta / 2**20:.0f} MiB/s. By "
        f"passes without a reduction, at the same time in both: c = {1e3 * one_pass:.1f} ms, "
        f"a = {1e3 * rest:.1f} ms.",
        "",
        "The model against the measured updates:",
        "",
        *table(("k", "predicted / measured"), rows),
        "",
        "What it says for more replicas on such a network: the part of the time in which "
        "replicas compute.",
        "",
        *table(
            (
                "replicas",
                *(f"k = {k}, one reduction" for k in STEPS),
                *(f"k = {k}, one per micro-batch" for k in STEPS),
            ),
            scaling,
        ),
        "",
        "One reduction per update is spread over k passes: what is lost to communication falls "
        "as 1/k. With a reduction per micro-batch it does not fall. The number of messages "
        "grows with R, the bytes of each replica do not: 2(R − 1)/R · B. Two processes on one "
        "machine share its cores and its memory; α and β of a real network have to be put in.",
    ]
