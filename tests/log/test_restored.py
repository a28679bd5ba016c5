"""A log that was restored from a copy and then grew differently: followers of the other history get ``Diverged``."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import strandline as sl
from strandline.compat.v1.log import open_queue
from strandline.errors import CursorExpired, Diverged, InvalidInput
from strandline.followers.run import follow
from strandline.followers.stores.append_log import AppendLogStore
from strandline.followers.stores.state import MemoryStore
from strandline.kv.log import LogKeyValue
from strandline.log.object import open_log
from strandline.log.read.planning import cursor_after
from strandline.log.wal.log import WalLog
from strandline.log.wal.recover.rewind import rewind
from strandline.model.cursor import Cursor
from strandline.model.head import WriterId
from strandline.model.keyed import EVERYTHING
from strandline.model.records import Op, record_batch
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock, SeededChance

Opener = Callable[[str], Any]


def object_log(folder: str) -> Any:
    return open_log(folder, create=True)


def wal(folder: str) -> Any:
    # The clock of the machine goes on between a backup and what is written after it was restored.
    return WalLog.open(folder, env=Env(clock=ManualClock(now=1_700_000_000_000_000 + CLOCK_GOES.pop())))


def queue(folder: str) -> Any:
    return open_queue(folder)


CLOCK_GOES = list(range(10_000_000, 0, -5000))


def put(log: Any, *keys: bytes, value: bytes = b"v") -> None:
    many = len(keys)
    batch = record_batch(timestamps=[1] * many, ops=[Op.PUT] * many, keys=list(keys), values=[value] * many)
    log.append(batch, writer=WriterId(uuid4()), number=0).result(120)


def enqueue(log: Any, *values: bytes) -> None:
    for value in values:
        batch = record_batch(timestamps=[1], ops=[Op.PUT], keys=[None], values=[value])
        log.append(batch, writer=WriterId(uuid4()), number=0).result(120)


KINDS = [pytest.param(object_log, id="object log"), pytest.param(wal, id="write-ahead log")]


class Restored:
    """A log of ten records that was backed up at five, followed to its end, restored, and has grown differently."""

    def __init__(self, opener: Opener, place: Path) -> None:
        self.folder = str(place / "log")
        with closing(opener(self.folder)) as log:
            put(log, b"a", b"b", b"c", b"d", b"e")
            shutil.copytree(self.folder, place / "backup")
            self.common = log.cursor_at(5)
            put(log, b"f", b"g", b"h", b"i", b"j")
            self.stores = [MemoryStore(), AppendLogStore.open(str(place / "store"))]
            self.cursors = [follow(log, store, upto="end") for store in self.stores]
            self.taken = [cursor_after(log.start(), span) for span in log.plan(log.start())] + [
                log.end(),
                log.cursor_at(7),
            ]
        shutil.rmtree(self.folder)
        shutil.move(place / "backup", self.folder)
        self.log = opener(self.folder)
        put(self.log, *(b"other %d" % number for number in range(7)))


@pytest.fixture
def restored(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    case = Restored(request.param, tmp_path)
    with closing(case.log):
        yield case
    case.stores[1].close()


@pytest.mark.parametrize("restored", KINDS, indirect=True)
def test_a_consumer_that_followed_the_other_history_has_diverged(restored: Restored) -> None:
    for store, cursor in zip(restored.stores, restored.cursors, strict=True):
        with pytest.raises(Diverged, match="restored from a copy"):
            follow(restored.log, store, upto="end")
        assert store.cursor(restored.log.log_id) == cursor
        assert store.get(b"other 0") is None  # nothing of the new history was mixed in
    with pytest.raises(Diverged):
        list(restored.log.read(restored.cursors[0]))


@pytest.mark.parametrize("restored", KINDS, indirect=True)
def test_a_consumer_within_the_common_history_resumes(restored: Restored) -> None:
    taken = [cursor for cursor in restored.taken if cursor.next <= 5]
    assert [cursor.next for cursor in taken] == [5]
    for cursor in (*taken, restored.common):
        assert sum(batch.num_rows for batch in restored.log.read(cursor)) == 7


@pytest.mark.parametrize("restored", KINDS, indirect=True)
def test_every_cursor_after_what_only_the_other_history_had_is_refused(restored: Restored) -> None:
    behind_it = [cursor for cursor in restored.taken if cursor.next > 5]
    assert len(behind_it) >= 2
    for cursor in behind_it:
        if cursor.fingerprint is None:
            assert cursor == restored.log.end().at(10)  # a write-ahead log's end has its term only
            continue
        with pytest.raises(Diverged):
            restored.log.plan(Cursor.parse(str(cursor)))


@pytest.mark.parametrize("restored", KINDS, indirect=True)
def test_a_newcomer_at_a_snapshot_s_cursor_of_the_other_history_is_refused(restored: Restored) -> None:
    with pytest.raises(Diverged):
        follow(restored.log, MemoryStore(), start=restored.cursors[0], upto="end")


@pytest.mark.parametrize("behind_by", [30, 3600, 365 * 86400])
def test_a_write_ahead_log_that_was_restored_while_its_clock_was_behind_is_recognised(
    tmp_path: Path, behind_by: int
) -> None:
    """Both histories continue at a time that the log has passed, so that neither can write its clock's time."""
    now = 1_700_000_000_000_000

    def opened(clock: int, seed: int) -> Any:
        return closing(
            WalLog.open(str(tmp_path / "log"), env=Env(clock=ManualClock(now=clock), chance=SeededChance(seed)))
        )

    with opened(now, 1) as log:
        put(log, b"a", b"b")
    shutil.copytree(tmp_path / "log", tmp_path / "backup")
    store = MemoryStore()
    with opened(now - behind_by * 1_000_000, 2) as log:
        put(log, b"c", b"d", b"e")
        follow(log, store, upto="end")
    shutil.rmtree(tmp_path / "log")
    shutil.move(tmp_path / "backup", tmp_path / "log")
    with opened(now - behind_by * 1_000_000 + 1_000_000, 3) as log:
        put(log, b"w", b"x", b"y", b"z")
        with pytest.raises(Diverged, match="restored from a copy"):
            follow(log, store, upto="end")
    assert store.get(b"z") is None


@pytest.mark.parametrize("restored", [KINDS[0]], indirect=True)
def test_a_watch_that_resumes_takes_everything_again(restored: Restored) -> None:
    kv = LogKeyValue(restored.log)
    with pytest.raises(CursorExpired, match="restored from a copy"):
        kv.watch_from(EVERYTHING, restored.cursors[0])
    store, halt = restored.stores[0], threading.Event()

    def applied(cursor: Cursor) -> None:
        if cursor == restored.log.end():
            halt.set()

    sl.watch_applied(kv, lambda _: None, store=store, reader=kv, on_applied=applied, stop=halt)
    assert store.get(b"f") is None
    assert store.get(b"other 6") == b"v"


def test_a_key_value_store_that_is_open_while_its_log_is_restored_raises(tmp_path: Path) -> None:
    folder = str(tmp_path / "log")
    log = object_log(folder)
    put(log, b"a")
    shutil.copytree(folder, tmp_path / "backup")
    put(log, b"b")
    kv = LogKeyValue(log)
    assert kv.get("b") == b"v"
    shutil.rmtree(folder)
    shutil.move(tmp_path / "backup", folder)
    put(object_log(folder), b"c")
    put(object_log(folder), b"d")
    with pytest.raises(Diverged):
        kv.get("d")


def test_a_queue_that_was_begun_again_at_its_place_is_another_history(tmp_path: Path) -> None:
    log = queue(str(tmp_path))
    enqueue(log, b"1", b"2", b"3")
    cursor = log.end()
    shutil.rmtree(tmp_path / "ingest")
    log = queue(str(tmp_path))
    enqueue(log, b"4", b"5", b"6", b"7")
    with pytest.raises(Diverged, match="restored from a copy"):
        log.plan(cursor)


def test_a_rewind_that_cuts_a_batch_keeps_the_cursors_below_the_cut(tmp_path: Path) -> None:
    folder = str(tmp_path / "log")
    with closing(wal(folder)) as log:
        put(log, b"a", b"b", b"c", b"d")
        below, above = log.cursor_at(2), log.cursor_at(4)
    rewind(folder, 3, quarantine=str(tmp_path / "cut"))
    with closing(wal(folder)) as log:
        put(log, b"x", b"y")
        assert sum(batch.num_rows for batch in log.read(below)) == 3
        with pytest.raises(Diverged):
            log.plan(above)


@pytest.mark.parametrize(
    "text", ["", "a/b", "{id}/0/1/", "{id}/0/1/xyz", "{id}/0/1/ff/2", "{id}/0/1/-1", f"{{id}}/0/1/{1 << 64:x}"]
)
def test_a_text_that_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        Cursor.parse(text.format(id=uuid4()))


def test_a_cursor_survives_as_text_with_its_fingerprint() -> None:
    for fingerprint in (None, 0, 1, (1 << 64) - 1):
        cursor = Cursor(uuid4(), 7, 3, fingerprint)
        assert Cursor.parse(str(cursor)) == cursor
        assert Cursor.parse(str(cursor)).fingerprint == fingerprint
        assert replace(cursor, fingerprint=None) == cursor


def test_a_table_that_followed_the_other_history_has_diverged_also_after_a_restart(tmp_path: Path) -> None:
    folder, table = str(tmp_path / "log"), str(tmp_path / "table")
    log = object_log(folder)
    put(log, b"a", b"b")
    shutil.copytree(folder, tmp_path / "backup")
    put(log, b"c")
    cursor = follow(log, sl.DeltaSink(table), upto="end")
    shutil.rmtree(folder)
    shutil.move(tmp_path / "backup", folder)
    put(object_log(folder), b"x")
    put(object_log(folder), b"y")
    sink = sl.DeltaSink(table)
    with pytest.raises(Diverged, match="restored from a copy"):
        follow(object_log(folder), sink, upto="end")
    assert sink.cursor(log.log_id) == cursor
