"""For the site: pictures of benchmarks, what is searched, and tables of contents."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File


def on_files(files: Any, *, config: Any, **_: Any) -> Any:
    """Add the pictures that `make bench` draws."""
    results = Path(config.config_file_path).parent / "benchmarks" / "results"
    for picture in sorted(results.glob("*.png")):
        name = f"benchmarks/{picture.name}"
        files.append(File.generated(config, name, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Leave decisions out of the search: users look for guides."""
    if page.file.src_uri.startswith("decisions/0"):
        page.meta["search"] = {"exclude": True}
    return markdown


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Leave headings of tables that are read from other files out of the table of contents."""
    if page.file.src_uri == "benchmarks.md":
        (top,) = page.toc.items
        wanted = re.findall(r"^## (.*)$", page.markdown, re.M)
        top.children = [one for one in top.children if one.title in wanted]
    return html
