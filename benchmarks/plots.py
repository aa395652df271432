"""The plots of the results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.candidates import (
    ACCUMULATOR,
    BATCHES,
    BY_HAND,
    FULL_BATCH,
    KERAS,
    LIMIT,
    SPLIT,
    WINDOW,
)

mpl.use("Agg")
from matplotlib import pyplot as plt

COLOURS = {
    SPLIT: "#1f5fa8",
    WINDOW: "#5b9bd5",
    BATCHES: "#123a66",
    ACCUMULATOR: "#8fc1ea",
    KERAS: "#c44e52",
    BY_HAND: "#dd8452",
    FULL_BATCH: "#8c8c8c",
}


def speed(means: dict[str, dict[str, float]], path: Path) -> None:
    """Draw the time per update of each candidate, relative to the limit."""
    shown = (SPLIT, WINDOW, BATCHES, ACCUMULATOR, KERAS, BY_HAND)
    figure, axes = plt.subplots(figsize=(10, 4.6), layout="constrained")
    wide = 0.8 / len(shown)
    for index, name in enumerate(shown):
        heights = [of.get(name, 0) for of in means.values()]
        where = [place + (index - len(shown) / 2 + 0.5) * wide for place in range(len(means))]
        axes.bar(where, heights, wide, label=name, color=COLOURS[name])
    full = [of[FULL_BATCH] for of in means.values()]
    left = [place - 0.45 for place in range(len(means))]
    right = [place + 0.45 for place in range(len(means))]
    axes.hlines(full, left, right, color=COLOURS[FULL_BATCH], linewidth=2.5, label=FULL_BATCH)
    axes.axhline(1, color="black", linewidth=1, linestyle="--")
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    axes.text(len(means) - 0.5, 1, "limit", va="center", fontsize=9, bbox=box)
    axes.set_xlim(-0.6, len(means))
    axes.set_xticks(range(len(means)), means, rotation=30, ha="right")
    axes.set_ylabel("time per update / limit")
    axes.set_title("Eight micro-batches per update: time relative to the passes alone")
    figure.legend(loc="outside lower center", ncols=4, fontsize=9)
    axes.grid(axis="y", alpha=0.3)
    _save(figure, path)


def growth(steps: Sequence[int], curves: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draw how time per update, relative to the limit, changes with k."""
    rows, columns = -(-len(curves) // 3), min(3, len(curves))
    figure, every = plt.subplots(
        rows, columns, figsize=(3.4 * columns, 3 * rows), layout="constrained", squeeze=False
    )
    for axes, (work, of) in zip(every.flat, curves.items()):
        for name in (SPLIT, WINDOW, KERAS):
            axes.plot(steps, of[name], "o-", color=COLOURS[name], label=name)
        _over_k(axes, steps, work)
        axes.axhline(1, color="black", linewidth=1, linestyle="--", label=LIMIT)
        axes.set_ylim(bottom=0)
    for axes in every.flat[len(curves) :]:
        axes.remove()
    for axes in every[:, 0]:
        axes.set_ylabel("time per update / limit")
    every[0][0].legend(fontsize=8)
    _save(figure, path)


def memory(steps: Sequence[int], peaks: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draw the peak memory of an update against k; what is tiny says nothing."""
    peaks = {work: of for work, of in peaks.items() if work != "tiny"} or peaks
    figure, every = plt.subplots(
        1, len(peaks), figsize=(3 * len(peaks) + 1, 3.4), layout="constrained", squeeze=False
    )
    for axes, (work, of) in zip(every[0], peaks.items()):
        for name in (FULL_BATCH, KERAS, BY_HAND, WINDOW, SPLIT):
            axes.plot(steps, of[name], "o-", color=COLOURS[name], label=name)
        _over_k(axes, steps, work)
        axes.set_ylim(bottom=0)
    every[0][0].set_ylabel("peak memory of an update (MiB)")
    every[0][0].legend(fontsize=8)
    _save(figure, path)


def _over_k(axes: Any, steps: Sequence[int], title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(steps, [str(k) for k in steps])
    axes.set_xlabel("micro-batches per update")
    axes.set_title(title)
    axes.grid(alpha=0.3)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=130)
    print(f"wrote {path}")
