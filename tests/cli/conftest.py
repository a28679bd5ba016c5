from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pytest
import typer.testing

from strandline.cli.app import app


class Run(Protocol):
    def __call__(self, *arguments: object, given: str | bytes | None = None) -> typer.testing.Result: ...


@pytest.fixture
def run() -> Run:
    """A command in this process."""

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


@contextmanager
def _ended(started: list[subprocess.Popen[str]]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.communicate()
