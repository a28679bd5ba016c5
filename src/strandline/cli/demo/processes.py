"""The demo's processes, and the folder and marker files by which they signal one another.

Each process has its own session, so that it is killed with all its children.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final, Self, cast

from strandline.errors import StrandlineError

SLOT: Final = "orders-table"
LATE_SLOT: Final = "late-changes"
STALLED_SLOT: Final = "stalled-report"
_SESSION_FIELD: Final = 3
_LONGEST: Final = 500
_TRACE: Final = re.compile(r"\s+(at |\.\.\. \d+ more|File |\^|~)|Traceback |JVM stacktrace:|\s*$")
"""The lines of traces, of Java and of Python."""
_ERROR: Final = re.compile(r"(Caused by: )?[A-Za-z_][\w$]*(\.[\w$]+)*(Error|Exception|Failure|[a-z]): \S")
"""The line of an error: its class and message."""
_ERROR_NAME: Final = re.compile(r"^strandline\.errors\.\w+: ")
_OWN_ERROR: Final = re.compile(_ERROR_NAME.pattern, re.MULTILINE)


class DemoFolder:
    """The paths below the demo's folder: the log, the tables, the checkpoints and the markers."""

    def __init__(self, path: Path) -> None:
        """Only names paths; :meth:`prepare` creates the folders."""
        tables, markers = path / "tables", path / "markers"
        self.path = path
        self.log = str(path / "log")
        self.orders = str(tables / "orders")
        self.naive = str(tables / "naive")
        self.changes = str(tables / "changes")
        """All changes, written by the late consumer."""
        self.stalled = str(tables / "stalled")
        self.checkpoints = path / "checkpoints"
        self.output = path / "output"
        self.hold = markers / "hold"
        """While it exists, each query stops for good right after its next write."""
        self.stop = markers / "stop"
        """Asks the pipeline to stop."""
        self.naive_position = markers / "naive.json"
        """The next offset of the naive pipeline."""
        self._markers = markers

    def held(self, query: str) -> Path:
        """Marks that a query has written a batch and waits to be killed."""
        return self._markers / f"held-{query}"

    def up(self, run: int) -> Path:
        """Marks that all queries of a run are started."""
        return self._markers / f"up-{run}"

    def prepare(self) -> None:
        """Create the folders."""
        for folder in (self._markers, self.output, self.checkpoints, self.path / "tables"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def write_marker(path: Path, fact: Any = None) -> None:
    """Write a marker atomically."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    hidden.write_text(json.dumps(fact))
    hidden.replace(path)


def read_marker(path: Path) -> Any:
    """The value of a marker; None if it does not exist."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def exit_with_parent(on_line: Callable[[str], None] = lambda _: None) -> None:
    """End this process when its parent has ended, which closes standard input; pass each line of it to ``on_line``."""

    def listen() -> None:
        for line in sys.stdin:
            on_line(line.strip())
        os._exit(3)

    threading.Thread(target=listen, name="parent", daemon=True).start()


class Process:
    """A Python module run as a process. It writes to a file, and ends when its standard input is closed."""

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
        self._stdin = cast("IO[bytes]", self._process.stdin)

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def send(self, line: str) -> None:
        """Write a line to its standard input; ignored if it has ended."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(f"{line}\n".encode())
            self._stdin.flush()

    def kill(self) -> None:
        """Send SIGKILL to the whole session and wait for the process to end."""
        if self.running:  # the id of an ended process may belong to another one
            for group in {self._process.pid, *_groups_of_session(self._process.pid)}:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
            self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    @property
    def failure(self) -> str | None:
        """Why it has failed, in one sentence; None if it runs, or has ended well."""
        return failure_in(self._printed()) if self._process.poll() not in (None, 0) else None

    @property
    def is_refused(self) -> bool:
        """Whether it has failed with an error of ours, which another try would meet again."""
        return self.failure is not None and _OWN_ERROR.search(self._printed()) is not None

    def _printed(self) -> str:
        return self._output.read_text(errors="replace")

    def check(self) -> None:
        """Raise its last error if it has failed."""
        code = self._process.poll()
        if code not in (None, 0):
            how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
            raise StrandlineError(
                f"The demo's process {self.name!r} {how}: {self.failure} All that it printed is in {self._output}."
            )


def failure_in(printed: str) -> str:
    """The last error in a process's output, as one sentence without a stack trace."""
    lines = [line.rstrip() for line in printed.splitlines() if line.strip() and not _TRACE.match(line)]
    errors = [line for line in lines if _ERROR.match(line)]
    own = [line for line in errors if _ERROR_NAME.match(line)]
    last = (own or errors or lines or ["it printed nothing"])[-1].strip()
    said = _ERROR_NAME.sub("", last)[:_LONGEST]
    return said if said.endswith(".") else f"{said}."


def _groups_of_session(session: int) -> set[int]:
    """The process groups of a session: Spark's Python workers leave their parent's group, but not its session."""
    groups = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):  # elsewhere than on Linux, workers end when their driver is gone
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = entry.read_text().rpartition(")")[2].split()
            if int(fields[_SESSION_FIELD]) == session:
                groups.add(int(fields[2]))
    return groups


class ProcessGroup:
    """The processes of one demo. Leaving the block kills those that still run."""

    def __init__(self) -> None:
        """An empty group."""
        self._processes: list[Process] = []

    def start(self, name: str, module: str, arguments: list[str], output: Path) -> Process:
        """Start a module as a process."""
        process = Process(name, module, arguments, output)
        self._processes.append(process)
        return process

    def kill(self, process: Process) -> None:
        """Kill a process, which is no failure."""
        process.kill()
        self._processes.remove(process)

    def check(self) -> None:
        """Raise the error of a process that has failed."""
        for process in self._processes:
            process.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
