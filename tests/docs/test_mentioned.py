"""What pages mention and nobody runs exists: commands with their options, names of the API with their arguments."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import pytest
import typer
from typer.core import TyperGroup

from strandline.cli.app import COMMANDS, USAGE_ERROR, app, imported_command
from tests.docs.pages import FENCE, HOME, blocks

PAGES = sorted([*(HOME / "docs").rglob("*.md"), HOME / "README.md", HOME / "examples" / "README.md"])


class Mistaken(AssertionError):
    """A page mentions something that does not exist."""


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", text)


def commands(text: str) -> Iterator[list[str]]:
    """The words of each call of ``strandline`` in the fenced blocks and code spans of a page.

    >>> list(
    ...     commands("Use `strandline lag URL`.\\n```text\\n$ A=1 strandline tail x \\\\\\n  --follow | head\\n```\\n")
    ... )
    [['tail', 'x', '--follow'], ['lag', 'URL']]
    """
    lines = [line for block in blocks(text) for line in block.body.replace("\\\n", " ").splitlines()]
    spans = re.findall(r"(?<!`)`(strandline [a-z][^`\n]*)`", prose(text))
    for line in [*(line for line in lines if re.match(r"(\$ )?([A-Z_]+=\S* )*strandline ", line)), *spans]:
        words = shlex.split(line.removeprefix("$ "), comments=True)
        words = words[words.index("strandline") + 1 :]
        end = next((at for at, word in enumerate(words) if word in {"|", ">", "&", "&&", ";"}), len(words))
        yield words[:end]


def check_command(words: list[str]) -> None:
    """Refuse a command or an option that does not exist.

    >>> check_command(["tail", "./orders", "--from", "5"])
    >>> check_command(["tail", "./orders", "--backwards"])
    Traceback (most recent call last):
    tests.docs.test_mentioned.Mistaken: strandline tail ./orders --backwards: No such option: --backwards
    >>> check_command(["tale"])
    Traceback (most recent call last):
    tests.docs.test_mentioned.Mistaken: strandline tale: there is no such command
    """
    said = f"strandline {' '.join(words)}"
    words = [word for word in words if word not in {"…", "..."}]
    if not words or words[0].startswith("-"):
        return
    if words[0] not in COMMANDS:
        raise Mistaken(f"{said}: there is no such command")
    command, words = imported_command(words[0]), words[1:]
    context = typer.Context(command, parent=typer.Context(typer.main.get_command(app)))
    while isinstance(command, TyperGroup):
        rest = command.make_parser(context).parse_args(list(words))[1]
        if rest and rest[0] in command.commands:
            command, words = command.commands[rest[0]], rest[1:]
        elif "list" in command.commands:  # `strandline slots URL` lists
            command = command.commands["list"]
        elif rest and re.match(r"[a-z]", rest[0]):
            raise Mistaken(f"{said}: there is no such command")
        else:
            return
        context = typer.Context(command, parent=context)
    try:
        command.make_parser(context).parse_args(words)
    except USAGE_ERROR as wrong:
        if "requires an argument" not in wrong.format_message():  # a page may name an option alone
            raise Mistaken(f"{said}: {wrong.format_message()}") from None


def check_code(code: str) -> None:
    """Refuse names of the API that do not exist, and arguments that a call does not take.

    >>> check_code("sl.follow(log, sink, slot='a')")
    >>> check_code("sl.folow(log)")
    Traceback (most recent call last):
    tests.docs.test_mentioned.Mistaken: there is no sl.folow
    >>> check_code("sl.follow(log, sink, slots='a')")
    Traceback (most recent call last):
    tests.docs.test_mentioned.Mistaken: sl.follow takes no slots=
    """
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute):
            _resolved(node)
        if isinstance(node, ast.Call) and (found := _resolved(node.func)) is not None:
            takes = inspect.signature(found).parameters.values()
            if not any(one.kind is one.VAR_KEYWORD for one in takes):
                for keyword in node.keywords:
                    if keyword.arg is not None and keyword.arg not in {one.name for one in takes}:
                        raise Mistaken(f"{ast.unparse(node.func)} takes no {keyword.arg}=")


def _resolved(node: ast.expr) -> object | None:
    """What a dotted name of the package is; None for any other expression."""
    if not re.fullmatch(r"(sl|strandline)(\.\w+)+", name := ast.unparse(node)):
        return None
    try:
        return resolve_name(re.sub(r"^sl\b", "strandline", name))
    except (AttributeError, ImportError):
        raise Mistaken(f"there is no {name}") from None


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(HOME)))
def test_every_command_that_a_page_mentions_exists(page: Path) -> None:
    for words in commands(page.read_text()):
        check_command(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(HOME)))
def test_every_name_that_a_page_mentions_exists(page: Path) -> None:
    text = page.read_text()
    for block in blocks(text):
        if block.language == "python" and ">>>" not in block.body:
            check_code(block.body)
    for span in re.findall(r"(?<!`)`(sl\.[\w.]+)", prose(text)):
        check_code(span.rstrip("."))
