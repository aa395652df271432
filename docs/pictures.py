"""Draws the pictures of the documentation: `make figures` runs it."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

SIZES = (8, 8, 8, 2)
"""The micro-batches of a batch of 26 samples: the last one is short."""


def gradients() -> list[np.ndarray]:
    """Return the gradients of the samples of each micro-batch, for a model with one weight."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=26)
    y = 2 * x + rng.normal(size=26)
    of_samples = 2 * (3 * x - y) * x  # of (w · x - y)² at w = 3
    return np.split(of_samples, np.cumsum(SIZES)[:-1])


def draw(target: Path) -> None:
    """Draw why the mean of means is wrong, and the weighted mean is right."""
    parts = gradients()
    means = [float(part.mean()) for part in parts]
    full = float(np.concatenate(parts).mean())
    mean_of_means = float(np.mean(means))
    mpl.rcParams.update({"svg.hashsalt": "bigbatch", "svg.fonttype": "none"})
    drawing = Figure(figsize=(7.2, 3.6), layout="constrained", facecolor="white")
    axes = drawing.subplots()
    ends = np.cumsum(SIZES)
    middles = ends - np.array(SIZES) / 2
    axes.bar(middles, means, 0.94 * np.array(SIZES), color="#9ecae1", edgecolor="#3182bd")
    axes.set_xticks(middles, [f"{size} samples" for size in SIZES])
    axes.tick_params(bottom=False)
    axes.axhline(full, color="#2ca02c", lw=2, label=f"full batch, Σ nᵢgᵢ / Σ nᵢ = {full:.2f}")
    axes.axhline(
        mean_of_means,
        color="#d62728",
        lw=2,
        ls="--",
        label=f"mean of means, Σ gᵢ / k = {mean_of_means:.2f}",
    )
    axes.set_xlim(0, ends[-1] + 0.3)
    axes.set_ylim(0, 1.45 * max(means))
    axes.set_xlabel("micro-batches of one batch, as wide as they have samples")
    axes.set_ylabel("gradient of the mean loss")
    axes.legend(loc="upper left", framealpha=1)
    drawing.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(__file__).with_name("gradient-accumulation.svg"))
