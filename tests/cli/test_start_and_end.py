"""How the command line begins and ends."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import strandline as sl
from strandline.cli.app import COMMANDS, imported_command
from strandline.cli.quickstart import compare
from strandline.cli.shared import output as show
from strandline.cli.shared.options import SharedOptions, begin
from tests.cli.conftest import Run
from tests.matrix_cases import some


def test_help_names_every_command(run: Run) -> None:
    done = run("--help")
    assert done.exit_code == 0
    commands = "produce tail lag slots trim verify doctor upgrade wal quickstart demo"
    for command in commands.split():
        assert command in done.stdout


def commands() -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Every command, with the words that call it."""
    for name in COMMANDS:
        yield from leaves(imported_command(name), name)


def leaves(command: Any, *path: str) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """The commands of a group, or the command itself."""
    if not hasattr(command, "commands"):
        yield command, path
        return
    for name, one in command.commands.items():
        yield from leaves(one, *path, name)


def with_arguments() -> list[tuple[str, ...]]:
    return [words for command, words in commands() if any(parameter.required for parameter in command.params)]


def test_the_list_of_commands_says_of_each_what_its_own_help_says() -> None:
    for name, (_, text) in COMMANDS.items():
        command = imported_command(name)
        said = command.short_help or command.help.split("\n\n")[0]
        assert " ".join(said.split()) == text, name


@pytest.mark.parametrize(("command", "words"), list(commands()), ids=[" ".join(words) for _, words in commands()])
def test_the_help_of_a_command_has_an_example_that_is_understood(command: Any, words: tuple[str, ...]) -> None:
    examples = re.findall(r"^ *(?:Examples?: )?(strandline .*?)$", command.help, re.MULTILINE)
    assert examples
    for example in examples:
        name, *given = shlex.split(example.partition(" > ")[0])[1:]
        called = imported_command(name)
        while hasattr(called, "commands"):
            called = called.commands[given.pop(0)]
        called.make_context(name, given)  # a usage error if the example is wrong
        assert example.startswith(f"strandline {' '.join(words)}")


@pytest.mark.parametrize("arguments", [("tail", "--json"), ("tail", "x", "--json", "--nonsense"), ("taill", "--json")])
def test_a_usage_error_is_json_with_json(run: Run, arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert json.loads(done.stderr).keys() == {"error", "message", "retryable"}


@pytest.mark.parametrize("words", with_arguments(), ids=" ".join)
def test_a_command_without_its_arguments_says_which_is_missing(run: Run, words: tuple[str, ...]) -> None:
    done = run(*words)
    assert done.exit_code == 2
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert "Missing argument" in done.stderr


def test_a_wrong_choice_is_an_error_that_lists_the_right_ones(run: Run) -> None:
    done = run("follow", "x", "y", "--mode", "nonsense", "--json")
    message = json.loads(done.stderr)["message"]
    assert message == "Invalid value for '--mode': 'nonsense' is not one of 'latest', 'marked', 'append', 'history'."


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
        [sys.executable, "-c", code, "quickstart", "--json"],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 1
    message = "Delta tables need the extra 'delta': pip install 'strandline[delta]'."
    assert json.loads(done.stderr) == {"error": "MissingExtra", "message": message, "retryable": False}


def test_an_error_is_one_line_whatever_its_message_holds(capsys: pytest.CaptureFixture[str]) -> None:
    show.error(ValueError("a\n  b [bold]c[/bold]"))
    assert capsys.readouterr().err == "error: a b [bold]c[/bold]\n"


def test_an_error_names_options_and_no_arguments_of_calls(run: Run, log: str, tmp_path: Path) -> None:
    (tmp_path / "rows.unknown").write_text("{}")
    done = run("produce", log, tmp_path / "rows.unknown", "--create")
    assert (done.exit_code, "name it (--format)" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    ("length", "shown"), [(0.04, "0.0 s"), (59.99, "60.0 s"), (119.9, "1 min 59 s"), (3600, "1 h"), (90_061, "1 d 1 h")]
)
def test_a_length_of_time_is_shown_in_two_units_at_most(length: float, shown: str) -> None:
    assert show.seconds(length) == shown


def test_progress_without_a_terminal_is_plain_lines_or_none(capsys: pytest.CaptureFixture[str]) -> None:
    begin(SharedOptions(json=True))
    with show.meter("appending", total=10) as work:
        work.add(10)
    begin(SharedOptions())
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


def modules_after(*arguments: str, **environment: str) -> set[str]:
    """The modules that a process has imported when its command has ended."""
    code = (
        "import sys, strandline.cli\n"
        "try: strandline.cli.main()\n"
        "except SystemExit: pass\n"
        "print(*sys.modules, sep=chr(10), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, check=True, timeout=600, env={**os.environ, **environment},
    )  # fmt: skip
    return set(done.stderr.splitlines())


HEAVY = {"pyarrow", "numpy", "pandas", "pyspark", "deltalake", "obstore", "asyncio", "prometheus_client"}


@pytest.mark.parametrize("arguments", ["--version", "--help", "--show-completion bash"])
def test_what_needs_no_log_is_answered_without_the_libraries_of_logs(arguments: str) -> None:
    imported = modules_after(*arguments.split())
    assert "typer" in imported
    assert not imported & HEAVY
    ours = {name for name in imported if name.startswith("strandline")}
    shared = {f"strandline.cli.shared{module}" for module in ("", ".groups", ".interruption", ".logs", ".options")}
    assert ours <= {"strandline", "strandline.lazy_names", "strandline.cli", "strandline.cli.app"} | shared


def test_the_names_of_commands_are_completed_without_importing_them() -> None:
    words = {"_STRANDLINE_COMPLETE": "complete_bash", "COMP_WORDS": "strandline ", "COMP_CWORD": "1"}
    code = "import strandline.cli; strandline.cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600,
        env={**os.environ, **words},
    )  # fmt: skip
    assert set(done.stdout.split()) == set(COMMANDS)
    assert not modules_after(**words) & HEAVY


@pytest.mark.parametrize("shell", some(["bash", "zsh", "fish"], 1))
def test_options_of_a_command_are_completed_in_each_shell(shell: str) -> None:
    line = "strandline tail --fol"
    words = {"_STRANDLINE_COMPLETE": f"complete_{shell}", "COMP_WORDS": line, "COMP_CWORD": "2"}
    words |= {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    code = "import strandline.cli; strandline.cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600,
        env={**os.environ, **words},
    )  # fmt: skip
    assert "--follow" in done.stdout
    assert "--json" not in done.stdout


def test_a_command_that_reads_imports_no_engine_and_no_client_that_it_does_not_use(tmp_path: Path) -> None:
    with sl.open(tmp_path, create=True).producer() as producer:
        producer.append(value=b"1")
    imported = modules_after("tail", str(tmp_path))
    assert "pyarrow" in imported
    assert not imported & {"pandas", "pyspark", "deltalake", "rocksdict", "nats", "confluent_kafka"}


@pytest.mark.parametrize("module", ["typer", "strandline.cli.app", "pyarrow", "strandline.cli.logs.tail", "at exit"])
def test_ctrl_c_while_a_command_starts_or_ends_is_one_line(module: str, tmp_path: Path) -> None:
    code = (
        "import atexit, os, signal, sys, strandline.cli\n"
        "press = lambda: os.kill(os.getpid(), signal.SIGINT)\n"
        "class Pressing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: press()\n"
        "sys.meta_path.insert(0, Pressing())\n"
        f"if {module!r} == 'at exit': atexit.register(press)\n"
        "strandline.cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "tail", str(tmp_path / "log"), "--json"],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr.splitlines()[-1]) == (130, "", "interrupted")
    assert len(done.stderr.splitlines()) == (2 if module == "at exit" else 1), "at its end it had said what is wrong"
