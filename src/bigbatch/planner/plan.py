"""A plan: which micro-batch size to train with, what it takes, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bigbatch.core.arguments import positive_integer
from bigbatch.core.memory import MARGIN, MemoryCurve, handy, readable
from bigbatch.core.report import Report, Table
from bigbatch.errors import MissingFrameworkError, explain


@dataclass(frozen=True)
class Measurement:
    """An update that was tried."""

    microbatch_size: int
    """Samples per micro-batch and replica."""
    peak: int
    """The most bytes in use during an update of the whole batch."""
    seconds: float | None = None
    """The time of an update of the whole batch, if it was asked for."""


@dataclass(frozen=True)
class Parts:
    """The uses of memory, in bytes."""

    weights: int
    optimizer: int
    """Slots and counters of the optimizers."""
    gradients: int
    """Where dense gradients are added up."""
    batch: int
    """The inputs and targets of a whole batch."""
    activations_per_sample: int
    """What one more sample in a micro-batch takes."""


@dataclass(frozen=True)
class Plan:
    """The micro-batch size to train with, its memory and time, and the reasons for it.

    `print(plan)` shows a table, `plan.plot()` draws it, `plan.to_dict()` is for machines.
    """

    batch_size: int
    """The samples of an update, on all replicas."""
    replicas: int
    """The replicas that share a batch."""
    memory_limit: int
    """The bytes the device has for this model."""
    parts: Parts
    """What the memory is for."""
    measured: tuple[Measurement, ...]
    """What was tried on this device, by size."""
    too_large: int | None = None
    """A size that ran out of memory here, if one did and is in question."""
    remarks: tuple[str, ...] = ()
    """What to know about the measurements."""
    is_rough: bool = False
    """Whether the device does not count its memory, so that peaks are guesses."""

    @property
    def share(self) -> int:
        """The samples of a batch on one replica."""
        return -(-self.batch_size // self.replicas)

    @property
    def microbatch_size(self) -> int:
        """The chosen samples per micro-batch and replica; zero if not even one fits.

        The largest that leaves a part of the memory free, or a power of two or divisor of the
        batch that is nearly as large.
        """
        return handy(self._largest, self.share)

    @property
    def microbatches(self) -> int:
        """How many micro-batches make an update on each replica; zero if none fits."""
        size = self.microbatch_size
        return -(-self.share // size) if size else 0

    @property
    def _largest(self) -> int:
        most = self.share if self.too_large is None else self.too_large - 1
        return min(most, self._curve.largest((1 - MARGIN) * self.memory_limit))

    @property
    def _curve(self) -> MemoryCurve:
        return MemoryCurve({one.microbatch_size: one.peak for one in self.measured})

    def peak(self, microbatch_size: int) -> int:
        """Return the most bytes in use with micro-batches of a size, measured or predicted.

        If a batch has fewer samples, the peak is that of a larger batch.
        """
        size = positive_integer(microbatch_size, "microbatch_size")
        more = max(0, size - self.share) * self.parts.batch // self.share
        return self._curve.peak(size) + more

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why this size, in sentences."""
        size = self.microbatch_size
        reasons = []
        if not size:
            missing = readable(self.peak(1) / (1 - MARGIN) - self.memory_limit)
            reasons.append(
                f"not even one sample at a time fits: {missing} are missing. A smaller model, "
                "mixed precision, an optimizer with fewer slots, or shorter sequences help"
            )
        elif size == self.share:
            reasons.append("a whole batch fits: there is nothing to accumulate")
        else:
            free = f"{self._largest} samples are the most that leave {MARGIN:.0%} free"
            ran_out = f"micro-batches of {self.too_large} samples ran out of memory"
            reasons.append(free if self.too_large is None else ran_out)
            if size != self._largest:
                reasons.append(f"{size} is nearly as large, and a round number")
        most = self.measured[-1].microbatch_size
        if size > most:
            reasons.append(
                f"micro-batches of up to {most} samples were measured here; the memory of "
                f"larger ones is predicted from them{self._reliability}"
            )
        return (*self.remarks, *reasons)

    @property
    def _reliability(self) -> str:
        """How wrong the largest size would be, predicted from those up to a quarter of it."""
        *_, last = self.measured
        few = [one for one in self.measured if 4 * one.microbatch_size <= last.microbatch_size]
        if len(few) < 2 or self.is_rough:
            return ""
        curve = MemoryCurve({one.microbatch_size: one.peak for one in few})
        error = curve.peak(last.microbatch_size) / last.peak - 1
        return f", as {last.microbatch_size} would be from a quarter of it: {error:+.0%}"

    def _sizes(self) -> list[int]:
        """Return the sizes to show: those measured, the chosen, and what they lead to."""
        sizes = {one.microbatch_size for one in self.measured} | {self.share}
        return sorted(sizes | ({self.microbatch_size} - {0}))

    def _report(self) -> Report:
        seconds = {one.microbatch_size: one.seconds for one in self.measured}
        is_timed = any(time is not None for time in seconds.values())
        headings = ("samples", "micro-batches", "peak", "of the memory")
        rows = []
        for size in self._sizes():
            peak, time = self.peak(size), seconds.get(size)
            share = f"{peak / self.memory_limit:.0%}"
            was = "" if size in seconds and not self.is_rough else "about "
            row = (f"{size}", f"{-(-self.share // size)}", f"{was}{readable(peak)}", share)
            rows.append((*row, "" if time is None else f"{time:.3g} s") if is_timed else row)
        marked = self._sizes().index(self.microbatch_size) if self.microbatch_size else None
        parts = [
            (name.replace("_", " "), readable(n)) for name, n in asdict(self.parts).items()
        ]
        return Report(
            f"bigbatch plan: {self._verdict()}",
            [
                Table((*headings, "time per update") if is_timed else headings, rows, marked),
                Table(("what for", "memory"), parts),
            ],
            self.reasons,
        )

    def _verdict(self) -> str:
        whole = f"batch {self.batch_size}"
        if self.replicas > 1:
            whole += f" on {self.replicas} replicas"
        if not self.microbatch_size:
            return f"{whole} does not fit with any micro-batch"
        peak, limit = readable(self.peak(self.microbatch_size)), readable(self.memory_limit)
        return (
            f"{whole} as {self.microbatches} × {self.microbatch_size} samples, about {peak} of "
            f"{limit}" + (" (memory cannot be measured here)" if self.is_rough else "")
        )

    def __str__(self) -> str:
        return self._report().text()

    def __rich__(self) -> Any:
        """Return the plan for a terminal with colours."""
        return self._report()

    def _repr_html_(self) -> str:
        return self._report().html()

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as numbers, texts, lists and dictionaries."""
        return {
            "microbatch_size": self.microbatch_size,
            "microbatches": self.microbatches,
            **asdict(self),
            "peaks": {str(size): self.peak(size) for size in self._sizes()},
            "reasons": list(self.reasons),
        }

    def plot(self) -> Any:
        """Return a Matplotlib figure: memory, and time if measured, by micro-batch size."""
        try:
            from bigbatch.planner.figure import figure
        except ModuleNotFoundError as error:
            raise MissingFrameworkError(
                explain(
                    received="a plot where Matplotlib is not installed",
                    expected="Matplotlib in this environment",
                    fix="pip install 'bigbatch[plot]'",
                )
            ) from error
        return figure(self)
