"""How the command line begins and ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from strandline.cli.app import app
from strandline.cli.quickstart import compare
from strandline.cli.shared import output as show
from tests.cli.conftest import Run


def test_help_names_every_command(run: Run) -> None:
    done = run("--help")
    assert done.exit_code == 0
    commands = "produce tail lag slots gc verify doctor upgrade wal quickstart demo"
    for command in commands.split():
        assert command in done.stdout


def commands(group: Any, *path: str) -> Iterator[tuple[str, ...]]:
    """Every command that needs an argument, by the words that call it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *path, name)
        elif any(parameter.required for parameter in command.params):
            yield *path, name


@pytest.mark.parametrize("words", list(commands(typer.main.get_command(app))), ids=" ".join)
def test_a_command_without_its_arguments_says_which_is_missing(run: Run, words: tuple[str, ...]) -> None:
    done = run(*words)
    assert done.exit_code == 2
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert "Missing argument" in done.stderr


def test_the_version_is_the_package_s(run: Run) -> None:
    assert run("--version").stdout.startswith("strandline ")


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_extra_the_command_line_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import strandline.cli; strandline.cli.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 1
    assert done.stderr == "The command line needs the extra 'cli': pip install 'strandline[cli]'.\n"


@pytest.mark.matrix
def test_quickstart_without_deltalake_says_what_to_install() -> None:
    code = "import sys; sys.modules['deltalake'] = None; import strandline.cli; strandline.cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "quickstart", "--changes", "100", "--json"],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.endswith("error: Delta tables need the extra 'delta': pip install 'strandline[delta]'.\n")


def test_an_error_is_one_line_whatever_its_message_holds(capsys: pytest.CaptureFixture[str]) -> None:
    show.error(ValueError("a\n  b [bold]c[/bold]"))
    assert capsys.readouterr().err == "error: a b [bold]c[/bold]\n"


@pytest.mark.parametrize(
    ("length", "shown"), [(0.04, "0.0 s"), (59.99, "60.0 s"), (119.9, "1 min 59 s"), (3600, "1 h"), (90_061, "1 d 1 h")]
)
def test_a_length_of_time_is_shown_in_two_units_at_most(length: float, shown: str) -> None:
    assert show.seconds(length) == shown


def test_progress_without_a_terminal_is_plain_lines_or_none(capsys: pytest.CaptureFixture[str]) -> None:
    with show.meter("appending", total=10, quiet=True) as advance:
        advance(10)
    assert capsys.readouterr().err == ""


def test_quickstart_prints_its_code_kills_a_follower_half_way_and_ends_exact(tmp_path: Path) -> None:
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir()
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "strandline.cli", "quickstart"],
        capture_output=True, text=True, check=False, timeout=600,
        cwd=here, env={**os.environ, "TMPDIR": str(temporary)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "def follow_and_kill(url: str, table: str) -> int:" in done.stdout
    assert "SIGKILL; the table is at offset" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("EXACT after ")
    assert done.stderr == ""
    assert f"changes to {temporary}/strandline-quickstart-" in done.stdout, "it writes into a folder of its own"
    assert sorted(tmp_path.rglob("*")) == [here, temporary], "and leaves nothing there, nor anywhere else"


@pytest.mark.matrix
def test_quickstart_as_json_reports_a_kill_in_the_middle_and_how_long_it_took() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "strandline.cli", "quickstart", "--json"],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    facts = json.loads(done.stdout)
    assert facts["exact"] is True
    assert 0 < facts["killed_at"] < facts["changes"]
    assert facts["after_kill"]["different"] > 0
    assert facts["seconds"] > 0


def test_quickstart_s_comparison_finds_what_is_wrong(tmp_path: object) -> None:
    import deltalake
    import pyarrow as pa

    keys = pa.array([b"same", b"other", b"extra", b"twice", b"twice"], pa.binary())
    values = pa.array([b"1", b"wrong", b"3", b"4", b"4"], pa.binary())
    deltalake.write_deltalake(str(tmp_path), pa.table({"key": keys, "value": values}))
    truth = {b"same": b"1", b"other": b"2", b"twice": b"4", b"missing": b"5"}
    assert compare(str(tmp_path), truth) == {"rows": 5, "missing": 1, "extra": 1, "different": 1, "doubled": 1}


def test_a_command_starts_without_pandas_which_arrow_would_import() -> None:
    pytest.importorskip("pandas")
    code = (
        "import sys, pyarrow as pa, strandline.cli\n"
        "try: strandline.cli.main()\n"
        "except SystemExit: pass\n"
        "print(pa.array([1]).to_pylist(), 'pandas' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout.splitlines()[1:] == ["[1] False"]
