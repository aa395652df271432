"""Figures of the results of callbacks."""

from __future__ import annotations

from typing import Any, Sequence

from bigbatch.core.drawing import Drawing
from bigbatch.core.noise import Estimate


def noise_figure(history: Sequence[Estimate]) -> Any:
    """Return a Matplotlib figure of the critical batch size, epoch by epoch."""
    drawing = Drawing(figsize=(7, 3.8), layout="constrained")
    axes = drawing.subplots()
    draw_noise(axes, history)
    return drawing


def draw_noise(axes: Any, history: Sequence[Estimate]) -> None:
    """Draw the critical batch size with its interval, and the batch that was trained with."""
    known = [
        (epoch, one.critical_batch_size, *one.interval)
        for epoch, one in enumerate(history, 1)
        if one.interval is not None
    ]
    if known:
        epochs, critical, low, high = zip(*known)
        axes.fill_between(epochs, low, high, color="tab:blue", alpha=0.2, label="95 %")
        axes.plot(epochs, critical, "o-", color="tab:blue", label="critical batch size")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    else:
        axes.text(0.5, 0.5, "not yet known", ha="center", transform=axes.transAxes)
    if history:
        axes.axhline(history[-1].batch_size, color="tab:green", ls="--", label="your batch")
        axes.set_xlim(0.5, len(history) + 0.5)
    axes.set_xlabel("epoch")
    axes.set_ylabel("samples")
    axes.set_title("Which batch size is worth having")
    axes.grid(alpha=0.3)
    axes.legend()
