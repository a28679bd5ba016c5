"""Runs the examples of a page as a reader would: writes its files, types its commands, compares what they print.

A fenced block is one of these, or has examples of Python's prompt, which pytest runs:

    ```json title="order.json"      a file, in the folder of the page
    ```python                       a program, in this process; all blocks of a page share their names
    ```console                      commands after "$ ", continued after "> ", and what they print
    ```console title="node a"       another terminal; its last command may go on while others are typed elsewhere

``<!-- $ COMMAND -->`` and ``<!-- >>> STATEMENT -->`` prepare what the next block needs, and show nothing;
``<!-- [node a] $ COMMAND -->`` goes on in another terminal. ``<!-- not run: REASON -->`` above a block says why nothing
runs it. ``^C`` and
``^\\`` on a line of their own are the keys that interrupt and kill what runs in that terminal. In expected output ``…``
stands for anything, in a line or for whole lines; times, rates, sizes, ids and dates count as equal.
``python -m tests.docs.record PAGE`` writes what the commands print into the page.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path

HOME = Path(__file__).resolve().parents[2]
PATIENCE = 300.0
"""Seconds after which a command hangs. It says nothing about speed."""
_HEEDING_KEYS = """
import os, signal, sys
for key in (signal.SIGINT, signal.SIGQUIT):
    signal.signal(key, signal.SIG_DFL)
os.execvp("bash", ["bash", "-c", sys.argv[1]])
"""
"""Runs a script that the keys interrupt, although programs that a shell starts in the background ignore them."""

HIDDEN = re.compile(r"^<!-- (\[(?P<title>[^\]]+)\] )?(?P<prompt>\$|>>>|\^C|\^\\)( (?P<line>.*))? -->$", re.MULTILINE)
FENCE = re.compile(
    r"(^<!-- not run: (?P<reason>[^\n]+) -->\n)?^```(?P<language>[\w+-]*)(?P<rest>[^\n`]*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
NOT_TYPED = ("pip install ", "python3 -m venv ")
"""Commands that make an environment: tests have one."""
KEYS = {"^C": signal.SIGINT, "^\\": signal.SIGQUIT}
IS_INSTALLED = any(found.name == "strandline" for found in entry_points(group="pytest11"))
"""Whether pytest finds the fixtures by itself: not in an environment that is older than they are."""
EXTRAS = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]["optional-dependencies"]

EQUAL = (
    (r"\b[0-9a-f]{8}…", "ID"),
    (r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "ID"),
    (r"\b[0-9a-f]{32}\b", "ID"),
    (r"\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d([.,]\d+)?(Z|\+00:00)?", "DATE"),
    (r"[\d,.]+ (records?|rows?)/s", "RATE"),
    (r"\b[\d.]+ (ms|s|min|h)\b( \d+ (min|s)\b)?", "TIME"),
    (r"\b[\d.,]+ (B|kB|MB|GB)\b", "SIZE"),
    (r"\band is (connecting|bootstrapping|leading|following)\.$", "and is STATE."),
    (r" {2,}", "  "),
    (r"[ \t]+$", ""),
)
"""What differs from run to run, and what it counts as."""
NOISE = re.compile(
    r'^Traceback .*\n(  File ".*pyspark/daemon\.py".*\n(    .*\n)*)+BrokenPipeError: .*\n'
    r"|^[\w ]+: [\d,]+( of [\d,]+)?, [\d,]+/s(, \d+ dead letters?)?\n",
    re.MULTILINE,
)
"""Printed or not: by a Spark worker whose session stops before its last bytes; progress of what takes long."""


class PageFailed(AssertionError):
    """An example does not do what the page says."""


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    title: str
    body: str
    start: int
    """Where the body begins in the page's text."""
    not_run: str = ""
    """Why nothing runs it; empty if something does."""

    @property
    def kind(self) -> str:
        """How it is run: ``terminal``, ``file``, ``program`` or ``doctest``; empty if it is not."""
        if self.not_run:
            return ""
        if self.language == "console":
            return "terminal"
        if re.fullmatch(r"[\w./-]+\.\w+", self.title):
            return "file"
        if re.search(r"^>>> ", self.body, re.MULTILINE):
            return "doctest"
        return "program" if self.language == "python" else ""


@dataclass(frozen=True)
class Hidden:
    """A line that prepares something."""

    prompt: str
    """Of a shell or of Python; or a key."""
    line: str
    title: str
    """Of the terminal in which it goes on; empty if the next step waits for its end."""


@dataclass
class Step:
    """A command, or a key, and what is printed after it."""

    command: str
    expected: list[str] = field(default_factory=list)


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order.

    >>> blocks('```json title="a.json"\\n{}\\n```\\n')
    [Block(language='json', title='a.json', body='{}\\n', start=23, not_run='')]
    """
    return [
        Block(
            found["language"],
            next(iter(re.findall(r'title="([^"]*)"', found["rest"])), ""),
            found["body"],
            found.start("body"),
            found["reason"] or "",
        )
        for found in FENCE.finditer(text)
    ]


def steps(body: str) -> list[Step]:
    """What is typed in a console block, and the output that the page shows for it.

    >>> steps("$ echo a \\\\\\n>   b\\na b\\n^C\\nstopped\\n")
    [Step(command='echo a \\\\\\n  b', expected=['a b']), Step(command='^C', expected=['stopped'])]
    """
    found: list[Step] = []
    for line in body.splitlines():
        if line.startswith("$ ") or line in KEYS:
            found.append(Step(line.removeprefix("$ ")))
        elif not found:
            raise PageFailed(f"A console block begins with a command, not with {line!r}.")
        elif line.startswith("> ") and not found[-1].expected:
            found[-1].command += "\n" + line[2:]
        else:
            found[-1].expected.append(line)
    return found


def plain(text: str) -> list[str]:
    """Lines without what differs from run to run.

    >>> plain("3 records in 0.1 s, 26 records/s  \\n")
    ['3 records in TIME, RATE']
    """
    text = NOISE.sub("", re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text))
    for pattern, replacement in EQUAL:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return text.strip("\n").splitlines()


def agrees(printed: str, expected: list[str]) -> bool:
    """Whether this is what the page shows.

    >>> agrees("a\\nb 0.2 s\\nc", ["a", "…", "c"]), agrees("a", ["b"]), agrees("see /tmp/x now", ["see … now"])
    (True, False, True)
    """
    pattern = ""
    for line in plain("\n".join(expected)):
        pattern += "(.*\n)*?" if line.strip() == "…" else ".*?".join(re.escape(part) for part in line.split("…")) + "\n"
    return re.fullmatch(pattern, "".join(line + "\n" for line in plain(printed))) is not None


class Terminal:
    """A shell in a folder: one command at a time, with the folder and the variables that the last one left."""

    def __init__(self, folder: Path, state: Path, environment: Mapping[str, str]) -> None:
        self.folder, self.state, self.environment = folder, state, dict(environment)
        self.status = 0
        """Exit status of the last command."""
        self._process: subprocess.Popen[str] | None = None
        self._printed: list[str] = []
        self._reader: threading.Thread | None = None

    def type(self, command: str) -> None:
        """Start a command."""
        if self._process is not None:
            raise PageFailed(f"{command!r} is typed into a terminal in which another command runs.")
        script = f"{command}\nstatus=$?; {{ pwd; env -0; }} > {shlex.quote(str(self.state))}; exit $status"
        self.state.unlink(missing_ok=True)
        self._printed = []
        self._process = subprocess.Popen(
            [sys.executable, "-c", _HEEDING_KEYS, script],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()

    def press(self, key: str) -> None:
        """Send the signal of a key to what runs here."""
        if self._process is None:
            raise PageFailed(f"{key} is pressed where nothing runs.")
        self._printed = []
        os.killpg(self._process.pid, KEYS[key])

    def wait(self, expected: list[str] | None, *, may_go_on: bool) -> str:
        """What was printed until the command ended, or, if it may go on, until that was what is expected.

        A command that goes on may print more at any moment, which nobody waits for.
        """
        assert self._process is not None
        end = time.monotonic() + PATIENCE
        while self._process.poll() is None:
            if may_go_on and expected:
                lines = self._printed.copy()
                texts = ("".join(lines[:count]) for count in range(len(lines) + 1))
                if (found := next((text for text in texts if agrees(text, expected)), None)) is not None:
                    return found
            if time.monotonic() > end:
                raise PageFailed(f"A command does not end; it printed {''.join(self._printed)!r}.")
            time.sleep(0.02)
        assert self._reader is not None
        self._reader.join(PATIENCE)
        self.status, self._process = self._process.returncode, None
        self._take_state()
        return "".join(self._printed)

    def close(self) -> None:
        """Kill what still runs, with everything that it started."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._printed.append(line)

    def _take_state(self) -> None:
        if self.state.exists():
            folder, _, variables = self.state.read_text().partition("\n")
            self.folder = Path(folder)
            self.environment = dict(pair.split("=", 1) for pair in variables.split("\0") if "=" in pair)


class Page:
    """The examples of one page, run in one folder."""

    def __init__(
        self,
        path: Path,
        folder: Path,
        *,
        instead: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        names: Mapping[str, object] | None = None,
    ) -> None:
        """``instead`` has what to use in place of addresses that a test cannot have, such as that of a bucket.

        ``names`` has what programs find, such as a Spark session.
        """
        self.path, self.text = path, path.read_text()
        self.home = folder / "me"
        self.home.mkdir(exist_ok=True)  # a tutorial goes on where another one has ended
        elsewhere = {"s3://bucket": f"file://{folder}/bucket", "/var/lib": f"{folder}/var"}
        self.instead = {"/home/me": str(self.home), **elsewhere, **(instead or {})}
        self.terminals: dict[str, Terminal] = {}
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "100",
            "LC_ALL": "C.UTF-8",
            "STRANDLINE_CHECKOUT": str(HOME),
            "PYTEST_PLUGINS": "" if IS_INSTALLED else "strandline.testing.plugin",
            **(environment or {}),
        }
        self._folder = folder
        self._scope: dict[str, object] = {"__name__": "page", **(names or {})}

    def run(self) -> None:
        """Run everything; ``PageFailed`` if something else is printed than the page shows."""
        for step, printed in self.outcomes():
            if not agrees(printed, step.expected):
                shown, found = "\n".join(step.expected), self.as_shown(printed)
                raise PageFailed(f"{self.path.name}: $ {step.command}\nshould print:\n{shown}\nprinted:\n{found}")

    def outcomes(self, *, recording: bool = False) -> Iterator[tuple[Step, str]]:
        """Each step with what it printed."""
        try:
            for part in self._parts():
                if isinstance(part, Hidden):
                    self._prepare(part)
                elif part.kind == "file":
                    target = self.home / part.title
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_text(self.as_run(part.body))
                elif part.kind == "program":
                    self._execute(part.body)
                elif part.kind == "terminal":
                    yield from self._block(part, recording=recording)
        finally:
            for terminal in self.terminals.values():
                terminal.close()

    def as_run(self, text: str) -> str:
        """A text of the page with addresses that exist here."""
        for shown, real in self.instead.items():
            text = text.replace(shown, real)
        return text

    def as_shown(self, text: str) -> str:
        """Output with the addresses of the page."""
        for shown, real in reversed(self.instead.items()):
            text = text.replace(real, shown)
        return text

    def _parts(self) -> list[Block | Hidden]:
        """Blocks and hidden lines, in the order of the page."""
        parts: list[tuple[int, Block | Hidden]] = [(block.start, block) for block in blocks(self.text)]
        for found in HIDDEN.finditer(self.text):
            parts += [(found.start(), Hidden(found["prompt"], found["line"] or "", found["title"] or ""))]
        return [part for _, part in sorted(parts, key=lambda pair: pair[0])]

    def _prepare(self, hidden: Hidden) -> None:
        if hidden.prompt == ">>>":
            self._execute(hidden.line)
            return
        terminal = self._terminal(hidden.title)
        if hidden.prompt in KEYS:
            terminal.press(hidden.prompt)
            terminal.wait(None, may_go_on=False)
            return
        terminal.type(self.as_run(f"set -e; {hidden.line}"))
        if hidden.title:
            return
        printed = terminal.wait(None, may_go_on=False)
        if terminal.status != 0:
            raise PageFailed(f"{self.path.name}: {hidden.line}\nfailed: {printed}")

    def _execute(self, code: str) -> None:
        """Run a program of the page in its folder; what it prints is not compared."""
        try:
            with contextlib.chdir(self.home), contextlib.redirect_stdout(io.StringIO()):
                exec(compile(self.as_run(code), str(self.path), "exec"), self._scope)
        except Exception as error:
            raise PageFailed(f"{self.path.name}:\n{code}\nraised {error!r}") from error

    def _block(self, block: Block, *, recording: bool) -> Iterator[tuple[Step, str]]:
        typed = steps(block.body)
        for step in typed:
            terminal = self._terminal(block.title)
            if step.command.startswith(NOT_TYPED):
                check_extras(step.command)
                continue
            if step.command in KEYS:
                terminal.press(step.command)
            else:
                terminal.type(self.as_run(step.command))
            may_go_on = bool(block.title) and step is typed[-1] and step.command not in KEYS
            expected = [self.as_run(line) for line in step.expected]
            printed = terminal.wait(expected, may_go_on=may_go_on)
            if not recording and not agrees(printed, expected):
                yield step, printed
            else:
                yield Step(step.command, expected), printed

    def _terminal(self, title: str) -> Terminal:
        if title not in self.terminals:
            state = self._folder / f"terminal-{len(self.terminals)}"
            self.terminals[title] = Terminal(self.home, state, self.environment)
        return self.terminals[title]


def check_extras(command: str) -> None:
    """Refuse a ``pip install`` of extras that do not exist; tests have everything installed.

    >>> check_extras("pip install '.[cli,delta]' './strandline-1.0-py3-none-any.whl[typed]'")
    >>> check_extras("pip install 'strandline[moon]'")
    Traceback (most recent call last):
    tests.docs.pages.PageFailed: There is no extra 'moon'.
    """
    for names in re.findall(r"(?:strandline[\w.-]*|\.)\[([^\]]*)\]", command):
        for name in names.split(","):
            if name not in EXTRAS:
                raise PageFailed(f"There is no extra {name!r}.")
