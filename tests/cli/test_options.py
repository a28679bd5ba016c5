"""Options: those that all commands share, and how many there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import strandline as sl
from strandline.cli.app import COMMANDS, app, imported_command
from tests.cli.conftest import Run

MOST = 300
"""Options of the program and of all commands together: a new one takes the place of one that nobody sets."""
MOST_OF_A_COMMAND = 33
"""As many has ``node run``, which is the configuration of a server."""


def options(command: Any, *words: str) -> Iterator[tuple[str, list[str]]]:
    """The options of a command, and of those in it."""
    yield " ".join(words), [param.opts[-1] for param in command.params if param.param_type_name == "option"]
    for name, each in getattr(command, "commands", {}).items():
        yield from options(each, *words, name)


def test_there_are_not_more_options_than_people_can_choose_from() -> None:
    of_program = [param.opts[-1] for param in get_command(app).params]
    found = dict(each for name in COMMANDS for each in options(imported_command(name), name))
    assert len(found) > 70
    assert sum(map(len, found.values())) + len(of_program) < MOST
    assert max(map(len, found.values())) <= MOST_OF_A_COMMAND
    shared = {"--json", "--debug", "--token", "--ca", "--cert"}
    assert shared < set(of_program)
    assert [name for name, own in found.items() if shared & set(own)] == ["node run"], "they are the program's"


def test_a_shared_option_is_given_before_or_after_the_name_of_a_command(run: Run, tmp_path: Path) -> None:
    sl.open(tmp_path / "log", create=True)
    after, before = run("lag", tmp_path / "log", "--json"), run("--json", "lag", tmp_path / "log")
    assert json.loads(after.stdout)["next"] == json.loads(before.stdout)["next"] == 0
    assert not run("lag", tmp_path / "log").stdout.startswith("{")  # it counts for one call


def test_an_option_of_a_command_wins_over_a_shared_one_of_that_name(run: Run, tmp_path: Path) -> None:
    done = run("produce", tmp_path / "log", "--create", "--key", "id", tmp_path / "rows.jsonl")
    assert "rows.jsonl" in done.stderr
    assert "is for a node" not in done.stderr


def test_an_option_that_connects_to_a_node_is_refused_elsewhere(run: Run, tmp_path: Path) -> None:
    sl.open(tmp_path / "log", create=True)
    given = ("--cert", "c.pem", "--cert-key", "c.key")
    for command in (("lag", tmp_path / "log", *given), (*given, "lag", tmp_path / "log")):
        done = run(*command)
        assert done.exit_code == 1
        assert "--cert, --cert-key is for a node" in done.stderr
    for command in (
        ("trim", tmp_path / "log", *given),
        (*given, "trim", tmp_path / "log"),
        (*given, "quickstart"),
        ("tier", *given),
    ):
        assert run(*command).exit_code == 2, "it connects to no node at all"


def test_help_ends_with_the_names_of_the_shared_options_that_a_command_takes(run: Run) -> None:
    of_nodes = (
        "Every command also takes --json, --debug and, for a node's address, --token, --ca, --cert, --cert-key: see"
    )
    for words in (("tail",), ("slots",), ("slots", "list")):
        assert of_nodes in " ".join(run(*words, "--help").stdout.split())
    for words in (("trim",), ("tier",), ("tier", "run"), ("wal", "inspect")):
        shown = run(*words, "--help").stdout
        assert "Every command also takes --json and --debug: see strandline --help." in " ".join(shown.split())
        assert "Print machine-readable output" not in shown
    assert "Print machine-readable output" in run("--help").stdout


@pytest.mark.parametrize("given", [["--token=FILE"], ["--token", "FILE"]])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_shared_option_with_a_value_is_taken_anywhere(run: Run, tmp_path: Path, given: list[str], at: int) -> None:
    missing = str(tmp_path / "no-token")
    words = ["slots", "list", "grpc://127.0.0.1:1"]
    words[at:at] = [each.replace("FILE", missing) for each in given]
    done = run(*words)
    assert (done.exit_code, "no-token" in done.stderr) == (1, True), done.output


def test_a_value_that_looks_like_a_shared_option_is_a_value(run: Run, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"--json": "a"}\n')
    done = run("produce", tmp_path / "log", tmp_path / "rows.jsonl", "--create", "--key", "--json")
    assert (done.exit_code, done.stdout[:8]) == (0, "1 record"), done.output
    assert json.loads(run("tail", tmp_path / "log", "--json").stdout)["key"] == "a"
    done = run("tail", "--", "--json")
    assert (done.exit_code, "no log at --json" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    ("line", "found"), [("tail --js", "--json"), ("trim --deb", "--debug"), ("lag --to", "--token")]
)
def test_a_shared_option_is_completed_after_a_command(line: str, found: str) -> None:
    words = {"_STRANDLINE_COMPLETE": "complete_bash", "COMP_WORDS": f"strandline {line}", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "strandline.cli"], capture_output=True, text=True, check=False, timeout=600,
        env={**os.environ, **words},
    )  # fmt: skip
    assert done.stdout.split() == [found]
