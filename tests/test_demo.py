"""`bigbatch demo`: what it prints, draws and writes is what happened."""

from __future__ import annotations

import html.parser
import os
import re
import subprocess
import sys
import xml.etree.ElementTree

import pytest

from bigbatch.demo import story
from bigbatch.errors import ContextError
from browser import WIDTHS, needs_browser, seen


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    directory = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        [sys.executable, "-m", "bigbatch.cli", "demo", "--output", str(directory)],
        env={**os.environ, "MPLBACKEND": "agg", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not re.search(r"oneDNN|absl|WARNING|cpu_feature", done.stdout + done.stderr)
    return directory, done.stdout


class Page(html.parser.HTMLParser):
    """Notes the cells of tables, and what a page would load from elsewhere."""

    def __init__(self, text):
        super().__init__()
        self.cells, self.open, self.loaded, self.viewport = [], [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.viewport |= attributes.get("name") == "viewport"
        if tag not in ("meta", "img"):
            self.open.append(tag)
        loaded = attributes.get("src") or attributes.get("href") or "data:"
        self.loaded += [] if loaded.startswith("data:") else [loaded]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)


@pytest.mark.slow
def test_the_story(demo):
    directory, output = demo
    titles = re.findall(r"^(\d)\. ", output, re.MULTILINE)
    assert titles == ["1", "2", "3", "4", "5"]
    assert re.search(r"batch_size=512\) +out of memory", output)
    differences = dict(
        re.findall(r"^ ?(bigbatch|Keras' own|loss / k by hand) +(\S+)", output, re.M)
    )
    assert float(differences["bigbatch"]) <= 5e-6  # rounding of float32
    assert float(differences["Keras' own"]) > 1e-3
    assert float(differences["loss / k by hand"]) > 1e-3
    assert "Your batch of" in output or "not yet known" in output
    assert (directory / "demo.png").read_bytes().startswith(b"\x89PNG")
    (size,) = re.findall(r"trains, (\d+) at a time", output)
    (chosen,) = re.findall(rf"^ ?{size}, chosen, while training +(\S+) MiB", output, re.M)
    assert float(chosen) <= 24  # not above the line of the device, to a tenth of a MiB
    exact, pooled = (
        float(re.search(rf'batch_norm="{name}" +(\S+)', output).group(1))
        for name in ("exact", "pooled")
    )
    assert exact <= 5e-6 < 1e-3 < pooled


@pytest.mark.slow
def test_the_recording_of_the_terminal_loads_nothing(demo):
    directory, _ = demo
    recording = (directory / "demo.svg").read_text()
    assert recording.startswith("<svg")
    assert "out&#160;of&#160;memory" in recording
    assert not re.search(r"url\(.?http|href=|@import", recording)
    xml.etree.ElementTree.fromstring(recording)


@pytest.mark.slow
def test_the_page_says_the_same_and_needs_nothing_else(demo):
    directory, output = demo
    page = Page((directory / "demo.html").read_text())
    assert page.open == []
    assert page.viewport
    assert page.loaded == []
    (difference,) = re.findall(r"^ ?bigbatch +(\S+)", output, re.MULTILINE)
    assert difference in page.cells
    assert "out of memory" in page.cells
    text = (directory / "demo.html").read_text()
    assert text.count("<section>") == text.count("<pre>") == 5
    assert text.count("<img ") == 5
    assert "prefers-color-scheme: dark" in text


def test_what_a_part_that_fails_has_printed_is_shown(monkeypatch):
    monkeypatch.setattr(story, "PROGRAMS", "bigbatch.no_such_module")
    with pytest.raises(ContextError, match=r"No module named bigbatch\.no_such_module"):
        story._run_programs()


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_in_a_browser(demo, width):
    """Nothing is wider than the window, and every step has its picture."""
    directory, _ = demo
    assert seen(directory / "demo.html", width) == "narrow=true images=5/5"
