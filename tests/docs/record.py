"""``python -m tests.docs.record PAGE...`` runs the commands of pages, and writes what they print into the pages.

Only for pages whose commands need no server. Look at the difference before you commit it. A command that is to go on
running keeps the output that the page has.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.docs.pages import KEYS, NOT_TYPED, Page, agrees, blocks, steps


def recorded(path: Path, instead: dict[str, str] | None = None) -> str:
    """The text of a page with the output of today."""
    with tempfile.TemporaryDirectory() as folder:
        page = Page(path, Path(folder), instead=instead)
        printed = [(step.command, page.as_shown(text), step.expected) for step, text in page.outcomes(recording=True)]
    text = page.text
    for block in reversed(blocks(text)):
        if block.language == "console":
            lines = []
            for step in reversed(steps(block.body)):
                output: list[str] = step.expected
                if not step.command.startswith(NOT_TYPED):
                    command, new, expected = printed.pop()
                    assert command == step.command
                    output = step.expected if agrees(new, expected) else new.strip("\n").splitlines()
                first, *rest = step.command.split("\n")
                typed = [first if first in KEYS else f"$ {first}", *(f"> {line}" for line in rest)]
                lines = [*typed, *(line.rstrip() for line in output), *lines]
            body = "\n".join(lines) + "\n"
            text = text[: block.start] + body + text[block.start + len(block.body) :]
    return text


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(recorded(Path(name)))
