"""The log contract on every log that needs no server."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from strandline.errors import CursorExpired
from strandline.log.contract import Log
from strandline.log.memory import MemoryLog
from strandline.log.object import ObjectLog, open_log
from strandline.model.cursor import Cursor
from strandline.model.head import WriterId
from strandline.model.retention import Invalidation, InvalidReason
from strandline.model.stamp import OpId
from strandline.storage.env import Env
from strandline.storage.objects.urls import open_store
from strandline.testing.clock import ManualClock
from strandline.testing.faulty import FaultyStore
from strandline.testing.plain import PlainStore
from tests.contracts.logs import LogContract, append, content, fetched
from tests.contracts.logs.batches import records

GONE = Invalidation(InvalidReason.HORIZON, 1)


class TestMemoryLog(LogContract):
    @pytest.fixture
    def log(self) -> Log:
        return MemoryLog()

    def retain_from(self, log: Log, offset: int) -> None:
        log.trim(offset)

    def invalidate(self, log: Log, name: str) -> None:
        log.slots._store(replace(log.slots.get(name), invalid=GONE))


class ObjectLogContract(LogContract):
    def retain_from(self, log: ObjectLog, offset: int) -> None:
        log._lister.cell.update(OpId(uuid4()), lambda head: replace(head, floor=offset))

    def invalidate(self, log: ObjectLog, name: str) -> None:
        log.slots.cell(name).update(OpId(uuid4()), lambda slot: replace(slot, invalid=GONE))


@pytest.mark.matrix
class TestObjectLogInMemory(ObjectLogContract):
    picklable = False

    @pytest.fixture
    def log(self) -> Log:
        return open_log(f"memory://contract-{uuid4().hex}", create=True)


class TestObjectLogInFolder(ObjectLogContract):
    appends = 12

    @pytest.fixture
    def log(self, tmp_path: Path) -> Log:
        return open_log(str(tmp_path / "log"), create=True)


@pytest.mark.matrix
class TestObjectLogSeenByAnother(ObjectLogContract):
    """Every call goes through an object of its own, as if it came from another process."""

    appends = 20

    @pytest.fixture
    def log(self) -> Log:
        return Newcomers(f"memory://newcomers-{uuid4().hex}")

    picklable = False


class Newcomers:
    """A log that is opened again for each call."""

    def __init__(self, url: str) -> None:
        self._url = url
        open_log(url, create=True)

    def __getattr__(self, name: str) -> object:
        return getattr(open_log(self._url), name)


def test_a_pickled_log_is_the_same_log(tmp_path: Path) -> None:
    log = open_log(str(tmp_path), create=True)
    append(log, b"a", number=0)
    copy = pickle.loads(pickle.dumps(log))
    assert (copy.log_id, copy.url) == (log.log_id, log.url)
    append(copy, b"b", number=1)
    assert content(log) == [(0, b"a"), (1, b"b")]


def test_reading_writes_nothing_to_the_store() -> None:
    line = FaultyStore(PlainStore())
    log = open_log(line, create=True)
    append(log, b"a", b"b", number=0)
    log.slots.create("reader", 0)
    before = len(line.named("put", "put_if", "delete"))
    reader = open_log(line)
    fetched(reader.plan(reader.start()))
    assert [batch.num_rows for batch in reader.read()] == [2]
    reader.bounds(), reader.end(), reader.slots.list(), reader.slots.floor(), reader.wait(reader.start(), 0)
    assert len(line.named("put", "put_if", "delete")) == before


def test_waiting_polls_the_head_ever_more_rarely_until_its_time_is_over() -> None:
    clock = ManualClock()
    log = open_log(PlainStore(), create=True, env=Env(clock=clock))
    assert not log.wait(log.start(), 10.0)
    assert clock.monotonic() == pytest.approx(10.0)
    assert clock.slept[0] < clock.slept[5] < 0.3
    assert len(clock.slept) < 100


def test_a_log_is_read_as_of_the_call_that_began_it() -> None:
    log = open_log(PlainStore(), create=True)
    for number in range(5):
        append(log, b"a", b"b", number=number)
    reading = log.read(Cursor(log.log_id, 3), upto=9, columns=["offset"])
    first = next(reading)
    append(log, b"late", number=5)
    offsets = [*first["offset"].to_pylist(), *(o for batch in reading for o in batch["offset"].to_pylist())]
    assert offsets == list(range(3, 9))


def test_two_creators_of_one_log_get_the_same_log() -> None:
    store = open_store(f"memory://twice-{uuid4().hex}")
    one, two = open_log(store, create=True), open_log(store, create=True)
    assert one.log_id == two.log_id


def test_a_memory_log_of_many_batches_finds_each_of_them_and_frees_what_it_trims():
    log, writer = MemoryLog(), WriterId(uuid4())
    for number in range(300):  # more than the head lists by itself
        log.append(records(b"%d" % number), writer=writer, number=number).result()
    assert [value for batch in log.read() for value in batch["value"].to_pylist()] == [b"%d" % at for at in range(300)]
    assert log.plan(log.cursor_at(17))[0].first == 17
    log.trim(250)
    assert [batch["offset"][0].as_py() for batch in log.read()] == list(range(250, 300))
    assert len(log._batches) == 50
    with pytest.raises(CursorExpired):
        log.plan(Cursor(log.log_id, 249))
