"""The picture of a plan."""

from __future__ import annotations

from typing import Any

from bigbatch.core.drawing import Drawing

MIB = 2**20


def figure(plan: Any) -> Any:
    """Return a Matplotlib figure of a plan: memory, and time if there is any, by size."""
    timed = [one for one in plan.measured if one.seconds is not None]
    drawing = Drawing(figsize=(7, 6.4 if timed else 3.8), layout="constrained")
    axes = drawing.subplots(2 if timed else 1, sharex=True, squeeze=False)[:, 0]
    measured = [(one.microbatch_size, one.peak / MIB) for one in plan.measured]
    sizes = range(1, plan.share + 1, max(1, plan.share // 200))
    sizes = sorted({*sizes, *(size for size, _ in measured), plan.share})
    memory = axes[0]
    if not plan.is_rough:  # a line through noise would look like knowledge
        memory.plot(
            sizes,
            [plan.peak(size) / MIB for size in sizes],
            color="tab:blue",
            label="predicted",
        )
    label = "rough: memory of the process" if plan.is_rough else "measured"
    memory.plot(*zip(*measured), "o", color="tab:blue", label=label)
    memory.axhline(plan.memory_limit / MIB, color="tab:red", label="limit")
    memory.set_ylabel("peak memory [MiB]")
    memory.set_ylim(bottom=0)
    if timed:
        times = [(one.microbatch_size, one.seconds) for one in timed]
        axes[1].plot(*zip(*times), "o-", color="tab:orange")
        axes[1].set_ylabel("time per update [s]")
        axes[1].set_ylim(bottom=0)
    for one in axes:
        one.set_xscale("log", base=2)
        one.grid(alpha=0.3)
        one.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        if plan.microbatch_size:
            label = f"chosen: {plan.microbatch_size}" if one is memory else None
            one.axvline(plan.microbatch_size, color="tab:green", ls="--", label=label)
    memory.legend()
    memory.set_title(f"Batch {plan.batch_size}: memory of micro-batches")
    axes[-1].set_xlabel("samples per micro-batch")
    return drawing
