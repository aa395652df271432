"""For the API page: docstrings here say `Example:`, the parser knows `Examples:` only."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Let a section of one example be a section of examples, so that it is shown as code."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object that has been read."""
        if obj.docstring is not None:
            value = obj.docstring.value
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", value, flags=re.MULTILINE)
