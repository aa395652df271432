"""The pictures of the demo."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np

from bigbatch.demo.sizes import LIMIT


def _difference(some: dict[str, Any], prefix: str, others: dict[str, Any], full: str) -> float:
    expected = [value for name, value in others.items() if name.startswith(full)]
    mine = [value for name, value in some.items() if name.startswith(prefix)]
    return max(float(np.max(np.abs(one - two))) for one, two in zip(mine, expected))


def differences(weights: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the largest difference from the full batch, for each way to accumulate."""
    small, free = weights["small"], weights["free"]
    return {
        "bigbatch": _difference(small, "auto ", free, "full "),
        "Keras' own": _difference(free, "keras ", free, "full "),
        "loss / k by hand": _difference(free, "hand ", free, "full "),
    }


def norm_differences(weights: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the same for a net with BatchNormalization."""
    free = weights["free"]
    return {
        'batch_norm="exact"': _difference(free, "exact ", free, "norm "),
        'batch_norm="pooled"': _difference(free, "pooled ", free, "norm "),
    }


def figures(results: dict[str, Any], weights: dict[str, Any]) -> list[Any]:
    """Return the picture of each step."""
    from matplotlib.figure import Figure

    def drawn(draw: Callable[..., None], *args: Any) -> Any:
        drawing = Figure(figsize=(6, 3.6), layout="constrained")
        draw(drawing.subplots(), *args)
        return drawing

    return [
        drawn(_draw_peaks, results),
        drawn(_draw_differences, differences(weights)),
        drawn(_draw_memory, results["small"]),
        drawn(_draw_differences, norm_differences(weights)),
        drawn(_draw_noise, results["small"]),
    ]


def together(results: dict[str, Any], weights: dict[str, Any]) -> Any:
    """Return the pictures of the demo as one."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(7, 10), layout="constrained")
    first, second, third = drawing.subplots(3)
    _draw_differences(first, differences(weights))
    _draw_memory(second, results["small"])
    _draw_noise(third, results["small"])
    return drawing


def _draw_peaks(axes: Any, results: dict[str, Any]) -> None:
    peaks = {"full batch,\nno limit": results["free"], "bigbatch": results["small"]}
    megabytes = [one["peak"] / 2**20 for one in peaks.values()]
    bars = axes.barh(list(peaks), megabytes, color=["tab:gray", "tab:green"])
    axes.bar_label(bars, [f"{value:.1f}" for value in megabytes], padding=4)
    axes.axvline(LIMIT, color="tab:red", label=f"the device: {LIMIT} MiB")
    axes.set_xlim(0, 1.3 * max(megabytes))
    axes.invert_yaxis()
    axes.set_title("Memory of the same update")
    axes.set_xlabel("peak memory [MiB]")
    axes.legend()


def _draw_differences(axes: Any, differences: dict[str, float]) -> None:
    colors = ["tab:green", "tab:gray", "tab:gray"][: len(differences)]
    bars = axes.barh(list(differences), list(differences.values()), color=colors)
    axes.bar_label(bars, [f"{value:.0e}" for value in differences.values()], padding=4)
    axes.set_xscale("log")
    axes.set_xlim(1e-8, 10)
    axes.invert_yaxis()
    axes.set_title("Difference from the full batch")
    axes.set_xlabel("max |Δweight| after training")


def _draw_memory(axes: Any, small: dict[str, Any]) -> None:
    for label, points, style in (
        ("predicted", small["predicted"], "--"),
        ("measured by plan", small["peaks"], "o"),
    ):
        sizes, peaks = zip(*points)
        megabytes = [peak / 2**20 for peak in peaks]
        axes.plot(sizes, megabytes, style, color="tab:blue", label=label)
    axes.axhline(LIMIT, color="tab:red", label=f"the device: {LIMIT} MiB")
    axes.plot(
        [small["microbatch_size"]],
        [small["peak"] / 2**20],
        "*",
        ms=14,
        color="tab:green",
        label=f"chosen: {small['microbatch_size']}, while training",
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(bottom=0)
    axes.set_title("Memory of micro-batches")
    axes.set_xlabel("samples per micro-batch")
    axes.set_ylabel("peak memory [MiB]")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_noise(axes: Any, small: dict[str, Any]) -> None:
    from bigbatch.core.noise import Estimate
    from bigbatch.diagnostics.figures import draw_noise

    draw_noise(axes, [Estimate(tuple(a), n) for a, n in small["noise"]])
