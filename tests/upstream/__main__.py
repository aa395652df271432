"""Run suites and programs that nobody here wrote, with and without accumulation.

`make upstream` runs everything and writes `docs/upstream.md`; it fails if anything differs that
`permitted.py` does not list. `make upstream SUITES="trainers programs"` runs some, and writes
nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from upstream.outcomes import (
    PLAIN,
    Difference,
    Outcomes,
    Row,
    differences_of,
    outcomes_of_programs,
    row_of,
)
from upstream.page import commit_of, page_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "upstream-results"
KERAS_SUITES = (
    "trainers",
    "callbacks",
    "models",
    "saving",
    "optimizers",
    "wrappers",
    "distillation",
    "layers",
)
PROGRAMS = "programs"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make upstream", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="suite", help="all, if none is named")
    parser.add_argument("--microbatch-size", type=int, default=2)
    parser.add_argument("--accumulation-steps", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="only compare the last results")
    chosen = parser.parse_args(arguments)
    suites = chosen.suites or [*KERAS_SUITES, PROGRAMS]
    unknown = set(suites) - {*KERAS_SUITES, PROGRAMS}
    if unknown:
        parser.error(f"there is no suite {', '.join(unknown)}: {[*KERAS_SUITES, PROGRAMS]}")
    settings = {
        "plain": "",
        "split": f"microbatch_size={chosen.microbatch_size}",
        "window": f"accumulation_steps={chosen.accumulation_steps}",
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    differences: list[Difference] = []
    for suite in suites:
        if not chosen.again:
            _run(suite, settings)
        outcomes = _outcomes(suite, settings)
        rows.append(row_of(suite, outcomes, _file(suite, "commit").read_text()))
        if not rows[-1].passed[PLAIN]:
            raise SystemExit(f"{suite}: nothing passes in plain Keras, so nothing was shown")
        differences += differences_of(outcomes)
        print(f"== {rows[-1].text()}", flush=True)
    if not chosen.suites:
        versions = {
            name: importlib.metadata.version(name) for name in ("keras", "tensorflow-cpu")
        }
        page = page_of(rows, differences, settings, versions)
        (ROOT / "docs" / "upstream.md").write_text(page)
    for one in differences:
        print(one.text())
    unexplained = [one for one in differences if one.permitted is None]
    print(f"{len(differences)} differences, {len(unexplained)} of them not permitted")
    return int(bool(unexplained))


def _file(suite: str, mode: str) -> Path:
    return RESULTS / f"{suite}-{mode}.json"


def _outcomes(suite: str, settings: dict[str, str]) -> Outcomes:
    """Return what the last run of a suite has written."""
    if suite == PROGRAMS:
        return outcomes_of_programs(json.loads(_file(suite, "all").read_text()))
    return {mode: json.loads(_file(suite, mode).read_text()) for mode in settings}


def _run(suite: str, settings: dict[str, str]) -> None:
    """Run one suite in each mode; write how everything in it ended."""
    _file(suite, "commit").write_text(commit_of(ROOT / "docs"))
    if suite == PROGRAMS:  # which compares by itself
        command = [sys.executable, "-m", "upstream.programs", "--json"]
        _written_by([*command, str(_file(suite, "all"))], _file(suite, "all"))
        return
    for mode, setting in settings.items():
        print(f"== {suite}, {mode} {setting}", flush=True)
        file = _file(suite, mode)
        _written_by(
            _pytest(suite), file, BIGBATCH_UPSTREAM=setting, BIGBATCH_OUTCOMES=str(file)
        )


def _written_by(command: list[str], file: Path, **environment: str) -> None:
    """Run a command that writes a file, whatever else it finds."""
    file.unlink(missing_ok=True)
    fixed = {
        "KERAS_BACKEND": "tensorflow",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": str(ROOT / "tests"),
    }
    subprocess.run(
        command, env={**os.environ, **fixed, **environment}, cwd=RESULTS, check=False
    )
    if not file.exists():
        raise SystemExit(f"{' '.join(command)} has not written {file.name}")


def _pytest(suite: str) -> list[str]:
    """Return the command that runs a folder of Keras' own tests, as shipped in its wheel."""
    spec = importlib.util.find_spec("keras")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "src"
    # Names of tests that are made of addresses are not the same in two processes.
    processes = "0" if suite == "wrappers" else "2"
    options = ["-q", "-n", processes, "--tb=line", "-W", "ignore", "-p", "no:cacheprovider"]
    # No settings of this repository: they are not for other people's tests.
    options += ["-c", os.devnull, "--rootdir", str(source), "-p", "upstream.plugin"]
    return [sys.executable, "-m", "pytest", *options, str(source / suite)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
