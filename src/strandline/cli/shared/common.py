"""Options, error handling and signals shared by all commands."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import wraps
from queue import SimpleQueue
from typing import Annotated, Any, Final, ParamSpec, Self, TypeVar

import typer

import strandline as sl
from strandline.cli import end_at_once
from strandline.cli.shared import output as show
from strandline.cli.shared.targets import contents_at, folder_at, is_free, need, need_object_log
from strandline.cli.shared.text import escaped, parse_start
from strandline.compat.v1.log import QueueLog, open_queue
from strandline.compat.v1.trimming import GRACE
from strandline.errors import (
    Fenced,
    InvalidInput,
    NotALog,
    NotFound,
    ProducerFailed,
    StrandlineError,
    Unsupported,
    WrongKind,
)
from strandline.log.folders import FolderKind
from strandline.log.object.log import open_log
from strandline.log.wal.log import WalLog
from strandline.model.addresses import refuse_credentials
from strandline.model.retention import parse_bytes, parse_retention, parse_seconds
from strandline.opening import scheme_of, wal_path
from strandline.tier.opening import tiered
from strandline.values.contract import Codec

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

Tiers = sl.log.ObjectLog | sl.tier.TieredLog
"""A log, with its cold tier if it has one."""

_LOGGER: Final = logging.getLogger("strandline.cli")

INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141

Url = Annotated[str, typer.Argument(metavar="URL", help="The log: a folder, file://, s3://, gs:// or az://.")]
Place = Annotated[
    str,
    typer.Argument(
        metavar="LOG",
        help="The log: its address (file://, s3://, gs://, az://, wal:///folder), or its folder.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print machine-readable output only.")]
TruncateTimes = Annotated[
    bool, typer.Option("--truncate-times", help="Cut times that are finer than a microsecond; else they are refused.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
_DEBUG: Final = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]


class TargetFormat(StrEnum):
    """Format of the log at an address."""

    LOG = "log"
    QUEUE_V1 = "queue-v1"


LogFormat = Annotated[
    TargetFormat, typer.Option("--format", help="What is at the address: a log of this project, or a shared queue.")
]
Manifest = Annotated[str, typer.Option(metavar="PATH", help="Of a queue-v1: where its manifest is, below the address.")]
Data = Annotated[str, typer.Option(metavar="PATH", help="Of a queue-v1: where its batches are, below the address.")]

MANIFEST: Final = "ingest/manifest"
DATA: Final = "ingest"


OR_CREATE: Final = "check the address, or make one with --create"
"""The advice of a command with this option, where there is no log."""


def _option(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Make a parser of an option: what ``parse`` refuses is a usage error."""

    @wraps(parse)
    def understood(text: str) -> T:
        try:
            return parse(text)
        except InvalidInput as error:
            raise typer.BadParameter(escaped(str(error))) from error

    return understood


start = _option(parse_start)
length_of_time = _option(parse_seconds)
size_in_bytes = _option(parse_bytes)


def retention_option(whose: str) -> typer.models.OptionInfo:
    """The option for a retention policy; ``whose`` is the subject of its help."""
    option: typer.models.OptionInfo = typer.Option(
        metavar="POLICY",
        parser=retention_policy,
        help=f"{whose} may forget: forever (the default), consumed, age:7d, bytes:100GiB.",
    )
    return option


@_option
def retention_policy(text: str) -> str:
    """Check the text of a retention policy, and return it in its usual form."""
    return str(parse_retention(text))


def guarded(command: Callable[P, R], *, fenced: int = 1) -> Callable[..., R]:
    """End the command properly: an error is one sentence and status 1, Ctrl-C is one word and status 130, with what to
    do next where :func:`on_interruption` says that.

    Adds the option ``--debug``, with which an error keeps its traceback. ``fenced`` is the status if another
    process has taken over. A closed standard output (``| head``) is no error.
    """

    @wraps(command)
    def run(*args: Any, debug: bool = False, **options: Any) -> R:
        try:
            with _interruptible():
                return command(*args, **options)
        except KeyboardInterrupt as interruption:
            show.line(": ".join(["interrupted", *map(str, interruption.args)]), file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # Python flushes standard output once more at exit, and would complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from None
        except (StrandlineError, OSError) as error:
            if debug:
                raise
            show.error(_reason(error), as_json=bool(options.get("json")))
            raise typer.Exit(fenced if isinstance(error, Fenced) else 1) from None

    own = inspect.signature(command, eval_str=True)
    option = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_DEBUG)
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), option])  # type: ignore[attr-defined]
    return run


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
                self._getting = False
            except (StopIteration, KeyboardInterrupt):
                self._getting = False
                return
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


def object_log_at(
    url: str,
    *,
    create: bool = False,
    retention: str | None = None,
    value: Codec | None = None,
    hint: str = "check the address",
) -> sl.log.ObjectLog:
    """The object log at an address; if there is none, the error names options rather than Python calls."""
    scheme_of(url)
    if url.startswith(("grpc://", "grpc+tls://", "wal://")):
        refuse_credentials(url, "authenticate by --token, or by a certificate")
        other = "a write-ahead log, which the process that writes it trims"
        if not url.startswith("wal://"):
            other = "the log of a node, which trims it ('strandline node run --retention')"
        raise Unsupported(f"This command takes an object log, and {url} is {other}.")
    need_object_log(url, create=create, hint=hint)
    try:
        return open_log(url, create=create, retention=retention, value=value)
    except WrongKind:
        raise
    except NotALog as error:
        if "although the head of a log is there" in str(error):
            raise
        raise NotALog(f"There is no log at {url}: {hint}.") from error


def wal_folder(place: str) -> str | None:
    """The folder of a write-ahead log, by its path or its address wal://; None for the address of an object log."""
    if place.startswith("wal://"):
        folder = wal_path(place)
        there = contents_at(folder)
        if not is_free(there):
            need(there, FolderKind.WAL)
        return folder
    local = folder_at(place)
    if local is None:
        return None
    there = contents_at(str(local))
    if not is_free(there):
        need(there, FolderKind.OBJECT_LOG, FolderKind.WAL)
    return str(local) if FolderKind.WAL in there.kinds else None


def open_to_look(place: str) -> sl.log.ObjectLog | sl.log.WalReader:
    """The log at a path or address, without a lock: another process may be writing it."""
    folder = wal_folder(place)
    return object_log_at(place) if folder is None else sl.log.WalReader(folder)


@contextmanager
def open_to_tier(place: str) -> Iterator[sl.log.ObjectLog | WalLog]:
    """The log at a path or address; a write-ahead log is opened for writing, which only one process at a time can."""
    folder = wal_folder(place)
    if folder is None:
        yield object_log_at(place)
        return
    with WalLog.open(folder, create=False) as log:
        yield log


@contextmanager
def both_tiers(log: sl.log.ObjectLog) -> Iterator[Tiers]:
    """The log, with its cold tier if it has one; closes the cold tier at the end."""
    both = tiered(log)
    try:
        yield both
    finally:
        if isinstance(both, sl.tier.TieredLog):
            both.close()


def open_shared(url: str, *, manifest: str, data: str, grace: float = GRACE) -> QueueLog:
    """The queue of version 1 at an address; one without a manifest is refused: the path may be mistyped."""
    folder = folder_at(url)
    try:
        queue = open_queue(url, manifest=manifest, data=data, grace=grace)
    except WrongKind:
        if folder is not None:
            need(contents_at(str(folder)), FolderKind.QUEUE_V1)  # with command advice
        raise
    try:
        queue.store.get(manifest)
    except NotFound as error:
        if folder is not None and not is_free(there := contents_at(str(folder))):
            need(there, FolderKind.QUEUE_V1)
        raise NotALog(
            f"There is no queue manifest at {queue.url}/{manifest}: check the address and --manifest, or nothing was "
            "ever listed there."
        ) from error
    return queue


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
