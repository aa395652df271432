"""Measure: `python -m benchmarks` runs all, `python -m benchmarks speed memory` some."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SECTIONS = {
    "equality": "whether updates are those of the full batch: ours, Keras' own, a loop by hand",
    "speed": "time per update against the limit, the full batch, Keras' own, a loop by hand",
    "speed-jax": "time per update on JAX",
    "speed-torch": "time per update on torch",
    "growth": "how time grows with k, the number of variables, their bytes, replicas",
    "memory": "peak allocator bytes, in all and beyond one micro-batch's step",
    "exact": "what exact batch normalisation takes, by what is stored between stages",
    "counts": "graph operations, traces, bytes and compilations, which CI compares",
    "tracing": "first calls, number of traces, import",
    "start-up": "time to the first update, against plain Keras",
    "options": "what NoiseScale, coupled=True and microbatch_size='auto' cost",
    "workers": "bytes and reductions per update between two processes, and the cost model",
    "peer": "gradient-accumulator 0.5.2 on its own old stack",
}

BACKENDS = {"speed-jax": "jax", "speed-torch": "torch"}
"""The backend of sections that do not run on TensorFlow."""

COUNTING = "TF_CPU_ALLOCATOR_USE_BFC"
"""Chooses, when TensorFlow starts, the allocator that counts bytes."""


def main() -> int:
    """Run the sections, each in a process of its own."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures bigbatch and writes tables and plots to benchmarks/results.",
        epilog="sections:\n"
        + "\n".join(f"  {name:9} {text}" for name, text in SECTIONS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="default: all")
    parser.add_argument(
        "--rounds", type=int, default=15, help="rounds of measuring, default 15"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="try everything out, on little; write nothing here"
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = set(options.sections) - set(SECTIONS)
    if unknown:
        parser.error(
            f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}"
        )
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    sections = options.sections or list(SECTIONS)
    if options.here or options.smoke:
        os.environ[COUNTING] = str(bool({"memory", "exact"} & set(sections))).lower()
        from benchmarks.measuring import Settings

        settings = Settings(options.rounds)
        if options.smoke:
            settings = Settings(1, is_smoke=True, results=Path(tempfile.mkdtemp()))
        for name in sections:
            if _environment(name) == dict(os.environ):
                module = importlib.import_module(f"benchmarks.{name.replace('-', '_')}")
                module.run(settings)
            else:
                _run(name, "--smoke")
        return 0
    for name in sections:
        print(f"== {name}: {SECTIONS[name]}", flush=True)
        start = time.monotonic()
        _run(name, "--here", "--rounds", str(options.rounds))
        print(f"== {name} took {time.monotonic() - start:.0f} s", flush=True)
    return 0


def _environment(section: str) -> dict[str, str]:
    return {**os.environ, "KERAS_BACKEND": BACKENDS.get(section, "tensorflow")}


def _run(section: str, *options: str) -> None:
    """Run a section in a process of its own, with its backend."""
    command = [sys.executable, "-m", "benchmarks", section, *options]
    subprocess.run(command, check=True, env=_environment(section))


if __name__ == "__main__":
    sys.exit(main())
