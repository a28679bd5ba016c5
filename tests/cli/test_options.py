"""Options: those that all commands share, and how many there are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import strandline as sl
from strandline.cli.app import COMMANDS, imported_command
from tests.cli.conftest import Run

MOST = 270
"""Options of all commands together, without those that all share: a new one takes the place of one that nobody sets."""


def options(command: Any) -> Iterator[str]:
    own = (param for param in command.params if param.param_type_name == "option" and not param.hidden)
    yield from (param.opts[0] for param in own)
    for each in getattr(command, "commands", {}).values():
        yield from options(each)


def test_there_are_not_more_options_than_people_can_choose_from() -> None:
    assert sum(len(list(options(imported_command(name)))) for name in COMMANDS) <= MOST


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
    assert run("trim", tmp_path / "log", *given).exit_code == 2


def test_help_names_the_shared_options_that_a_command_takes(run: Run) -> None:
    assert "--json, --debug, --token, --ca, --cert, --cert-key; see strandline -h" in " ".join(
        run("tail", "--help").stdout.split()
    )
    assert "--json, --debug; see strandline -h" in " ".join(run("trim", "--help").stdout.split())
