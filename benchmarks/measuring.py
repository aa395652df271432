"""Rounds, ratios, allocator bytes; and the page that says under which conditions."""

from __future__ import annotations

import concurrent.futures
import importlib.metadata
import multiprocessing
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import numpy as np

from benchmarks.work import SMALLEST, WORK, Work, loss


@dataclass(frozen=True)
class Settings:
    """How much is measured, and where results go."""

    rounds: int = 15
    is_smoke: bool = False
    """Whether it is only tried out: the smallest work, one round."""
    results: Path = Path(__file__).parent / "results"

    def works(self, *names: str) -> list[Work]:
        """Return the work of these names."""
        return [SMALLEST] if self.is_smoke else [WORK[name] for name in names]

    def some(self, values: Iterable[Any], few: int = 1) -> list[Any]:
        """Return all values, or only the first few if it is tried out."""
        values = list(values)
        return values[:few] if self.is_smoke else values


WARM_UP = 2
REPLICAS = (2, 4)
NOT_MEASURED = "Not measured: GPUs, TPUs, machines with more than the cores named above."


def interleaved(runs: dict[Any, Callable[[], float]], rounds: int) -> dict[Any, Any]:
    """Return the times of every run, in rounds of one run each, and two more to warm up.

    The first traces; in the second some of what `fit` does only later is traced. Every other
    round goes backwards, so that a machine that slows down slows all candidates alike.
    """
    times: dict[Any, list[float]] = {name: [] for name in runs}
    for index in range(rounds + WARM_UP):
        for name in list(runs)[:: -1 if index % 2 else 1]:
            times[name].append(runs[name]())
    return {name: np.array(values) for name, values in times.items()}


def with_models(
    make: Callable[[], dict[Any, Callable[[], float]]], models: int, rounds: int
) -> dict[Any, Any]:
    """Return the times of every run, a row per model, a column per round.

    Two models of a kind differ in speed, more than two rounds do. `make` returns runs of new
    models; all models take turns.
    """
    made = [make() for _ in range(models)]
    times = interleaved(
        {(name, index): run for index, runs in enumerate(made) for name, run in runs.items()},
        rounds,
    )
    return {
        name: np.stack([times[name, index][WARM_UP:] for index in range(models)])
        for name in made[0]
    }


def warm_up() -> None:
    """Let TensorFlow do what it does once in a process, so that nobody is charged for it."""
    model = SMALLEST.make_model()
    model.compile("adam", loss())
    model.fit(*SMALLEST.data(16), verbose=0)


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in a process in which TensorFlow has not started."""
    spawned = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, spawned) as pool:
        return pool.submit(function, *arguments).result()


def mirrored(count: int) -> Any:
    """Return a `MirroredStrategy` on logical CPUs, made before TensorFlow starts."""
    import tensorflow as tf

    (device,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        device, [tf.config.LogicalDeviceConfiguration()] * count
    )
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(count)])


def ratio(times: Any, of: Any) -> str:
    """Return the median of the ratios of each round, and their quartiles."""
    low, middle, high = np.percentile(times / of, [25, 50, 75])
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


def relative(times: Any, of: Any) -> Any:
    """Return, for each model, the median of the ratios of each round."""
    return np.median(times / of, axis=1)


def mean_ratio(times: Any, of: Any) -> str:
    """Return the mean of `relative` over models, and its standard error."""
    ratios = relative(times, of)
    if len(ratios) == 1:
        return f"{ratios[0]:.2f}"
    error = np.std(ratios, ddof=1) / len(ratios) ** 0.5
    return f"{np.mean(ratios):.3f} ± {error:.3f}"


def peak_bytes(run: Callable[[], Any]) -> int:
    """Return the most bytes that a run takes beyond those before it, the median of three."""
    import tensorflow as tf

    for _ in range(WARM_UP):
        run()
    peaks = []
    for _ in range(3):
        tf.config.experimental.reset_memory_stats("CPU:0")
        before = tf.config.experimental.get_memory_info("CPU:0")["current"]
        run()
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"] - before)
    return int(np.median(peaks))


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines]


def write(
    settings: Settings,
    name: str,
    title: str,
    lines: Sequence[str],
    notes: Sequence[str] = (),
    packages: Sequence[str] = ("tensorflow-cpu",),
) -> None:
    """Write `<name>.md`; `packages` are those whose versions matter, beside Keras."""
    versions = ", ".join(
        f"{package} {importlib.metadata.version(package)}"
        for package in (*packages, "keras", "numpy")
    )
    header = [
        f"# {title}",
        "",
        f"`python -m benchmarks {name}`: {_processor()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, {versions}; {settings.rounds} rounds, commit "
        f"{_commit()}.",
        *notes,
        NOT_MEASURED,
        "",
    ]
    settings.results.mkdir(exist_ok=True)
    path = settings.results / f"{name}.md"
    path.write_text("\n".join([*header, *lines]) + "\n")
    print(f"wrote {path}")


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.machine()
