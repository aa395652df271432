"""Imports that do not write to standard error, unless they fail."""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.util
import os
import sys
import tempfile
from typing import Any, Iterator


@contextlib.contextmanager
def quiet_import(name: str) -> Iterator[None]:
    """Return a block in which the first import of a module does not write to standard error.

    TensorFlow writes lines before Python can tell it not to. Whoever imports it decides when:
    a script may have something to set up before. If the import fails, all of it is shown.
    """
    finder = _Finder(name)
    if name in sys.modules:
        yield
        return
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as others do, once, and lets it be loaded silently."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_found = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        del path, target
        if fullname != self._name or self._is_found:
            return None
        self._is_found = True
        spec: Any = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            @functools.wraps(load)
            def silently(module: Any) -> None:
                with _silence():
                    load(module)

            spec.loader.exec_module = silently
        return spec


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Return a block in which nothing is written to standard error, also not by C code."""
    with tempfile.TemporaryFile() as written:
        sys.stderr.flush()
        real = os.dup(2)
        os.dup2(written.fileno(), 2)
        try:
            yield
        except BaseException:
            sys.stderr.flush()
            written.seek(0)
            os.write(real, written.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(real, 2)
            os.close(real)
