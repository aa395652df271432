"""The README as a package page shows it, where links into the repository lead nowhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def for_package_page(readme: str, source: str | None) -> str:
    """Return a README without relative links and pictures.

    Args:
        readme: the text, in Markdown.
        source: the address of the files of the repository, with which links become absolute;
            `None` if there is none: then pictures are left out, and links are plain text.
    """
    relative = r"\((?!https?:|#)([^)]+)\)"
    if source is None:
        readme = re.sub(rf"^!\[[^\]]*\]{relative}\n\n?", "", readme, flags=re.MULTILINE)
        return re.sub(rf"(?<!!)\[([^\]]*)\]{relative}", r"\1", readme)
    return re.sub(rf"\]{relative}", rf"]({source}/\1)", readme)


class PackagePage(MetadataHookInterface):
    """Sets the `readme` of the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Change the metadata of the project."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Files")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": for_package_page(text, source),
        }
