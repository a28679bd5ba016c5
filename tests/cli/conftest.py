from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Protocol

import pytest
import typer.testing
from typer.main import get_command

from strandline.cli.app import app


class Run(Protocol):
    def __call__(self, *arguments: object, given: str | bytes | None = None) -> typer.testing.Result: ...


_built = cache(get_command)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """A command in this process."""
    # To put all commands together takes longer than most of them do: once is enough.
    monkeypatch.setattr(typer.testing, "_get_command", _built)

    def run(*arguments: object, given: str | bytes | None = None) -> typer.testing.Result:
        return typer.testing.CliRunner().invoke(app, [str(argument) for argument in arguments], input=given)

    return run


@pytest.fixture
def log(tmp_path: Path) -> str:
    """Where a log may be made."""
    return str(tmp_path / "log")


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """A command as a process of its own; it does not outlive the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "strandline.cli", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    with _ended(started):
        yield start


@pytest.fixture
def on_terminal() -> Iterator[Callable[..., tuple[int, str]]]:
    """A command on a terminal of its own, on which an answer is typed; gives its status and what it showed."""
    started: list[subprocess.Popen[str]] = []

    def on_terminal(*arguments: object, typed: str = "", columns: int = 150, **environment: str) -> tuple[int, str]:
        ours, theirs = pty.openpty()
        os.write(ours, typed.encode())
        process = subprocess.Popen(
            [sys.executable, "-m", "strandline.cli", *map(str, arguments)],
            stdin=theirs, stdout=theirs, stderr=theirs,
            env={**os.environ, "COLUMNS": str(columns), "TERM": "xterm", **environment},
        )  # fmt: skip
        started.append(process)
        os.close(theirs)
        shown = b""
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # nobody has the other side open any more
                break
            if not piece:
                break
            shown += piece
        os.close(ours)
        return process.wait(timeout=120), shown.decode()

    with _ended(started):
        yield on_terminal


@contextmanager
def _ended(started: list[subprocess.Popen[str]]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.communicate()
