"""Build hook: the README on a package index, where links into the repository have to be absolute."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE = re.compile(r"(\]\(|src=\"|href=\"|srcset=\")(?![a-z]+:|#)([^)\s\"]+)")
"""A link or picture whose address has no scheme, in Markdown or in HTML."""


def with_absolute_links(text: str, source: str) -> str:
    """The text with links relative to the repository's address.

    >>> with_absolute_links("[guide](docs/logs.md#open) [up](#top) [site](https://x)", "https://here")
    '[guide](https://here/docs/logs.md#open) [up](#top) [site](https://x)'
    """
    return _RELATIVE.sub(lambda found: f"{found[1]}{source}/{found[2]}", text)


class ReadmeHook(MetadataHookInterface):
    """Gives the package its long description."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the field ``readme``."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        readme = with_absolute_links(text, metadata["urls"]["Source"])
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}
