"""What messages say under `Fix:`, read from the source, and blocks that expect one of them."""

from __future__ import annotations

import ast
import contextlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import bigbatch
from bigbatch.errors import BigbatchError

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "bigbatch"
SAID = {"explain": 2, "Cause": 3, "Obstacle": 1}
"""What makes a message, and the place of the fix among its arguments."""

EXPECTING = ("refused", "warned", "printed")


@contextlib.contextmanager
def refused(fix: str) -> Iterator[None]:
    """Expect an error of bigbatch with this fix, which the test then follows."""
    with pytest.raises(BigbatchError) as error:
        yield
    # Keras adds colours and the arguments of the layer, AutoGraph indents.
    said = re.findall(r"Fix: ([^\n\x1b]*)", str(error.value))
    assert said == [fix], said


@contextlib.contextmanager
def warned(fix: str) -> Iterator[None]:
    """Expect a `NotEqualWarning` with this fix, which the test then follows."""
    with pytest.warns(bigbatch.NotEqualWarning) as found:
        yield
    said = [line for one in found for line in _fixes_in(str(one.message))]
    assert fix in said, said


@contextlib.contextmanager
def printed(fix: str, capsys: Any) -> Iterator[None]:
    """Expect that a command prints this fix, which the test then follows."""
    yield
    said = capsys.readouterr().err.split("Fix: ")[1].strip()
    assert said == fix, said


def _fixes_in(message: str) -> list[str]:
    return [
        line.split("Fix: ")[1].rstrip(".") for line in message.splitlines() if "Fix: " in line
    ]


@dataclass(frozen=True)
class Site:
    """A place in the source that makes a message."""

    place: str
    """The file and the line."""
    patterns: tuple[str, ...]
    """A regular expression for each text that the fix may be."""

    @property
    def texts(self) -> tuple[str, ...]:
        """The same to be read, with `.*` for what is filled in."""
        return tuple(re.sub(r"\\(.)", r"\1", one) for one in self.patterns)


def sites(source: Path = SOURCE) -> list[Site]:
    """Return every message with a fix that the source makes."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in sorted(source.rglob("*.py"))}
    every, found = [*trees.values()], []
    for path, tree in trees.items():
        reader = _Reader(tree, every)
        for node in ast.walk(tree):
            fix = _fix_of(node)
            if fix is None:
                continue
            place = f"{path.relative_to(source).as_posix()}:{node.lineno}"
            found.append(Site(place, tuple(reader.patterns(fix))))
    return found


def _fix_of(node: ast.AST) -> ast.expr | None:
    """Return the expression of the fix, if a node makes a message."""
    name = _name_of(node)
    if name in SAID:
        named = {one.arg: one.value for one in node.keywords}
        return named["fix"] if "fix" in named else node.args[SAID[name]]
    return None


def _name_of(call: ast.AST) -> str | None:
    if not isinstance(call, ast.Call):
        return None
    return getattr(call.func, "id", getattr(call.func, "attr", None))


class _Reader:
    """Reads expressions that are texts, in one of several modules."""

    def __init__(self, module: ast.Module, every: list[ast.Module]) -> None:
        self._module, self._every = module, every

    def patterns(self, node: ast.expr) -> list[str]:
        """Return a regular expression for each text that an expression may be."""
        if isinstance(node, ast.Constant):
            return [] if node.value is None else [re.escape(str(node.value))]
        if isinstance(node, ast.JoinedStr):
            parts = [self.patterns(one) for one in node.values]
            return ["".join(one) for one in itertools.product(*parts)]
        if isinstance(node, ast.BinOp):
            return [a + b for a in self.patterns(node.left) for b in self.patterns(node.right)]
        several = _several(node) or self._named(node)
        return [one for value in several for one in self.patterns(value)] or [".*"]

    def _named(self, node: ast.expr) -> list[ast.expr]:
        """Return what a name may stand for, or what a function of the module may return."""
        if isinstance(node, ast.Call):
            functions = _all(self._module, ast.FunctionDef)
            functions = [one for one in functions if one.name == _name_of(node)]
            returned = [one for function in functions for one in _all(function, ast.Return)]
            return [one.value for one in returned]
        where = self._every if isinstance(node, ast.Attribute) else [self._module]
        name = getattr(node, "id", getattr(node, "attr", None))
        assigned = [one for tree in where for one in _all(tree, ast.Assign)]
        return [one.value for one in assigned if name and _is_named(one.targets[0], name)]


def _several(node: ast.expr) -> list[ast.expr]:
    """Return what an expression with a condition may be."""
    if isinstance(node, ast.BoolOp):
        return node.values
    return [node.body, node.orelse] if isinstance(node, ast.IfExp) else []


def _is_named(target: ast.expr, name: str) -> bool:
    return isinstance(target, ast.Name) and target.id == name


def _all(tree: ast.AST, kind: type) -> list[Any]:
    return [node for node in ast.walk(tree) if isinstance(node, kind)]


def followed(tests: Path = TESTS) -> dict[str, list[str]]:
    """Return the fixes that tests expect and follow, by the folder of the tests."""
    found: dict[str, list[str]] = {}
    for path in sorted(tests.rglob("*.py")):
        folder = path.parent.name if path.parent.name in FOLDERS.values() else "tests"
        expected, text = found.setdefault(folder, []), path.read_text("utf-8")
        if not any(f"{name}(" in text for name in EXPECTING):
            continue
        for function in _all(ast.parse(text), ast.FunctionDef):
            for block in _all(function, ast.With):
                # The fix is followed by what comes after the block.
                if block.end_lineno < function.end_lineno:
                    expected += _expected(block)
    return found


FOLDERS = {"backends/jax": "jax_contract", "backends/torch": "torch_contract"}
"""Where the messages of backends are followed: in processes of their own."""


def _expected(block: ast.With) -> list[str]:
    calls = [one.context_expr for one in block.items]
    calls = [one for one in calls if _name_of(one) in EXPECTING]
    return [str(ast.literal_eval(call.args[0])) for call in calls]


def not_followed(
    every: list[Site], texts: dict[str, list[str]], exceptions: dict[str, str]
) -> list[str]:
    """Return the fixes that no test follows, but for exceptions, with their places.

    A text is that of the message with the most words in common: `write .*` is any.
    """
    patterns = {pattern for site in every for pattern in site.patterns}
    matched: dict[str, set[str]] = {}
    for folder, expected in texts.items():
        for text in {*expected}:
            fitting = [one for one in patterns if re.fullmatch(one, text)]
            best = max(fitting, key=lambda one: len(one.replace(".*", "")), default="")
            matched.setdefault(folder, set()).add(best)
    missing = []
    for site in every:
        folder = next((FOLDERS[one] for one in FOLDERS if site.place.startswith(one)), None)
        where = [folder] if folder else [*texts]
        for pattern, text in zip(site.patterns, site.texts):
            is_followed = any(pattern in matched.get(one, ()) for one in where)
            if not is_followed and not _is_among(exceptions, site.place, text):
                missing.append(f"{site.place}: {text}")
    return missing


def _is_among(exceptions: dict[str, str], place: str, text: str) -> bool:
    return any(place.startswith(one) or text.startswith(one) for one in exceptions)
