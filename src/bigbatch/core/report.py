"""Reports for users: tables and sentences, as text for terminals and as HTML."""

from __future__ import annotations

import contextlib
import html
import io
import textwrap
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Sequence, Tuple

_WIDTH = 88

SAID_WIDTH = 100
"""The columns of what is printed while a model trains."""


@dataclass(frozen=True)
class Table:
    """A table; the first column is text, the others are numbers."""

    headings: Tuple[str, ...]
    rows: Sequence[Tuple[str, ...]]
    marked: int | None = None
    """The row that stands out, if any."""


@dataclass(frozen=True)
class Report:
    """A title, tables, and sentences."""

    title: str
    tables: Sequence[Table]
    notes: Sequence[str] = ()

    def __rich__(self) -> Any:
        """Return the report for a terminal."""
        from rich import box
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        parts: list[Any] = [Text(self.title, style="bold")]
        for table in self.tables:
            drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
            for index, heading in enumerate(table.headings):
                drawn.add_column(Text(heading), justify="right" if index else "left")
            for index, row in enumerate(table.rows):
                style = "bold green" if index == table.marked else ""
                drawn.add_row(*map(Text, row), style=style)
            parts += [Text(""), drawn]
        if self.notes:
            notes = map(_item, self.notes) if len(self.notes) > 1 else map(Text, self.notes)
            parts += [Text(""), *notes]
        return Group(*parts)

    def text(self) -> str:
        """Return the report as plain text."""
        from rich.console import Console

        stream = io.StringIO()
        Console(file=stream, width=_WIDTH, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())

    def html(self) -> str:
        """Return the report for a notebook."""
        parts = [f"<p><b>{html.escape(self.title)}</b></p>"]
        for table in self.tables:
            parts.append(f"<table><thead>{_row('th', table.headings)}</thead><tbody>")
            for index, row in enumerate(table.rows):
                parts.append(_row("td", row, is_bold=index == table.marked))
            parts.append("</tbody></table>")
        if len(self.notes) == 1:
            return "".join([*parts, f"<p>{html.escape(self.notes[0])}</p>"])
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
        return "".join([*parts, f"<ul>{notes}</ul>"])


def wrapped(text: str) -> str:
    """Return lines with those that are too long continued below, indented.

    Example:
        >>> lines = wrapped("bigbatch: " + "word " * 20).splitlines()
        >>> len(lines[0]) <= 100, lines[1]
        (True, '          word word')
    """
    indent = " " * len("bigbatch: ")
    return "\n".join(
        textwrap.fill(
            line,
            SAID_WIDTH,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in text.splitlines()
    )


def _item(text: str) -> Any:
    """Return a sentence of a list for a terminal, with a hanging indent."""
    from rich.table import Table as RichTable
    from rich.text import Text

    grid = RichTable.grid(padding=(0, 1))
    grid.add_row("-", Text(text))
    return grid


@contextlib.contextmanager
def progress(verbose: bool, title: str) -> Iterator[Callable[[str], None]]:
    """Return a block with a way to say what is being done, on the error stream."""
    if not verbose:
        yield lambda _: None
        return
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: console.print(f"{title} {text}", highlight=False)
        return
    with console.status(title) as status:
        yield lambda text: status.update(f"{title} {text}")


def _row(tag: str, cells: Sequence[str], *, is_bold: bool = False) -> str:
    opening = f"<{tag} style='font-weight: bold'>" if is_bold else f"<{tag}>"
    return f"<tr>{''.join(f'{opening}{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
