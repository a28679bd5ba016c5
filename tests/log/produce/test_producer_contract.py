"""The producer contract on logs that need no server, and what a producer does when its log fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest

import strandline as sl
from strandline.errors import InvalidInput, NotReady, ProducerFailed, StorageError, TransientStorageError
from strandline.log.contract import Handle
from strandline.log.produce.appending import AppendShipper
from strandline.log.produce.producer import Producer
from strandline.log.produce.shipper import Limits
from strandline.log.wal.log import WalLog
from strandline.model.head import WriterId
from strandline.storage.clock import CHANCE, CLOCK
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock
from tests.contracts.logs import content, records
from tests.contracts.producers import ProducerContract

SOON, NEVER = 60.0, 3600.0


class TestWriteAheadLog(ProducerContract):
    @pytest.fixture
    def log(self, tmp_path: Path) -> Iterator[Any]:
        with sl.open(f"wal://{tmp_path}/log", create=True) as log:
            yield log


@pytest.mark.matrix
class TestObjectLog(ProducerContract):
    has_metadata = True

    @pytest.fixture
    def log(self) -> Any:
        return sl.open(f"memory://{uuid4().hex}", create=True)


@pytest.mark.matrix
class TestMemoryLog(ProducerContract):
    @pytest.fixture
    def log(self) -> Any:
        return sl.log.MemoryLog()


@pytest.mark.matrix
class TestQueueOfVersion1(ProducerContract):
    has_metadata = only_values = True
    has_writers = False

    @pytest.fixture
    def log(self) -> Any:
        return sl.open(f"memory://{uuid4().hex}", format="queue-v1")


@pytest.mark.matrix
class TestTieredObjectLog(ProducerContract):
    has_metadata = True

    @pytest.fixture
    def log(self) -> Iterator[Any]:
        url = f"memory://{uuid4().hex}"
        sl.tier.attach(sl.open(url, create=True), f"memory://{uuid4().hex}")
        with sl.open(url) as log:
            assert isinstance(log, sl.tier.TieredLog)
            yield log


@pytest.mark.matrix
class TestTieredWriteAheadLog(ProducerContract):
    @pytest.fixture
    def log(self, tmp_path: Path) -> Iterator[Any]:
        url = f"wal://{tmp_path}/log"
        with sl.open(url, create=True) as log:
            sl.tier.attach(log, (tmp_path / "cold").as_uri())
        with sl.open(url) as log:
            assert isinstance(log, sl.tier.TieredLog)
            yield log


# --- a log that fails --------------------------------------------------------------------------------------------


class Line:
    """The append of a real log, with a fault before or after some of its calls."""

    def __init__(self, log: Any, *faults: Callable[[], object] | None, landed: bool = False) -> None:
        self.log, self.faults, self.landed = log, list(faults), landed
        self.numbers: list[int] = []

    def append(self, batch: pa.Table, *, writer: Any, number: int, expect: int | None = None) -> Handle:
        self.numbers.append(number)
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None and not self.landed:
            fault()
        handle = self.log.append(batch, writer=writer, number=number, expect=expect)
        if fault is not None:
            handle.result(SOON)
            fault()
        return handle

    def producer(self, *, retry_seconds: float = 60.0, clock: Any = CLOCK, linger: float = NEVER) -> Producer:
        limits = Limits(8 << 20, linger, 64 << 20, block=True, uploads=1)
        writer = WriterId(CHANCE.uuid())
        shipper = AppendShipper(self.append, writer, Env(clock=clock), retry_seconds)
        return Producer(shipper, limits, writer=writer, number=0, env=Env(clock=clock))


def failing(error: Exception) -> Callable[[], object]:
    def fail() -> None:
        raise error

    return fail


LOST = failing(TransientStorageError("the connection broke"))
ELSEWHERE = failing(NotReady("another node leads"))


@pytest.fixture
def wal(tmp_path: Path) -> Iterator[WalLog]:
    with WalLog.open(tmp_path / "wal") as log:
        yield log


@pytest.mark.parametrize("landed", [True, False], ids=["landed", "not landed"])
def test_a_batch_whose_answer_was_lost_is_sent_again_under_its_number_and_listed_once(
    wal: WalLog, *, landed: bool
) -> None:
    line = Line(wal, LOST, None, LOST, LOST, landed=landed)
    with line.producer() as producer:
        handles = []
        for value in (b"a", b"b", b"c"):
            handles.append(producer.append(value=value))
            producer.flush(SOON)
    assert [handle.result(0).first for handle in handles] == [0, 1, 2]
    assert content(wal) == [(0, b"a"), (1, b"b"), (2, b"c")]
    assert line.numbers == [0, 0, 1, 1, 1, 2]


def test_a_log_that_is_not_ready_is_asked_again_until_its_time_is_over(wal: WalLog) -> None:
    clock = ManualClock()
    line = Line(wal, *[ELSEWHERE] * 1000)
    producer = line.producer(retry_seconds=30.0, clock=clock)
    handle = producer.append(value=b"a")
    with pytest.raises(NotReady, match="another node leads"):
        producer.flush(SOON)
    assert 30.0 <= sum(clock.slept) < 32.0
    with pytest.raises(NotReady):
        handle.result(0)
    with pytest.raises(ProducerFailed, match="call retry"):
        producer.append(value=b"b")
    line.faults.clear()
    assert [receipt.first for receipt in producer.retry(SOON)] == [0]
    producer.append(value=b"b")
    producer.close()
    assert content(wal) == [(0, b"a"), (1, b"b")]


def test_what_cannot_succeed_later_is_raised_at_once_and_later_batches_are_held_back(wal: WalLog) -> None:
    refused = StorageError("403 Forbidden")
    line = Line(wal, None, *[failing(refused)] * 9)
    producer = line.producer()
    first = producer.append(value=b"a")
    producer.flush(SOON)
    second = producer.append_batch(records(b"b"))
    with pytest.raises(StorageError, match="403"):
        producer.flush(SOON)
    assert line.numbers == [0, 1]
    assert first.result(0).first == 0
    with pytest.raises(StorageError, match="403"):
        second.result(0)
    with pytest.raises(ProducerFailed):
        producer.close()
    assert content(wal) == [(0, b"a")]


def test_of_batches_that_are_sent_together_those_before_the_failed_one_are_listed(wal: WalLog) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert go_on.wait(SOON)

    line = Line(wal, hold, None, None, failing(StorageError("403 Forbidden")), failing(StorageError("403 Forbidden")))
    producer = line.producer()
    handles = []
    for value in (b"a", b"b", b"c", b"d", b"e"):
        handles.append(producer.append(value=value))
        with pytest.raises(TimeoutError):
            producer.flush(0.0)
        assert begun.wait(SOON)  # from now on the others wait behind the first
    go_on.set()
    with pytest.raises(ProducerFailed, match="Batch 3"):
        producer.flush(SOON)
    with pytest.raises(StorageError, match="403"):
        handles[3].result(0)
    assert [handle.result(0).first for handle in handles[:3]] == [0, 1, 2]
    assert content(wal) == [(0, b"a"), (1, b"b"), (2, b"c")]
    assert [receipt.first for receipt in producer.retry(SOON)] == [3, 4]
    producer.close()
    assert content(wal)[3:] == [(3, b"d"), (4, b"e")]


def test_of_two_failed_batches_the_first_one_gives_its_own_reason(wal: WalLog, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    seal = AppendShipper.seal

    def hold() -> None:
        begun.set()
        assert go_on.wait(SOON)

    def seal_some(shipper: AppendShipper, draft: Any, *, number: int, expect: int | None = None) -> Any:
        if number == 3:
            raise MemoryError("no room for batch 3")
        return seal(shipper, draft, number=number, expect=expect)

    monkeypatch.setattr(AppendShipper, "seal", seal_some)
    producer = Line(
        wal, hold, None, failing(StorageError("403 Forbidden")), failing(StorageError("403 Forbidden"))
    ).producer()
    handles = []
    for value in (b"a", b"b", b"c", b"d"):
        handles.append(producer.append(value=value))
        with pytest.raises(TimeoutError):
            producer.flush(0.0)
        assert begun.wait(SOON)
    go_on.set()
    with pytest.raises(ProducerFailed, match="Batch 2"):
        producer.flush(SOON)
    assert [handle.result(0).first for handle in handles[:2]] == [0, 1]
    with pytest.raises(StorageError, match="403"):
        handles[2].result(0)
    with pytest.raises(ProducerFailed):
        producer.close()


def test_a_table_that_no_frame_could_hold_is_refused_at_the_call_and_the_producer_continues(wal: WalLog) -> None:
    with wal.producer() as producer:
        large = pa.table(
            {"value": pa.array([bytes(200 << 20)], pa.binary()), "key": pa.array([bytes(60 << 20)], pa.binary())}
        )
        with pytest.raises(InvalidInput, match="append it in parts"):
            producer.append_batch(large)
        assert producer.append(value=b"small").result(SOON).first == 0


def test_a_producer_of_a_reopened_log_continues_with_its_writer(tmp_path: Path) -> None:
    url = f"wal://{tmp_path}/log"
    with sl.open(url, create=True) as log, log.producer() as producer:
        producer.append(value=b"a")
    with sl.open(url) as log:
        assert log.last_number(producer.writer) == 0
        with log.producer(writer=producer.writer) as again:
            assert again.append(value=b"b").result(SOON).first == 1
    with sl.open(url, read_only=True) as reader, pytest.raises(sl.errors.Unsupported, match="opened for reading"):
        reader.producer()


def test_a_producer_whose_log_is_closed_raises_and_loses_nothing_silently(tmp_path: Path) -> None:
    log = WalLog.open(tmp_path / "log")
    producer = log.producer(linger=NEVER)
    producer.append(value=b"a")
    producer.flush(SOON)
    late = producer.append(value=b"b")
    log.close()
    with pytest.raises(sl.errors.LogClosed):
        producer.flush(SOON)
    with pytest.raises(sl.errors.LogClosed):
        late.result(0)
    with pytest.raises(ProducerFailed):
        producer.close()


def test_no_batch_and_no_record_is_larger_than_a_frame_whatever_the_settings(
    wal: WalLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The real limits are two thousand times as large.
    monkeypatch.setattr(AppendShipper, "most_bytes", 100_000)
    monkeypatch.setattr(AppendShipper, "most_record_bytes", 90_000)
    with wal.producer(batch_bytes=256 << 20, linger=NEVER) as producer:
        for size in (60_000, 60_000, 1_000, 80_000, 40_000, 40_000):
            producer.append(value=bytes(size))
        producer.append_batch(records(bytes(50_000)))
        producer.append_batch(records(bytes(50_000)))
        with pytest.raises(InvalidInput, match="over the limit of 90,000"):
            producer.append(value=bytes(95_000))
        producer.append(value=b"and it goes on")
    spans = wal.plan(wal.start())
    assert wal.bounds().next == 9
    assert max(sum(batch.nbytes for batch in span.fetch()) for span in spans) <= 100_000 + 8 * 9  # with offsets
