"""A reader or follower that starts at a time gets the same records from every kind of log, or one sentence."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pyarrow as pa
import pytest

import strandline as sl
from strandline.errors import InvalidInput, Unsupported
from strandline.model.head import WriterId

RECORDS = 4
FAR_EAST, FAR_WEST = timezone(timedelta(hours=14)), timezone(timedelta(hours=-14))
Append = Callable[[bytes], object]


@contextlib.contextmanager
def object_log(folder: Path) -> Iterator[tuple[Append, Any]]:
    log = sl.open(folder / "log", create=True)
    yield appending(log), log


@contextlib.contextmanager
def wal(folder: Path) -> Iterator[tuple[Append, Any]]:
    with sl.compat.WriteAheadLog.open(folder / "log") as written:
        yield appending(written.log), written.log


@contextlib.contextmanager
def wal_reader(folder: Path) -> Iterator[tuple[Append, Any]]:
    with wal(folder) as (append, _):
        yield append, sl.log.WalReader(folder / "log")


@contextlib.contextmanager
def tiered_log(folder: Path) -> Iterator[tuple[Append, Any]]:
    log = sl.open(folder / "log", create=True)
    sl.tier.attach(log, (folder / "cold").as_uri())
    with sl.tier.tiered(log) as both:
        yield appending(log), both


@contextlib.contextmanager
def primary(folder: Path) -> Iterator[tuple[Append, Any]]:
    with sl.node.Primary.open(folder / "a") as node:
        yield lambda value: node.append_values([value]).ensure(), node.reading()


@contextlib.contextmanager
def replica(folder: Path) -> Iterator[tuple[Append, Any]]:
    with (
        sl.node.Primary.open(folder / "a", name="a") as leader,
        sl.node.Replica.open(folder / "b", leader.url, name="b") as node,
    ):
        bookmark = leader.append_values([b"before"]).bookmark
        log = node.reading(after=bookmark, timeout=60)

        def append(value: bytes) -> None:
            node.reading(after=leader.append_values([value]).bookmark, timeout=60)

        yield append, log


@contextlib.contextmanager
def node(folder: Path) -> Iterator[tuple[Append, Any]]:
    with sl.node.Primary.open(folder / "a") as led:
        yield appending(led), led


@contextlib.contextmanager
def remote(folder: Path) -> Iterator[tuple[Append, Any]]:
    with sl.node.Primary.open(folder / "a") as led, sl.open(led.url) as log:
        yield appending(log), log


@contextlib.contextmanager
def queue(folder: Path) -> Iterator[tuple[Append, Any]]:
    log = sl.open(folder / "log", format="queue-v1")
    with log.producer() as producer:
        yield lambda value: producer.produce([value]).result(60), log


@contextlib.contextmanager
def memory_log(_: Path) -> Iterator[tuple[Append, Any]]:
    log = sl.log.MemoryLog()
    yield appending(log), log


def appending(log: Any) -> Append:
    writer = WriterId(uuid4())
    numbers = iter(range(100))

    def append(value: bytes) -> None:
        log.append(pa.table({"value": [value]}), writer=writer, number=next(numbers)).result(60)

    return append


KINDS = [object_log, wal, wal_reader, tiered_log, primary, replica, node, remote, queue, memory_log]


class Received:
    """A sink that keeps the values that it was given."""

    def __init__(self) -> None:
        self.at: sl.Cursor | None = None
        self.values: list[bytes] = []

    def cursor(self, log_id: UUID) -> sl.Cursor | None:
        return self.at

    def apply(self, records: pa.Table, *, since: sl.Cursor, upto: sl.Cursor) -> None:
        self.values += records.column("value").to_pylist()
        self.at = upto


def moment() -> datetime:
    """A time that is later than all that was written, and earlier than all that will be: logs count milliseconds."""
    began = time.time_ns() // 1_000_000
    while time.time_ns() // 1_000_000 < began + 2:
        time.sleep(0.0005)
    now = datetime.now(UTC)
    while time.time_ns() // 1_000_000 < began + 4:
        time.sleep(0.0005)
    return now


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.__name__)
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, list[datetime]]]:
    """A log with four records, and a time before each and behind the last."""
    with request.param(tmp_path_factory.mktemp("place")) as (append, log):
        times = []
        for number in range(RECORDS):
            times.append(moment())
            append(b"%d" % number)
        yield log, [*times, moment()]


def starts(log: Any, since: Any) -> list[list[bytes]]:
    """What a reader and a follower get that start there; they agree with the position."""
    sink = Received()
    sl.follow(log, sink, start=since, upto="end")
    read = [value for batch in log.read(since=since) for value in batch.column("value").to_pylist()]
    assert log.bounds().next - log.position_of(since) == len(read)
    return [read, sink.values]


def test_a_start_at_a_time_gives_what_was_written_since(place):
    log, times = place
    for number, then in enumerate(times):
        expected = [b"%d" % later for later in range(number, RECORDS)]
        for zone in (UTC, FAR_EAST, FAR_WEST):
            assert starts(log, then.astimezone(zone)) == [expected, expected], f"before record {number}"


def test_a_start_at_the_ends_of_all_time_is_the_first_record_or_the_end(place):
    log, _ = place
    everything = [value for batch in log.read() for value in batch.column("value").to_pylist()]
    for zone in (UTC, FAR_EAST, FAR_WEST):
        assert starts(log, datetime.min.replace(tzinfo=zone)) == [everything, everything]
        assert starts(log, datetime.max.replace(tzinfo=zone)) == [[], []]


def test_what_is_no_time_is_refused_in_one_sentence(place):
    log, _ = place
    for since in (datetime(2026, 1, 1), date(2026, 1, 1), "2026-01-01", 1.5):  # noqa: DTZ001
        for call in (log.position_of, lambda since: list(log.read(since=since)), lambda since: starts(log, since)):
            with pytest.raises(InvalidInput, match=r"time zone|a datetime"):
                call(since)


def test_what_is_no_log_that_can_be_followed_says_so_and_what_can(tmp_path):
    with (
        sl.compat.WriteAheadLog.open(tmp_path / "w") as written,
        pytest.raises(Unsupported, match=r"A WriteAheadLog cannot be followed.*\(wal.log\)"),
    ):
        sl.follow(written, Received(), start=datetime.now(UTC), upto="end")
