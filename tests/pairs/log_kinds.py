"""Every kind of log, opened and filled: the columns of the table of pairs.

A new kind is one more function with ``@kind``: then every row of the table needs a proof, or a reason, for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pyarrow as pa

import strandline as sl
from strandline.model.head import WriterId
from strandline.tier.read.tiered_log import TieredLog

SOON = 60.0
BATCHES, ROWS = 6, 2
RECORDS = BATCHES * ROWS
COLD = 6
"""The records below this offset are in segments only, where there is a cold tier."""


@dataclass(slots=True)
class Opened:
    """A log of one kind, with :data:`RECORDS` records: key ``k<offset>``, value ``<offset>``."""

    log: Any
    """What is read, followed, consumed, appended to."""
    url: str
    """Its address, for commands and Spark."""
    folder: Path
    writer: Any = None
    """What takes appends, if that is not the log itself."""
    seen: Callable[[sl.Cursor], object] = lambda _: None
    """Waits until the log shows everything below a cursor."""
    release: Callable[[], object] = lambda: None
    """Lets go of the log, for a command that has to be the only one to write it."""
    is_tiered: Callable[[int], bool] | None = None
    """Waits until the log's own node has copied everything below an offset into segments."""
    format: str | None = None
    has_keys: bool = True
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(1 << 30)))
    name: WriterId = field(default_factory=lambda: WriterId(uuid4()))

    def append(self, *rows: int) -> None:
        """Append one batch of records, and wait until the log shows them."""
        columns = {"value": [b"%d" % row for row in rows]}
        if self.has_keys:
            columns["key"] = [b"k%d" % row for row in rows]
        target = self.log if self.writer is None else self.writer
        target.append(pa.table(columns), writer=self.name, number=next(self.numbers)).result(SOON)
        self.seen(target.end())

    def fill(self) -> Opened:
        """Append the records."""
        for number in range(BATCHES):
            self.append(*range(number * ROWS, (number + 1) * ROWS))
        return self

    def values(self, since: Any = None) -> list[bytes]:
        """The values of all records, as a reader gets them."""
        return [value for batch in self.log.read(since) for value in batch.column("value").to_pylist()]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of log: its name in tests, its title in the table, and how it is opened."""

    name: str
    title: str
    make: Callable[[Path, ExitStack], Opened]

    @contextmanager
    def open(self, folder: Path) -> Iterator[Opened]:
        """A filled log of this kind, within the block."""
        with ExitStack() as opened:
            yield self.make(folder, opened)


KINDS: dict[str, Kind] = {}


def kind(title: str) -> Callable[[Callable[[Path, ExitStack], Opened]], Callable[[Path, ExitStack], Opened]]:
    """Register a kind of log."""

    def register(make: Callable[[Path, ExitStack], Opened]) -> Callable[[Path, ExitStack], Opened]:
        KINDS[make.__name__] = Kind(make.__name__, title, make)
        return make

    return register


def expected() -> list[bytes]:
    """The values of a filled log."""
    return [b"%d" % offset for offset in range(RECORDS)]


# --- the kinds ---------------------------------------------------------------------------------------------------


@kind("object log")
def objects(folder: Path, opened: ExitStack) -> Opened:
    url = (folder / "log").as_uri()
    return Opened(sl.open(url, create=True), url, folder).fill()


@kind("object log, cold tier")
def objects_cold(folder: Path, opened: ExitStack) -> Opened:
    url = (folder / "log").as_uri()
    hot = sl.open(url, create=True, retention="consumed")
    Opened(hot, url, folder, name=WriterId(UUID(int=1))).fill()
    tier(hot, folder)
    hot.slots.create("passing", COLD)
    hot.slots.claim("passing", "somebody", hot=True)
    hot.trim()
    hot.slots.drop("passing")
    log = opened.enter_context(sl.open(url))
    assert isinstance(log, TieredLog)
    assert (log.hot.bounds().first, log.bounds().first) == (COLD, 0)
    return Opened(log, url, folder)


@kind("write-ahead log")
def wal(folder: Path, opened: ExitStack) -> Opened:
    url = f"wal://{folder}/log"
    log = opened.enter_context(sl.open(url, create=True))
    return Opened(log, url, folder, release=log.close).fill()


@kind("write-ahead log, beside its writer")
def wal_reader(folder: Path, opened: ExitStack) -> Opened:
    url = f"wal://{folder}/log"
    writer = opened.enter_context(sl.open(url, create=True))
    return Opened(sl.open(url, read_only=True), url, folder, writer).fill()


@kind("write-ahead log, cold tier")
def wal_cold(folder: Path, opened: ExitStack) -> Opened:
    url = f"wal://{folder}/log"
    with sl.open(url, create=True) as hot:
        Opened(hot, url, folder, name=WriterId(UUID(int=1))).fill()
        tier(hot, folder)
        assert hot.trim(COLD) == COLD
    log = opened.enter_context(sl.open(url))
    assert isinstance(log, TieredLog)
    return Opened(log, url, folder, release=log.close)


@kind("`Primary`")
def primary(folder: Path, opened: ExitStack) -> Opened:
    log = opened.enter_context(sl.node.Primary.open(folder / "a", name="a"))
    return Opened(log, log.url, folder).fill()


@kind("`Replica`")
def replica(folder: Path, opened: ExitStack) -> Opened:
    leads = opened.enter_context(sl.node.Primary.open(folder / "a", name="a"))
    copy = opened.enter_context(sl.node.Replica.open(folder / "b", leads.url, name="b"))
    return Opened(copy, copy.url, folder, leads, lambda upto: copy.reading(after=upto, timeout=SOON)).fill()


@kind("node (`grpc://`)")
def node(folder: Path, opened: ExitStack) -> Opened:
    leads = opened.enter_context(sl.node.Primary.open(folder / "a", name="a"))
    return Opened(opened.enter_context(sl.open(leads.url)), leads.url, folder).fill()


@kind("node, cold tier")
def node_cold(folder: Path, opened: ExitStack) -> Opened:
    tiering = sl.node.TierSettings(linger=0, pause=0.05)
    leads = opened.enter_context(
        sl.node.Primary.open(folder / "a", name="a", cold=(folder / "cold").as_uri(), tiering=tiering)
    )
    found = Opened(opened.enter_context(sl.open(leads.url)), leads.url, folder).fill()
    hot = leads.node.primary.log

    def is_tiered(upto: int) -> bool:
        return leads.wait_until(lambda: hot.slots.trim_floor() == upto, SOON)

    found.is_tiered = is_tiered
    assert is_tiered(RECORDS)
    assert leads.trim(COLD) == COLD
    assert (hot.bounds().first, found.log.bounds().first) == (COLD, 0)
    return found


@kind("queue of version 1")
def queue_v1(folder: Path, opened: ExitStack) -> Opened:
    url = (folder / "log").as_uri()
    log = sl.open(url, format="queue-v1")
    return Opened(log, url, folder, format="queue-v1", has_keys=False).fill()


def tier(hot: Any, folder: Path) -> None:
    """Copy everything into a cold tier."""
    sl.tier.attach(hot, (folder / "cold").as_uri())
    with sl.tier.tiering(hot) as tierer:
        tierer.run_once(everything=True)
