"""The page that shows what differs: `docs/upstream.md`."""

from __future__ import annotations

import subprocess
from itertools import groupby
from pathlib import Path
from typing import Any

from upstream.outcomes import PLAIN, Difference, Row

INTRODUCTION = """\
# Other people's tests

Keras ships its own test suite in its package. `make upstream` runs it twice more with
gradient accumulation switched on in every `fit`: once with each batch cut into micro-batches
({split}), once with batches grouped into windows ({window}). It also trains
small programs built from `keras_hub`, `keras_rs`, `keras_tuner` and `adapt`, and compares their
weights with the weights from plain training.

A test *differs* if it passes in plain Keras and does not pass with accumulation. The command
fails if a test differs that is not in its list of permitted differences.

The tests ran with {versions}. Each row of the table names the commit that it ran on.
"""


def page_of(
    rows: list[Row],
    differences: list[Difference],
    settings: dict[str, str],
    versions: dict[str, str],
) -> str:
    """Return the page."""
    named = " and ".join(f"{name} {version}" for name, version in versions.items())
    introduction = INTRODUCTION.format(
        split=f"`{settings['split']}`",
        window=f"`{settings['window']}`",
        versions=named,
    )
    modes = [mode for mode in settings if mode != PLAIN]
    heads = ["suite", "plain Keras passes", *(f"{mode} differs" for mode in modes), "commit"]
    table = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [row.suite, row.passed[PLAIN], *(row.differ.get(mode, 0) for mode in modes)]
        cells.append(row.commit)
        table.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([introduction, *table, "", *_differences(differences)]) + "\n"


def commit_of(folder: Path) -> str:
    """Return the commit that is checked out, and whether files were changed since."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "../src", "../tests")
    return git("rev-parse", "--short=7", "HEAD") + ("+changes" if changed else "")


def _differences(differences: list[Difference]) -> list[str]:
    if not differences:
        return ["Nothing differs."]

    def key(one: Difference) -> Any:
        permitted = one.permitted
        return (permitted is not None, permitted and (permitted.until, permitted.reason))

    lines = ["## What differs", ""]
    for _, group in groupby(sorted(differences, key=lambda one: str(key(one))), key):
        found = list(group)
        permitted = found[0].permitted
        if permitted is None:
            lines.append("**Not permitted:**")
        else:
            lines.append(f"**{permitted.reason}** {permitted.until}")
        lines += ["", *(f"- {one.mode}: `{one.name}`" for one in found), ""]
    return lines[:-1]
