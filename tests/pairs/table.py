"""The table of pairs: which consumer or tool works on which kind of log, and the test that proves it.

A row is a test with ``@pair``. It runs on every kind; where the pair cannot be, the test must be refused with the
error and the sentence that are written down, and the reason goes into a footnote of the table.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.pairs.log_kinds import KINDS, Opened

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
BEGIN, END = "<!-- pairs: printed by tests/pairs/table.py -->\n", "<!-- end of pairs -->\n"


class No(NamedTuple):
    """Why a pair cannot be: the error, a part of its sentence, and the reason for the reader."""

    error: type[Exception]
    sentence: str
    reason: str


@dataclass(frozen=True, slots=True)
class Row:
    """A consumer or a tool: its title, its test, and the kinds on which it cannot be."""

    title: str
    test: str
    module: str
    refused: dict[str, No]


ROWS: dict[str, Row] = {}


def pair(title: str, *, default: Sequence[str] = ("wal",), **refused: No) -> Callable[[Any], Any]:
    """A test of one consumer or tool on every kind of log. ``default`` kinds run in the default suite.

    The test takes ``opened``, a filled log, before its fixtures.
    """

    def register(test: Callable[..., None]) -> Any:
        assert set(refused) <= set(KINDS), "a reason for a kind that does not exist"
        ROWS[test.__name__] = Row(title, test.__name__, test.__module__, refused)
        marks = [pytest.param(name, id=name, marks=[] if name in default else [pytest.mark.matrix]) for name in KINDS]
        fixtures = [name for name in inspect.signature(test).parameters if name != "opened"]

        @functools.wraps(test)
        def on_a_kind(kind: str, tmp_path: Path, **given: Any) -> None:
            with KINDS[kind].open(tmp_path) as opened:
                if (no := refused.get(kind)) is None:
                    test(opened, **given)
                    return
                with pytest.raises(no.error, match=no.sentence):
                    test(opened, **given)

        parameters = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in dict.fromkeys(["kind", "tmp_path", *fixtures])
        ]
        on_a_kind.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("kind", marks)(on_a_kind)

    return register


def table() -> str:
    """The table, with its footnotes."""
    notes: dict[str, int] = {}
    lines = ["| | " + " | ".join(kind.title for kind in KINDS.values()) + " |", "| --- |" + " --- |" * len(KINDS)]
    for row in ROWS.values():
        cells = []
        for name in KINDS:
            no = row.refused.get(name)
            cells.append("yes" if no is None else f"no [{notes.setdefault(no.reason, len(notes) + 1)}]")
        lines.append(f"| {row.title} | " + " | ".join(cells) + " |")
    lines += ["", *(f"{number}. {reason}" for reason, number in notes.items()), ""]
    lines += ["The proof of a cell is the test of its row on the kind of its column:", ""]
    names = ", ".join(f"`{name}`" for name in KINDS)
    lines += [f"- {row.title}: `{row.module.replace('.', '/')}.py::{row.test}`" for row in ROWS.values()]
    lines += ["", f"Each runs as `test[kind]`, with the kinds, from left to right, {names}.", ""]
    return "\n".join(lines)


def on_the_page() -> str:
    """The table as docs/architecture.md has it."""
    text = PAGE.read_text()
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)]


def write() -> None:
    """Put the table into the page."""
    text = PAGE.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    PAGE.write_text(before + table() + after)


__all__ = ["ROWS", "No", "Opened", "pair", "table", "write"]
