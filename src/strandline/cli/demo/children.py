"""The demo's processes: each in a session of its own, so that it can be ended whole; all end with their parent."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from strandline.errors import StrandlineError

_SESSION_FIELD: Final = 3
_LONGEST: Final = 500
_TRACE: Final = re.compile(r"\s+(at |\.\.\. \d+ more|File |\^|~)|Traceback |JVM stacktrace:|\s*$")
"""The lines of traces, of Java and of Python."""
_ERROR: Final = re.compile(r"(Caused by: )?[A-Za-z_][\w$]*(\.[\w$]+)*(Error|Exception|Failure|[a-z]): \S")
"""The line of an error: its class and what it says."""
_ERROR_NAME: Final = re.compile(r"^strandline\.errors\.\w+: ")


class Child:
    """A Python module run as a process. Its output goes to a file; its standard input is its leash."""

    def __init__(self, name: str, module: str, arguments: list[str], output: Path) -> None:
        """Start it."""
        self.name = name
        self._output = output
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its session."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def tell(self, line: str) -> None:
        """Write a line to its standard input; a child that has ended hears nothing."""
        leash = self._process.stdin
        if leash is not None:
            with contextlib.suppress(BrokenPipeError):
                leash.write(f"{line}\n".encode())
                leash.flush()

    def kill(self) -> None:
        """SIGKILL to it and to everything it has started; returns when it is gone."""
        if self.running:  # the number of a process that has ended may be another's by now
            for group in {self.pid, *_groups_of_session(self.pid)}:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
            self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def check(self) -> None:
        """Raise what it said last if it has failed."""
        code = self._process.poll()
        if code not in (None, 0):
            why = failure_in(self._output.read_text(errors="replace"))
            how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
            raise StrandlineError(
                f"The demo's process {self.name!r} {how}: {why} All that it printed is in {self._output}."
            )


def failure_in(printed: str) -> str:
    """What a process that failed says of why, in one sentence: its last error, and no line of a trace."""
    lines = [line.rstrip() for line in printed.splitlines() if line.strip() and not _TRACE.match(line)]
    errors = [line for line in lines if _ERROR.match(line)]
    own = [line for line in errors if _ERROR_NAME.match(line)]
    last = (own or errors or lines or ["it printed nothing"])[-1].strip()
    said = _ERROR_NAME.sub("", last)[:_LONGEST]
    return said if said.endswith(".") else f"{said}."


def _groups_of_session(session: int) -> set[int]:
    """The process groups of a session. Spark's Python workers leave their parent's group, but not its session."""
    groups = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):  # elsewhere than on Linux, workers end when their driver is gone
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = entry.read_text().rpartition(")")[2].split()
            if int(fields[_SESSION_FIELD]) == session:
                groups.add(int(fields[2]))
    return groups


class Family:
    """All processes of one demo; leaving it, for whatever reason, ends those that still run."""

    def __init__(self) -> None:
        """Nobody yet."""
        self._children: list[Child] = []

    def start(self, name: str, module: str, arguments: list[str], output: Path) -> Child:
        """Start a module as a process."""
        child = Child(name, module, arguments, output)
        self._children.append(child)
        return child

    def forget(self, child: Child) -> None:
        """This one was ended on purpose."""
        self._children.remove(child)

    def check(self) -> None:
        """Raise if one of them has failed."""
        for child in self._children:
            child.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children:
            child.kill()
