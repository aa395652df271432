"""Pages in a real browser, where there is one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
WIDTHS = [412, 1280]
"""A phone and a laptop."""

SCRIPT = """<script>addEventListener('load', () => {
const shown = [...document.images].filter(one => one.complete && one.naturalWidth > 0);
const narrow = document.documentElement.scrollWidth <= innerWidth;
document.title = `narrow=${narrow} images=${shown.length}/${document.images.length}`;
})</script></body>"""


def seen(page: Path, width: int) -> str:
    """Return whether a page is no wider than a window, and how many of its pictures show."""
    copy = page.with_name(f"{width}-{page.name}")  # beside it: pictures are found by their path
    copy.write_text(page.read_text().replace("</body>", SCRIPT))
    done = subprocess.run(
        [
            *(BROWSER or "", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *("--no-first-run", "--disable-background-networking", "--disable-sync"),
            *(f"--window-size={width},800", f"--user-data-dir={page.parent / 'profile'}"),
            copy.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    copy.unlink()
    return done.stdout.partition("<title>")[2].partition("</title>")[0]
