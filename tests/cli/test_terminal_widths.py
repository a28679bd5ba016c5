"""What commands show on terminals of 80 and of 140 columns, with and without colours: nothing is cut."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from rich.progress import Task, TaskID

import strandline as sl
from strandline.cli.app import COMMANDS, imported_command
from strandline.cli.shared import output as show
from tests.cli.conftest import Run
from tests.matrix_cases import some

OnTerminal = Callable[..., tuple[int, str]]

CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|4[0-8]|9[0-7])[0-9;]*m")


@pytest.fixture
def orders(run: Run, log: str) -> str:
    """A log with slots whose names and numbers are long."""
    run("produce", log, "--create", "--retention", "age:7d", "--count", 120_000)
    for name, at in (("billing-of-all-the-orders", 1_000), ("search", 119_999)):
        assert run("slots", "create", log, name, "--at", at).exit_code == 0
    opened = sl.open(log)
    assert isinstance(opened, sl.log.ObjectLog)
    opened.slots.claim("search", "indexer-of-the-shop-in-oslo")
    return log


@pytest.mark.matrix
@pytest.mark.parametrize("columns", some([40, 80, 140], 1))
@pytest.mark.parametrize("command", ["lag", "slots"])
def test_every_number_of_every_slot_is_shown_whole(
    run: Run, on_terminal: OnTerminal, orders: str, command: str, columns: int
) -> None:
    found = json.loads(run(command, orders, "--json").stdout)["slots"]
    status, shown = on_terminal(command, orders, columns=columns)
    words = " ".join(CODE.sub("", shown).split())
    assert status == 0
    for slot in found:
        row = words[words.index(slot["slot"]) :]
        assert f"{slot['position']:,}" in row
    assert "pins the floor" in words
    assert "indexer-of-the-shop-in-oslo" in words
    if command == "lag":
        assert [f"{slot['records_behind']:,}" in words for slot in found] == [True, True]
        assert show.size(found[0]["bytes_behind"]) in words


def printed(table: object, width: int) -> str:
    file = io.StringIO()
    show._Terminal(file=file, markup=False, force_terminal=False, width=width).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def test_a_table_is_one_where_it_fits_and_paragraphs_where_it_does_not() -> None:
    table = show.table("slot", ">records\nbehind", "holder", "")
    table.add_row("billing", "1,234,567", "-", "up to date")
    table.add_row("search", "0", "worker-1", "")
    assert printed(table, 60).splitlines() == [
        "           records",
        "slot        behind  holder",
        "billing  1,234,567  -         up to date",
        "search           0  worker-1",
    ]
    assert "up to date" in printed(table, 40)
    assert printed(table, 39).splitlines()[0] == "slot billing", "no cell is cut, also if it has spaces"
    assert printed(table, 30).splitlines() == [
        "slot billing",
        "  records 1,234,567 behind, up",
        "  to date",
        "slot search",
        "  records 0 behind, holder",
        "  worker-1",
    ]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("2,000 records were read, and all are whole", ["2,000 records were read, and all are", "whole"]),
        (
            "  damage  batch 17 is damaged: restore it",
            ["  damage  batch 17 is damaged:", "          restore it"],
        ),
        ("  events  s3://bucket/cold/events  8 of them", ["  events  s3://bucket/cold/events  8", "          of them"]),
        ("short", ["short"]),
    ],
)
def test_a_long_line_wraps_at_words_and_beside_its_label(
    said: str, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.StringIO()
    monkeypatch.setattr(file, "isatty", lambda: True)
    monkeypatch.setattr(show, "out", lambda: show._Terminal(file=file, force_terminal=False, width=36))
    monkeypatch.setattr("sys.stdout", file)
    show.say(said)
    assert [line.rstrip() for line in file.getvalue().splitlines()] == shown


@pytest.mark.matrix
def test_no_line_of_the_doctor_is_wider_than_the_terminal(on_terminal: OnTerminal) -> None:
    _, shown = on_terminal("doctor", columns=60)
    lines = CODE.sub("", shown).splitlines()
    assert max(len(line) for line in lines) <= 60
    assert "pyarrow" in "".join(lines)


def test_progress_shows_large_numbers_with_separators() -> None:
    task = Task(TaskID(0), "appending", None, 917_504, _get_time=lambda: 8.0)
    task.start_time = 0.0
    assert str(show._Rate().render(task)) == "114,688/s"
    assert str(show._Done().render(task)) == "917,504"
    task.total = 1_000_000
    assert str(show._Done().render(task)) == "917,504 of 1,000,000"


SCREENS = {
    "help": ["--help"],
    "help of a command": ["lag", "--help"],
    "table": ["lag", "LOG"],
    "list": ["doctor"],
    "error": ["tail", "/nowhere/at/all"],
    "usage error": ["nonsense"],
}


@pytest.mark.matrix
@pytest.mark.parametrize("arguments", some(SCREENS.values(), 1), ids=SCREENS)
def test_colours_are_for_terminals_and_not_with_no_color(
    run: Run, on_terminal: OnTerminal, log: str, arguments: list[str]
) -> None:
    run("produce", log, "--create", given="a\n")
    run("slots", "create", log, "billing", "--at", "0")
    arguments = [log if word == "LOG" else word for word in arguments]
    coloured, plain = (on_terminal(*arguments, **more)[1] for more in ({}, {"NO_COLOR": "1"}))
    assert COLOUR.search(coloured)
    assert not COLOUR.search(plain)
    done = run(*arguments)
    assert not CODE.search(done.output)


@pytest.mark.parametrize("columns", [80, 140])
def test_the_help_of_every_command_fits(run: Run, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", columns)
    for words in [[], *called(imported_command, COMMANDS)]:
        shown = run(*words, "--help").stdout
        assert max(map(len, shown.splitlines())) <= columns, words
        assert "…" not in shown.replace("doctor-…", "").replace("ROLE,…", ""), (
            f"something is cut in the help of {words}"
        )
        marks = shown.replace("{name}", "")
        assert not re.search(r"<(bool|str|int|float|path|list)|<\w[^>]*$|[{}]", marks, re.MULTILINE), words


def called(command: Callable[[str], Any], names: Iterable[str]) -> Iterator[list[str]]:
    """The words that call each command and each of its subcommands."""
    for name in names:
        below = getattr(command(name), "commands", {})
        yield [name]
        yield from ([name, *words] for words in called(below.__getitem__, below))


def test_an_address_where_a_command_belongs_is_listed_or_an_error_that_says_what_to_type(run: Run, log: str) -> None:
    run("produce", log, "--create", given="a\n")
    for group in ("slots", "sources"):
        assert run(group, log).stdout == run(group, "list", log).stdout
        assert run(group, "--json", log).stdout == run(group, "list", log, "--json").stdout
        assert "Did you mean 'list'" in run(group, "lsit", log).stderr
    for words in (("tier",), ("wal",), ("node",), ("table",), ("spark", "--master", "local[1]"), ()):
        done = run(*words, log, "--json")
        assert (done.exit_code, done.stdout) == (2, "")
        message = json.loads(done.stderr)["message"]
        name = " ".join(["strandline", *words[:1]])
        assert message.startswith(f"'{log}' is no command: write {name} COMMAND {log}. ")
