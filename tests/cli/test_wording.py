"""Errors of commands speak of commands and options."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from strandline import errors
from strandline.log.folders import OPENED_WITH, TAKEN_OVER
from tests.cli.conftest import Run

ERRORS = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
HOME = Path(__file__).parents[2] / "src" / "strandline"

PYTHON = re.compile(r"\b[a-z_]+\(\)|\bsl\.|\b[a-z_]+=|\b[a-z_]+\.[a-z_]+\(|\b[A-Z]\w+\.[a-z_]+\b|\bstrandline\.[a-z]")
"""A call, an argument, a name of the package."""

OF_PROGRAMS = {
    "spark": "Spark's options and calls are what its users write",
    "testing": "for tests",
    "kv": "no command opens a key-value store",
    "snapshots": "no command bootstraps a store",
    "followers/consumer": "no command is a consumer",
    "followers/stores": "no command opens a store",
    "followers/run.py": "a fault of the program",
    "compat/v1/edits.py": "no command is a consumer",
    "log/queue": "no command is a consumer",
    "log/contract.py": "a wrong object as a log",
    "log/read/reading.py": "commands check their options themselves",
    "log/wal/write/groups.py": "no command pickles",
    "node/lead/policies.py": "policies, as they are written",
    "tables/rows/logged.py": "a fault of the program",
    "tables/rows/shape.py": "codecs that commands do not take, or their own words",
    "tables/sql/postgres.py": "connection strings, as PostgreSQL writes them",
    "values": "codecs that commands do not take",
    "cli/spark.py": "settings of Spark",
}
"""Where errors may name calls, and why."""


def sentences() -> Iterator[tuple[str, str]]:
    """Every error of the package that a command may show, with its place; values in it are a ``'word'``."""
    for path in sorted(HOME.rglob("*.py")):
        place = str(path.relative_to(HOME))
        if place.startswith(tuple(OF_PROGRAMS)):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and getattr(node.func, "id", "") in ERRORS:
                yield f"{place}:{node.lineno}", _text(node.args[0])


def _text(argument: ast.expr) -> str:
    parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "'word'" for part in parts)


def test_no_error_that_a_command_may_show_names_a_call_or_an_argument() -> None:
    found = dict(sentences())
    assert len(found) > 500
    assert {place: text for place, text in found.items() if PYTHON.search(text)} == {}


def test_advice_on_another_kind_of_folder_names_no_call() -> None:
    advice = [*OPENED_WITH.values(), *TAKEN_OVER.values()]
    assert [text for text in advice if PYTHON.search(text)] == []


def test_every_exception_from_that_rule_is_needed() -> None:
    for place in OF_PROGRAMS:
        assert (HOME / place).exists(), place


def test_a_log_without_its_identity_is_named_and_not_taken_for_a_wrong_address(run: Run, log: str) -> None:
    run("produce", log, "--create", given="a\n")
    (Path(log) / "log.json").unlink()
    done = run("describe", log)
    assert done.exit_code == 1
    assert "log.json is missing although the head of a log is there" in done.stderr
    assert "let 'strandline create' write it again" in done.stderr


def test_a_table_of_another_kind_names_the_option(run: Run, log: str, tmp_path: Path) -> None:
    run("produce", log, "--create", "--key-separator", "=", given="a=1\n")
    table = f"sqlite:{tmp_path}/t.db#orders"
    run("follow", log, table, "--mode", "append", "--until", "end")
    done = run("follow", log, table, "--mode", "latest", "--until", "end")
    assert (done.exit_code, "mode 'append'" in done.stderr) == (1, True)
    assert "mode=" not in done.stderr
