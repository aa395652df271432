"""Steps with code and pictures as one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import html
import io
from dataclasses import dataclass
from typing import Any, Sequence

from bigbatch.core.report import Report

_STYLE = """
:root { color-scheme: light dark; --text: #222; --page: #fff; --line: #ddd; --code: #f4f5f7; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e3e3e3; --page: #16181c; --line: #3a3d44; --code: #23262d; }
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: auto; padding: 1rem;
       color: var(--text); background: var(--page); }
h1 { font-size: 1.4rem; }
section { display: grid; gap: 0 2rem; padding: 1rem 0; border-top: 1px solid var(--line); }
section > * { min-width: 0; }
@media (min-width: 60rem) { section { grid-template-columns: 1fr 1fr; } }
table { border-collapse: collapse; margin: .5rem 0; width: 100%; }
th, td { padding: .3rem .5rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { text-align: left; }
@media (min-width: 40rem) { td:not(:first-child) { white-space: nowrap; } }
pre { background: var(--code); padding: .7rem; border-radius: .4rem; overflow-x: auto;
      white-space: pre; font: .85rem/1.45 ui-monospace, monospace; }
@media (max-width: 40rem) {
  table { font-size: .9rem; }
  th, td { padding: .3rem .2rem; }
  pre { font-size: .72rem; }
}
img { max-width: 100%; height: auto; background: #fff; border-radius: .4rem; }
"""


@dataclass(frozen=True)
class Section:
    """One step of a page."""

    report: Report
    code: str
    """The program that makes it, to be copied."""
    figure: Any
    """A Matplotlib figure."""


def page(title: str, introduction: str, sections: Sequence[Section]) -> str:
    """Return a page for laptops and phones: steps, with pictures beside or below them."""
    parts = "\n".join(map(_section, sections))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<p>{html.escape(introduction)}</p>
{parts}
</body>
</html>
"""


def _section(section: Section) -> str:
    code = f"<pre><code>{html.escape(section.code)}</code></pre>"
    stream = io.BytesIO()
    section.figure.savefig(stream, format="png", dpi=150)
    data = base64.b64encode(stream.getvalue()).decode()
    alt = html.escape(section.report.title)
    picture = f'<div><img alt="{alt}" src="data:image/png;base64,{data}"></div>'
    return f"<section><div>{section.report.html()}{code}</div>{picture}</section>"
