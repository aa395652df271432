"""Reports and a picture as one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import html
import io
from typing import Any, Sequence

from bigbatch.core.report import Report

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 44rem; margin: auto; padding: 1rem;
       color: #222; background: #fff; }
h1 { font-size: 1.4rem; }
table { border-collapse: collapse; margin: .5rem 0; width: 100%; }
th, td { padding: .3rem .5rem; border-bottom: 1px solid #ddd; text-align: right; }
td:not(:first-child) { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; }
img { max-width: 100%; height: auto; }
"""


def page(title: str, introduction: str, reports: Sequence[Report], figure: Any) -> str:
    """Return a page, readable on a laptop and a phone, with reports and a Matplotlib figure."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=150)
    picture = base64.b64encode(stream.getvalue()).decode()
    parts = "\n".join(f"<section>{report.html()}</section>" for report in reports)
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
<img alt="The same as a picture" src="data:image/png;base64,{picture}">
</body>
</html>
"""
