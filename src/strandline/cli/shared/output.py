"""Output helpers: numbers, errors, JSON and progress, with and without a terminal."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, Final, TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.padding import Padding
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from strandline.cli.shared import logs
from strandline.cli.shared.options import shared
from strandline.cli.shared.text import escaped
from strandline.model.retention import Consumed, Forever, MaxAge, MaxBytes, Retention

_KILO: Final = 1000
_MINUTE: Final = 60
_HOUR: Final = 3600
_DAY: Final = 86400
_WIDE: Final = 240
_PLAIN_EVERY: Final = 2.0
_BETWEEN: Final = 2
"""Spaces between two columns."""
_NOTHING: Final = ("", "-")
_GAP: Final = re.compile(r"(?<=\S) {2,}(?=\S)")
"""Between a label and its text."""
_AFTER_A_VALUE: Final = ("ago", "behind", "left")
_GENERATED: Final = re.compile(r"(?<![0-9a-f])([0-9a-f]{8})(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}(?![0-9a-f])")


class _Terminal(Console):
    """A console that escapes control sequences in all text."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(escaped(text, keep="\n"), **options)  # before its width is measured

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control is None and not segment.text.isprintable():
                yield Segment(escaped(segment.text, keep="\n"), segment.style)
            else:
                yield segment


class _FittingTable(Table):
    """A table that is printed as a paragraph per row where the terminal is too narrow for it: nothing is cut."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._needed <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        names = [" ".join(str(column.header).split()) for column in self.columns]
        for first, *cells in zip(*(column.cells for column in self.columns), strict=True):
            yield _fact(names[0], first)
            facts = [
                _fact(name, cell) for name, cell in zip(names[1:], cells, strict=True) if str(cell) not in _NOTHING
            ]
            yield Padding(Text(", ").join(facts), (0, 0, 0, 2))

    @property
    def _needed(self) -> int:
        """The width that it needs. Rich itself counts the longest word, also of columns that must not wrap."""
        widths = []
        for column in self.columns:
            texts = [escaped(str(each), keep="\n") for each in (column.header, *column.cells)]
            pieces = [piece for text in texts for piece in (text.splitlines() if column.no_wrap else text.split())]
            widths.append(max(map(cell_len, pieces), default=0))
        return sum(widths) + _BETWEEN * (len(widths) - 1)


def _fact(name: str, cell: RenderableType) -> Text:
    value = cell.copy() if isinstance(cell, Text) else Text(str(cell))
    what, _, after = name.rpartition(" ")
    if after in _AFTER_A_VALUE:
        return Text.assemble(f"{what} ", value, f" {after}")
    return Text.assemble(f"{name} ", value) if name else value


def line(text: str, *, file: TextIO | None = None) -> None:
    """Print one line, on standard output by default, with control characters escaped."""
    print(escaped(text), file=file, flush=True)


def out() -> Console:
    """Standard output. In a pipe nothing is wrapped or truncated."""
    return _Terminal(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else _WIDE)


def err() -> Console:
    """Standard error."""
    width = None if sys.stderr.isatty() else _WIDE
    return _Terminal(stderr=True, highlight=False, markup=False, emoji=False, width=width)


def for_programs() -> bool:
    """Whether the running command prints JSON (``--json``) instead of text."""
    return shared().json


def error(reason: BaseException | str, text: str | None = None) -> None:
    """Print one error as one line on standard error: a sentence, or a JSON object for programs.

    ``text`` replaces the error's own text.
    """
    sentence = " ".join(str(text or reason).split()) or type(reason).__name__
    if for_programs():
        kind = "Error" if isinstance(reason, str) else type(reason).__name__
        document(
            {"error": kind, "message": sentence, "retryable": getattr(reason, "retryable", False)}, file=sys.stderr
        )
    else:
        _say(logging.ERROR, "bold red", sentence)


def warning(text: str) -> None:
    """Print a warning as one line on standard error."""
    _say(logging.WARNING, "bold yellow", text)


def _say(level: int, style: str, text: str) -> None:
    kind = logging.getLevelName(level).lower()
    if logs.is_json():
        logs.say(level, text)
    elif sys.stderr.isatty():
        err().print(Text.assemble((f"{kind}:", style), f" {text}"))
    else:
        line(f"{kind}: {text}", file=sys.stderr)


def answer(fields: Any, *lines: RenderableType | Callable[[], RenderableType]) -> None:
    """Print the result of a command: one JSON value for programs, or these lines and tables for people.

    A function is called only if its table is printed.
    """
    if for_programs():
        document(fields)
        return
    for each in lines:
        shown: Any = each() if isinstance(each, FunctionType | MethodType) else each
        say(shown)


def say(shown: RenderableType) -> None:
    """Print a line or a table. On a terminal a long line wraps at words, beside its label; elsewhere it is one line."""
    if not isinstance(shown, str | Text):
        out().print(shown)
    elif sys.stdout.isatty():
        console = out()
        console.print(_wrapped(Text(shown) if isinstance(shown, str) else shown, console))
    elif isinstance(shown, str):
        line(shown)
    else:
        out().print(shown, soft_wrap=True)


def _wrapped(text: Text, console: Console) -> Text:
    labels = [gap.end() for gap in _GAP.finditer(text.plain)] if text.plain.startswith(" ") else []
    indent = max((end for end in labels if end <= console.width // 2), default=0)
    if not indent or text.cell_len <= console.width:
        return text
    rows = text[indent:].wrap(console, console.width - indent)
    return Text.assemble(text[:indent], Text("\n" + " " * indent).join(rows))


def table(*columns: str) -> Table:
    """A table without rows. A column ``>name`` is for numbers, ``~name`` may wrap on a narrow terminal.

    Where the terminal is too narrow for it, each row is a paragraph that begins with its first column.
    """
    empty = _FittingTable(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        justify: JustifyMethod = "right" if name.startswith(">") else "left"
        empty.add_column(name.lstrip(">~"), justify=justify, no_wrap=not name.startswith("~"), overflow="fold")
    return empty


def labelled(label: Text, text: RenderableType) -> Table:
    """A line that begins with a label; on a narrow terminal the text wraps beside it."""
    line_ = Table.grid(padding=(0, 2, 0, 0))
    line_.add_column(no_wrap=True)
    line_.add_row(label, text)
    return line_


def fact(word: str, text: str, style: str = "") -> Text:
    """A line about one thing, below the name of that."""
    return Text.assemble((f"  {word:<9}", "cyan"), "  ", (text, style))


def document(value: Any, *, file: TextIO | None = None) -> None:
    """Print one JSON value on one line, on standard output by default."""
    text = json.dumps(value, ensure_ascii=False)
    if not text.isprintable():  # JSON itself escapes only ASCII control characters
        text = "".join(char if char.isprintable() else _in_json(char) for char in text)
    print(text, file=file, flush=True)


def _in_json(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else json.dumps(char)[1:-1]  # noqa: PLR2004 - beyond: two


def size(count: float) -> str:
    """A number of bytes, for people.

    >>> size(999), size(1_500_000)
    ('999 B', '1.5 MB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < _KILO:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= _KILO
    return f"{count:.1f} PB"


def seconds(length: float) -> str:
    """A duration for people.

    >>> seconds(0.04), seconds(119.9), seconds(7200), seconds(90_000)
    ('0.0 s', '1 min 59 s', '2 h', '1 d 1 h')
    """
    if length < _MINUTE:
        return f"{length:.1f} s"
    whole = int(length)
    if whole < _HOUR:
        return _two(whole, _MINUTE, "min", 1, "s")
    return _two(whole, _HOUR, "h", _MINUTE, "min") if whole < _DAY else _two(whole, _DAY, "d", _HOUR, "h")


def _two(whole: int, unit: int, name: str, part: int, part_name: str) -> str:
    rest = whole % unit // part
    return f"{whole // unit} {name}" + (f" {rest} {part_name}" if rest else "")


def known(shown: Callable[[float], str], value: float | None) -> str:
    """A value for people that may be unknown.

    >>> known(size, None), known(size, 12)
    ('-', '12 B')
    """
    return "-" if value is None else shown(value)


def number(value: int | None) -> str:
    """A number that may be unknown."""
    return "-" if value is None else f"{value:,}"


def short(name: str | None) -> str:
    """A name for a column: a generated id in it is cut to eight digits, a name that people chose is whole.

    >>> short("tierer-5f0c2f6e-9d7e-4b0a-8d0e-1c4f3b2a5968"), short("worker-1.example.org"), short(None)
    ('tierer-5f0c2f6e…', 'worker-1.example.org', '-')
    """
    return "-" if name is None else _GENERATED.sub(r"\1…", name)


def policy(retention: Retention) -> str:
    """A retention policy, as what it does to a log.

    >>> policy(MaxAge(90_000))
    'deletes batches that were listed more than 1 d 1 h ago'
    """
    match retention:
        case Forever():
            return "keeps everything"
        case Consumed():
            return "deletes batches that every valid slot has passed"
        case MaxAge(age):
            return f"deletes batches that were listed more than {seconds(age)} ago"
        case MaxBytes(limit):
            return f"keeps the newest {size(limit)}"


def counted(count: int, one: str, many: str | None = None) -> str:
    """A count of things.

    >>> counted(1, "record"), counted(1500, "record"), counted(2, "batch", "batches")
    ('1 record', '1,500 records', '2 batches')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def offsets(first: int, end: int) -> str:
    """The offsets of records, up to ``end``, without it.

    >>> offsets(0, 1500), offsets(7, 7)
    ('offsets 0 to 1,499, 1,500 records', 'no records')
    """
    return f"offsets {first:,} to {end - 1:,}, {counted(end - first, 'record')}" if first < end else "no records"


def rate(per_second: float, one: str) -> str:
    """How many things per second.

    >>> rate(0.8, "record"), rate(41_706.4, "record")
    ('1 record/s', '41,706 records/s')
    """
    return f"{counted(round(per_second), one)}/s"


class _Done(ProgressColumn):
    """Number of items done, and of how many, if that is known."""

    def render(self, task: Task) -> Text:
        of = "" if task.total is None else f" of {task.total:,.0f}"
        return Text(f"{task.completed:,.0f}{of}", "progress.download")


class _Rate(ProgressColumn):
    """Share of the whole, if that is known, and items per second since the beginning."""

    def render(self, task: Task) -> Text:
        share = "" if task.total is None else f"{task.percentage:.0f}% "
        rate = f"{task.completed / task.elapsed:,.0f}/s" if task.completed and task.elapsed else ""
        return Text(f"{share}{rate}", "progress.percentage")


class Meter:
    """Counts the items that work has done, shows them, and measures its time."""

    def __init__(self, shown: Callable[[int], None]) -> None:
        """``shown`` is called with the number of further items."""
        self._shown = shown
        self._began = time.monotonic()
        self.done = 0
        self.has_moved = False
        """Whether the work has told anything."""

    def add(self, more: int) -> None:
        """Further items are done."""
        self.has_moved = True
        self.done += more
        self._shown(more)

    def upto(self, done: int, *_: object) -> None:
        """So many items are done in all; for work that reports totals."""
        self.add(done - self.done)

    @property
    def seconds(self) -> float:
        """Seconds since the work has begun."""
        return time.monotonic() - self._began


@contextmanager
def meter(what: str, *, total: int | None, note: Callable[[], str] = lambda: "") -> Iterator[Meter]:
    """Progress on standard error: a bar on a terminal, occasional lines elsewhere, but none with ``--json``.

    ``note`` gives what is said besides.
    """
    if sys.stderr.isatty():
        with Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            _Rate(),
            _Done(),
            TimeElapsedColumn(),
            console=err(),
            transient=True,
        ) as bar:
            task = bar.add_task(what, total=total)
            yield Meter(lambda more: bar.update(task, advance=more, description=what + note()))
        return
    last = time.monotonic()

    def tell(_: int) -> None:
        nonlocal last
        now = time.monotonic()
        if not for_programs() and now - last >= _PLAIN_EVERY:
            last = now
            of = "" if total is None else f" of {total:,}"
            said = f"{what}: {work.done:,}{of}, {work.done / work.seconds:,.0f}/s{note()}"
            if logs.is_json():
                logs.say(logging.INFO, said)
            else:
                line(said, file=sys.stderr)

    work = Meter(tell)
    yield work


@contextmanager
def busy(what: str) -> Iterator[None]:
    """A moving bar with the time on standard error, if that is a terminal: for work that reports no progress."""
    if not sys.stderr.isatty():
        yield
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err(), transient=True) as bar:
        bar.add_task(what, total=None)
        yield
