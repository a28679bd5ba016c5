"""Options, error handling and signals shared by all commands."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any, Final, ParamSpec, Self, TypeVar

import typer

from strandline.cli.shared import output as show
from strandline.cli.shared.interruption import end_at_once
from strandline.cli.shared.options import argument, flag, option, shared, with_groups
from strandline.cli.shared.text import escaped
from strandline.compat.v1.log import QueueFormat
from strandline.errors import Fenced, InvalidInput, ProducerFailed, StrandlineError
from strandline.model.cursor import parse_start
from strandline.model.retention import parse_bytes, parse_retention, parse_seconds

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_LOGGER: Final = logging.getLogger("strandline.cli")

INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141

Url = Annotated[str, argument("URL", "The log: a folder, file://, s3://, gs:// or az://.")]
Place = Annotated[
    str, argument("LOG", "The log: its address (file://, s3://, gs://, az://, wal:///folder), or its folder.")
]
Yes = Annotated[bool, flag("Do not ask.", "--yes", "-y")]


Workers = Annotated[
    int | None,
    option(
        "N",
        "Number of tasks that run at once in this process; by default one per core. On Spark its cores decide.",
        "--workers",
        min=1,
    ),
]
Until = Annotated[int | None, option("OFFSET", "Where it ends, without it; by default the log's end.", "--until")]
Quiet = Annotated[bool, flag("Log warnings only.", "--quiet", "-q")]
Follow = Annotated[bool, flag("Wait for new records at the end, until Ctrl-C or a seal.", "--follow", "-f")]
Create = Annotated[bool, flag("Make the log if there is none.", "--create")]
DryRun = Annotated[bool, flag("Change nothing; show what would be done.", "--dry-run")]
Schema = Annotated[
    Path | None, option("FILE", "Decode JSON values by the JSON Schema or Avro schema in this file.", "--schema")
]


def beginning(text: str) -> Any:
    """The option for a position in a log."""
    return option("WHERE", text, "--from", parser=parse_start)


def span_of_time(text: str) -> Any:
    """An option for a length of time, in seconds."""
    return option("TIME", text, parser=parse_seconds)


def size(text: str) -> Any:
    """An option for a number of bytes."""
    return option("SIZE", text, parser=parse_bytes)


def retention_option(whose: str) -> Any:
    """The option for a retention policy; ``whose`` is the subject of its help."""
    text = f"{whose} may forget: forever (the default), consumed, age:7d, bytes:100GiB."
    return option("POLICY", text, "--retention", parser=retention_policy)


def retention_policy(text: str) -> str:
    """Check the text of a retention policy, and return it in its usual form."""
    return str(parse_retention(text))


def queue_format(text: str) -> QueueFormat:
    """The format of a queue of version 1, with the paths of its parts if they are given.

    >>> queue_format("queue-v1:in/list,in/data").data
    'in/data'
    """
    name, _, paths = text.partition(":")
    manifest, both, data = paths.partition(",")
    if name != "queue-v1" or (paths and not (manifest and both and data)):
        raise InvalidInput(f"{text!r} is no format: write queue-v1, or queue-v1:MANIFEST,DATA with the paths of both.")
    return QueueFormat(manifest, data) if paths else QueueFormat()


QueueFormatOption = Annotated[
    QueueFormat | None,
    option(
        "FORMAT",
        "For a shared queue instead of a log: queue-v1, or queue-v1:MANIFEST,DATA with their paths below the "
        "address, by default ingest/manifest and ingest.",
        "--format",
        parser=queue_format,
    ),
]


def guarded(command: Callable[P, R], *, fenced: int = 1, connects: bool = False) -> Callable[..., R]:
    """End the command properly: an error is one sentence and status 1, Ctrl-C is one word and status 130, with what to
    do next where :func:`on_interruption` says that.

    With the option ``--debug`` an error keeps its traceback. ``fenced`` is the status if another process has taken
    over. A closed standard output (``| head``) is no error. Groups of options (:func:`with_groups`) become its options.
    A command that ``connects`` to nodes takes the options of the program for that.
    """
    command = with_groups(command)

    @wraps(command)
    def run(**options: Any) -> R:
        try:
            with _interruptible():
                return command(**options)
        except KeyboardInterrupt as interruption:
            show.line(": ".join(["interrupted", *map(str, interruption.args)]), file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # Python flushes standard output once more at exit, and would complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from None
        except (StrandlineError, OSError) as error:
            if shared().debug:
                raise
            show.error(_reason(error))
            raise typer.Exit(fenced if isinstance(error, Fenced) else 1) from None

    run.connects = connects  # type: ignore[attr-defined]
    return run


connecting = partial(guarded, connects=True)
"""Make a command that may connect to a node."""


@contextmanager
def on_interruption(advice: str) -> Iterator[None]:
    """What to do after Ctrl-C in work that may or may not have taken effect."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(advice) from None


def _reason(error: StrandlineError | OSError) -> StrandlineError | OSError:
    """The error that a command prints: of a failed producer its cause, without the advice for programs."""
    cause = error.__cause__
    return cause if isinstance(error, ProducerFailed) and isinstance(cause, (StrandlineError, OSError)) else error


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C raises ``KeyboardInterrupt`` meanwhile; before and after, it ends the process at once."""
    if signal.getsignal(signal.SIGINT) is not end_at_once:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, end_at_once)


class Interruption:
    """Ctrl-C for work that must be finished in order.

    The first one only ends :meth:`items`: it interrupts the wait for an item, but never its
    processing. A second one interrupts as usual.
    """

    def __init__(self) -> None:
        """Ctrl-C has not been pressed yet."""
        self.asked = False
        self._getting = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def items(self, source: Iterable[T]) -> Iterator[T]:
        """The items of a source, until it ends or Ctrl-C is pressed."""
        iterator = iter(source)
        while not self.asked:
            try:
                self._getting = True
                item = next(iterator)
            except (StopIteration, KeyboardInterrupt):
                return
            finally:
                self._getting = False
            yield item

    def _ask(self, *_: object) -> None:
        again, self.asked = self.asked, True
        if self._getting or again:
            self._getting = False
            raise KeyboardInterrupt


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C or SIGTERM sets; a second one ends the process as usual."""
    stop = threading.Event()
    requests: SimpleQueue[int | None] = SimpleQueue()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def request_stop(number: int, _: object) -> None:
        # Not stop.set(): the handler runs in the main thread, which may be waiting for the event, and hold its lock.
        requests.put(number)
        for each, handler in before.items():
            signal.signal(each, handler)

    def set_on_request() -> None:
        if number := requests.get():
            if number == signal.SIGTERM:  # who pressed Ctrl-C knows that
                _LOGGER.info("SIGTERM: stopping.")
            stop.set()

    setter = threading.Thread(target=set_on_request, name="strandline-stop", daemon=True)
    setter.start()
    for number in before:
        signal.signal(number, request_stop)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        requests.put(None)
        setter.join()


def confirm(question: str, *, yes: bool) -> None:
    """Ask before a change that cannot be undone; without a terminal ``--yes`` is required."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidInput(f"{question} There is no terminal to ask: repeat it with --yes. Nothing was changed.")
    try:
        agreed = typer.confirm(escaped(question), err=True)
    except typer.Abort:  # Ctrl-C or Ctrl-D instead of an answer
        print("\nNothing was changed.", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    if not agreed:
        print("Nothing was changed.", file=sys.stderr)
        raise typer.Exit(1)
