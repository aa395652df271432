"""Time per update on JAX."""

from __future__ import annotations

from benchmarks import backend_speed
from benchmarks.measuring import Settings


def run(settings: Settings) -> None:
    """Measure, and write `speed-jax.md`."""
    backend_speed.run(settings, "speed-jax", "Time per update on JAX", ("jax", "jaxlib"))
