"""The demo as it is told: programs run, reports are shown, a page is written."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable

import numpy as np

from bigbatch.core.memory import readable
from bigbatch.core.report import Report, Table, progress
from bigbatch.demo.sizes import BATCH, EPOCHS, LIMIT, NORM_MICROBATCH
from bigbatch.errors import ContextError, explain

PROGRAMS = "bigbatch.demo.programs"
"""The module that each process runs."""
_TITLE = "bigbatch: the demo"
_INTRODUCTION = (
    f"A small network learns handwritten digits with updates of {BATCH} samples, on a device "
    f"whose memory is too small for so many at once ({LIMIT} MiB, a real limit of "
    "TensorFlow's allocator). bigbatch runs each batch as micro-batches that fit, and makes "
    "one update that equals the full batch."
)
_LINE = 'bigbatch.accumulate(model, microbatch_size="auto")'
_CODE = (
    f"""import bigbatch

{_LINE}
model.fit(x, y, batch_size={BATCH})""",
    """bigbatch.verify(model, x, y, microbatch_size=64)""",
    f"""plan = bigbatch.plan(model, x, y, batch_size={BATCH})
plan.plot()""",
    """bigbatch.accumulate(
    model,
    microbatch_size=32,
    batch_norm="exact",
)""",
    """noise = bigbatch.NoiseScale()
model.fit(x, y, callbacks=[noise])
noise.advice()""",
)


def run(directory: Path, show: Callable[[Any], None]) -> None:
    """Run the demo, show its steps, and write `demo.html`, `demo.png` and `demo.svg`."""
    _check_dependencies()
    from bigbatch.demo.pictures import figures, together
    from bigbatch.diagnostics.page import Section, page

    introduction = Report(_TITLE, [], [_INTRODUCTION])
    show(introduction)
    results, weights = _run_programs()
    reports = _reports(results, weights)
    for report in reports:
        show(report)
    pictures = figures(results, weights)
    directory.mkdir(parents=True, exist_ok=True)
    together(results, weights).savefig(directory / "demo.png", dpi=120)
    (directory / "demo.svg").write_text(_recording([introduction, *reports]))
    sections = [Section(*parts) for parts in zip(reports, _CODE, pictures)]
    (directory / "demo.html").write_text(page(_TITLE, _INTRODUCTION, sections))
    names = [str(directory / name) for name in ("demo.html", "demo.png", "demo.svg")]
    show(Report(f"Wrote {', '.join(names)}", []))


def _run_programs() -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Run the programs of the demo; return what they found, and the weights.

    What they print is shown only if one of them fails: frameworks write a lot.
    """
    limit = {"TF_CPU_BFC_MEM_LIMIT_IN_MB": str(LIMIT)}
    programs = {"full": limit, "small": limit, "free": {}}
    with tempfile.TemporaryDirectory() as scratch, progress(True, "bigbatch:") as say:
        say("training on a small device, and without a limit to compare with")
        running = [_start(name, scratch, more) for name, more in programs.items()]
        codes = [process.wait() for process in running]
        if any(codes):
            printed = [Path(scratch, f"{name}.log").read_text() for name in programs]
            failed = [text for text, code in zip(printed, codes) if code]
            raise ContextError(
                explain(
                    received=f"programs that ended with {codes}:\n" + "\n".join(failed),
                    expected="all parts of the demo to run",
                    fix="read their output above",
                )
            )
        results = {name: json.loads(Path(scratch, name).read_text()) for name in programs}
        weights = {name: dict(np.load(Path(scratch, f"{name}.npz"))) for name in programs}
    return results, weights


def _check_dependencies() -> None:
    try:
        import matplotlib  # noqa: F401
        import sklearn  # noqa: F401
    except ModuleNotFoundError as error:
        raise ContextError(
            explain(
                received=f"no module named {error.name!r}",
                expected="Matplotlib for the pictures and scikit-learn for the data",
                fix="pip install 'bigbatch[demo]'",
            )
        ) from error


def _start(name: str, scratch: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with Path(scratch, f"{name}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", PROGRAMS, name, scratch],
            env={
                **os.environ,
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "TF_CPU_ALLOCATOR_USE_BFC": "true",
                "KERAS_BACKEND": "tensorflow",
                **environment,
            },
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _reports(results: dict[str, Any], weights: dict[str, Any]) -> list[Report]:
    from bigbatch.demo.pictures import differences, norm_differences

    return [
        _memory_problem(results),
        _equality(results, differences(weights)),
        _memory(results["small"]),
        _batch_norm(norm_differences(weights)),
        _batch_size(results),
    ]


def _memory_problem(results: dict[str, Any]) -> Report:
    trains = f"trains, {results['small']['microbatch_size']} at a time"
    rows = [
        (f"model.fit(x, y, batch_size={BATCH})", results["full"]["result"]),
        (_LINE, trains),
    ]
    title = f"1. A batch of {BATCH} does not fit {LIMIT} MiB; one line makes it fit"
    return Report(title, [Table(("program", "result"), rows, marked=1)])


def _equality(results: dict[str, Any], differences: dict[str, float]) -> Report:
    small, free = results["small"], results["free"]
    losses = (small["loss"], free["loss"]["keras"], free["loss"]["hand"])
    rows = [("full batch, no limit", "", f"{free['loss']['full']:.4f}")]
    for (name, value), loss in zip(differences.items(), losses):
        rows.append((name, f"{value:.1e}", f"{loss:.4f}"))
    whole, tail = divmod(free["samples"], BATCH)
    note = (
        f"{free['samples']} samples make {whole} batches of {BATCH} and a last one of {tail}, "
        "which the other ways weigh wrongly."
    )
    table = Table(("after training", "max |Δweight|", "loss"), rows, marked=1)
    return Report("2. The weights equal the full batch", [table], [note])


def _memory(small: dict[str, Any]) -> Report:
    chosen = small["microbatch_size"]
    labels = {size: (str(size), readable(peak)) for size, peak in small["peaks"]}
    labels[chosen] = (f"{chosen}, chosen, while training", readable(small["peak"]))
    sizes = sorted(labels)
    table = Table(
        ("samples per micro-batch", "peak memory"),
        [labels[size] for size in sizes],
        marked=sizes.index(chosen),
    )
    notes = [
        f"The device has {readable(LIMIT * 2**20)}.",
        "`plan` measured a few updates of each size. The chosen size shows the highest peak of "
        f"all {EPOCHS} epochs, in which TensorFlow runs operations in more than one order.",
    ]
    return Report("3. The memory of micro-batches", [table], notes)


def _batch_norm(differences: dict[str, float]) -> Report:
    table = Table(
        (f"micro-batches of {NORM_MICROBATCH}", "max |Δ| of weights and statistics"),
        [(name, f"{value:.1e}") for name, value in differences.items()],
        marked=0,
    )
    note = (
        'With "exact" every layer normalises with the statistics of the whole batch; with '
        '"pooled", the default, it normalises with the statistics of a micro-batch.'
    )
    return Report("4. BatchNormalization can equal the full batch, too", [table], [note])


def _batch_size(results: dict[str, Any]) -> Report:
    whole, tail = divmod(results["free"]["samples"], BATCH)
    note = (
        f"An epoch has {whole} updates of {BATCH} samples and one of {tail}: your batch is "
        "their average."
    )
    title = "5. The batch size that is worth its samples"
    return Report(title, [], [results["small"]["advice"], note])


def _recording(reports: list[Report]) -> str:
    """Return what a terminal shows as an SVG picture that loads nothing."""
    from rich._export_format import CONSOLE_SVG_FORMAT
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=92, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ bigbatch demo", style="bold"))
    for report in reports:
        console.print()
        console.print(report)
    layout = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title="bigbatch", code_format=layout, unique_id="bigbatch")
