"""Time per update on torch."""

from __future__ import annotations

from benchmarks import backend_speed
from benchmarks.measuring import Settings


def run(settings: Settings) -> None:
    """Measure, and write `speed-torch.md`."""
    backend_speed.run(settings, "speed-torch", "Time per update on torch", ("torch",))
