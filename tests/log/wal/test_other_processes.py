"""The write-ahead log across processes: other readers, durability before visibility, shared buffers."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

from strandline.compat.spool.lsn_log import WriteAheadLog
from strandline.errors import Diverged, Unsupported
from strandline.log.wal.read.reading import WalReader
from strandline.log.wal.read.span import WalSpan
from strandline.model.cursor import Cursor, Limit
from strandline.model.head import WriterId
from tests.contracts.logs import records
from tests.log.wal.blocked_disks import SOON, GatedDisk, Threads

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Any]:
    """Another process, which runs functions of the test."""
    with SPAWN.Pool(1) as pool:
        yield pool


# --- spans -------------------------------------------------------------------------------------------------------


def fetch(pickled: bytes, columns: list[str] | None = None) -> tuple[int, list[pa.RecordBatch]]:
    """The records of these spans, fetched in this process."""
    spans: list[WalSpan] = pickle.loads(pickled)
    return os.getpid(), [batch for span in spans for batch in span.fetch(columns)]


@pytest.mark.parametrize("tail_bytes", [0, 1 << 20], ids=["from-files", "from-memory"])
def test_spans_that_were_sent_to_another_process_give_the_same_there(tmp_path: Path, elsewhere: Any, tail_bytes: int):
    with WriteAheadLog.open(tmp_path / "log", roll_bytes=3000, tail_bytes=tail_bytes) as wal:
        for number in range(20):
            wal.append(b"%d" % number)
            wal.append_many(b"%d-%d" % (number, index) * 20 for index in range(5))
        for since, limit in ((0, Limit()), (7, Limit(upto=50)), (118, Limit()), (20, Limit(batches=3))):
            spans = wal.log.plan(Cursor(wal.log.log_id, since), limit)
            here = [batch for span in spans for batch in span.fetch()]
            process, there = elsewhere.apply(fetch, (pickle.dumps(spans),))
            assert process != os.getpid()
            assert there == here
            assert pickle.loads(pickle.dumps(spans)) == spans
            narrow = elsewhere.apply(fetch, (pickle.dumps(spans), ["value", "offset"]))[1]
            assert narrow == [batch.select(["value", "offset"]) for batch in here]


def test_what_is_sent_is_a_place_and_not_the_records(tmp_path: Path):
    with WriteAheadLog.open(tmp_path / "log") as wal:
        wal.append(bytes(1_000_000))
        (span,) = wal.log.plan(wal.log.start())
        assert len(pickle.dumps(span)) < 1000


# --- readers elsewhere -------------------------------------------------------------------------------------------

_READERS: dict[str, WalReader] = {}


def look(folder: str) -> tuple[int, list[bytes]]:
    """The end that a reader in this process sees, and everything up to it; the same reader each time."""
    reader = _READERS.setdefault(folder, WalReader(folder))
    end = reader.bounds().next
    found = [
        value
        for span in reader.plan(reader.start())
        for batch in span.fetch(["value"])
        for value in batch[0].to_pylist()
    ]
    return end, found


def test_a_reader_elsewhere_sees_each_append_once_it_was_acknowledged(tmp_path: Path, elsewhere: Any):
    folder = str(tmp_path / "log")
    with WriteAheadLog.open(folder, roll_bytes=2000) as wal:
        for number in range(1, 40):
            wal.append(b"%d" % number * 50)
            assert elsewhere.apply(look, (str(folder),)) == (
                number,
                [b"%d" % each * 50 for each in range(1, number + 1)],
            )


def test_a_reader_elsewhere_sees_nothing_before_it_is_durable(tmp_path: Path, elsewhere: Any):
    disk, folder = GatedDisk(), tmp_path / "log"
    with disk.open_log(folder) as wal:
        wal.append(b"first")
        disk.hold()
        handle = wal.submit(b"second")
        disk.wait_until_held()
        assert b"second" in (tmp_path / "log" / f"{0:020d}.log").read_bytes(), "it is written, and not durable"
        assert elsewhere.apply(look, (str(folder),)) == (1, [b"first"])
        disk.let_go()
        assert handle.result(SOON) == 2
        assert elsewhere.apply(look, (str(folder),)) == (2, [b"first", b"second"])


@pytest.mark.parametrize("tail_bytes", [0, 1 << 20])
def test_nothing_is_seen_in_the_same_process_before_it_is_durable(tmp_path: Path, tail_bytes: int):
    disk = GatedDisk()
    with disk.open_log(tmp_path / "log", tail_bytes=tail_bytes) as wal:
        wal.append(b"first")
        woken = threading.Event()

        def wait() -> None:
            assert wal.wait(1, SOON)
            assert handle.done() or wal.current == 3
            woken.set()

        disk.hold()
        handle = wal.submit_batch(records(b"second", b"third"))
        disk.wait_until_held()
        with Threads() as threads:
            threads.start(wait)
            end = Cursor(wal.log.log_id, 1)
            assert not handle.done()
            assert (wal.current, wal.log.bounds().next, wal.log.end()) == (1, 1, end)
            assert wal.read_since(1) == []
            assert wal.log.plan(end) == []
            assert [record.payload for record in wal.read_since(0)] == [b"first"]
            assert not wal.wait(1, 0.05)
            assert sum(batch.num_rows for batch in wal.log.read()) == 1
            with pytest.raises(Diverged):
                wal.read_since(2)
            with pytest.raises(Diverged):
                wal.log.slots.create("ahead", 2)
            assert not woken.is_set()
            disk.let_go()
        assert woken.is_set()
        assert handle.lsns(SOON) == range(2, 4)
        assert [record.payload for record in wal.read_since(1)] == [b"second", b"third"]


def test_a_file_that_was_just_begun_is_not_seen_before_it_is_durable(tmp_path: Path, elsewhere: Any):
    disk, folder = GatedDisk(), tmp_path / "log"
    with disk.open_log(folder, roll_bytes=0) as wal:
        wal.append(b"first")
        disk.hold()
        handle = wal.submit(b"second")
        disk.wait_until_held()
        assert len(list((tmp_path / "log").glob("*.log"))) == 2
        assert elsewhere.apply(look, (str(folder),)) == (1, [b"first"])
        assert wal.read_since(1) == []
        disk.let_go()
        assert handle.result(SOON) == 2
        assert elsewhere.apply(look, (str(folder),)) == (2, [b"first", b"second"])


def test_a_reader_refuses_to_change_anything(tmp_path: Path):
    with WriteAheadLog.open(tmp_path / "log") as wal:
        wal.append(b"first")
        reader = WalReader(str(tmp_path / "log"))
        changes: list[Callable[[], object]] = [
            lambda: reader.append(records(b"x"), writer=WriterId(UUID(int=1)), number=0),
            lambda: reader.slots.create("a", 0),
            lambda: reader.slots.claim("a", "me"),
            lambda: reader.slots.reset("a", 0),
            lambda: reader.slots.drop("a"),
        ]
        for change in changes:
            with pytest.raises(Unsupported, match="opened for reading"):
                change()


# --- fan-out -----------------------------------------------------------------------------------------------------


def addresses(batches: list[pa.RecordBatch]) -> list[list[int]]:
    """Where the buffers of the value column are."""
    return [[buffer.address for buffer in batch.column("value").buffers() if buffer is not None] for batch in batches]


def test_all_readers_are_given_the_same_buffers(tmp_path: Path):
    with WriteAheadLog.open(tmp_path / "log") as wal:
        mine = records(*(bytes(1000) for _ in range(100)))
        wal.append_batch(mine)
        for number in range(10):
            wal.append(b"%d" % number)

        def read() -> list[pa.RecordBatch]:
            return [batch for span in wal.log.plan(wal.log.start()) for batch in span.fetch()]

        first = read()
        before = pa.total_allocated_bytes()
        held = [read() for _ in range(200)]
        assert all(addresses(batches) == addresses(first) for batches in held)
        assert pa.total_allocated_bytes() - before < 200 * 100_000 // 10, "payload bytes were copied"
        assert addresses(first[:1]) == addresses([mine]), "what was appended is what is read"


def test_a_part_of_a_frame_is_a_view_of_the_same_buffers(tmp_path: Path):
    with WriteAheadLog.open(tmp_path / "log") as wal:
        wal.append_many(bytes([number]) * 500 for number in range(50))
        whole = wal.log.plan(wal.log.start())[0].fetch()
        part = wal.log.plan(Cursor(wal.log.log_id, 20), Limit(upto=30))[0].fetch()
        assert part[0].num_rows == 10
        assert addresses(part) == addresses(whole)
        assert part[0].column("offset").to_pylist() == list(range(20, 30))


@pytest.mark.matrix
def test_readers_in_many_threads_share_what_is_in_memory(tmp_path: Path):
    with WriteAheadLog.open(tmp_path / "log") as wal, Threads() as threads:
        found: list[list[list[int]]] = []

        def follow() -> None:
            cursor, seen = wal.log.start(), []
            while cursor.next < 200:
                assert wal.log.wait(cursor, SOON)
                for span in wal.log.plan(cursor):
                    seen += addresses(span.fetch())
                    cursor = cursor.at(span.next)
            found.append(seen)

        for _ in range(6):
            threads.start(follow)
        for number in range(200):
            wal.append(b"%d" % number * 100)
        threads.join()
        assert len(found) == 6
        assert all(seen == found[0] for seen in found)
