"""The producer when the store fails: which handles raise, which batches are held back, and that none is skipped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from strandline.errors import DiskFull, OutcomeUnknown, ProducerFailed, StorageError, TransientStorageError
from strandline.formats.arrow.block import encode_page
from strandline.log.object import ObjectLog, Producer, open_log
from strandline.model.cursor import Bounds
from strandline.model.head import Receipt
from strandline.storage.disk import DISK
from strandline.storage.env import Env
from strandline.storage.objects.local import LocalStore
from strandline.storage.retry import Backoff, RetryingStore
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import Call, Faults, FaultyStore
from strandline.testing.plain import PlainStore
from tests.contracts.logs import content, records
from tests.contracts.slots import append
from tests.disk_doubles import FullDisk
from tests.log.produce.producing import NEVER, REFUSED, SOON, Gate, failure_of
from tests.matrix_cases import some


@pytest.fixture
def line() -> FaultyStore:
    return FaultyStore(PlainStore())


@pytest.fixture
def log(line: FaultyStore) -> ObjectLog:
    return open_log(line, create=True)


CALLS: dict[str, Callable[[Producer], object]] = {
    "append": lambda producer: producer.append(value=b"late"),
    "append of a large one": lambda producer: producer.append(value=bytes(100_000)),
    "append_batch": lambda producer: producer.append_batch(records(b"late")),
    "produce": lambda producer: producer.produce([b"late"]),
    "flush": lambda producer: producer.flush(SOON),
}


def assert_failed_for_good(producer: Producer) -> None:
    for call in CALLS.values():
        with pytest.raises(ProducerFailed):
            call(producer)
    with pytest.raises(ProducerFailed):
        producer.close()
    producer.close()


def test_a_failed_upload_fails_its_own_records_and_holds_back_later_ones(log: ObjectLog, line: FaultyStore) -> None:
    second_has_begun, third_is_up, all_are_appended = threading.Event(), threading.Event(), threading.Event()
    uploads: list[str] = []

    def fail_the_second_after_the_third(call: Call) -> None:
        if not call.path.startswith("batches/"):
            return
        if call.stage == "after":
            if uploads.index(call.path) == 2:
                third_is_up.set()
            return
        uploads.append(call.path)
        if len(uploads) == 2:
            second_has_begun.set()
            assert third_is_up.wait(SOON)
            assert all_are_appended.wait(SOON)
            raise REFUSED

    producer = log.producer(batch_bytes=1, linger=NEVER, uploads=4)
    first = producer.append(value=b"1" * 20_000)
    first.result(SOON)
    line.hook(fail_the_second_after_the_third)
    uploads.append("the first")
    second = producer.append(value=b"2" * 20_000)
    assert second_has_begun.wait(SOON)  # uploads run side by side, and may begin in any order
    third = producer.append(value=b"3" * 20_000)
    assert third_is_up.wait(SOON)
    queued = producer.append(value=b"4")
    all_are_appended.set()
    assert failure_of(second) is REFUSED
    for later in (third, queued):
        error = failure_of(later)
        assert isinstance(error, ProducerFailed)
        assert error.__cause__ is REFUSED
    assert_failed_for_good(producer)
    assert log.bounds() == Bounds(0, 1)
    line.unhook()
    with log.producer() as successor:
        assert successor.append(value=b"5").result(SOON) == Receipt(1, 1)


def test_a_failed_listing_fails_its_own_records_and_holds_back_later_ones(log: ObjectLog, line: FaultyStore) -> None:
    producer = log.producer(linger=NEVER)
    producer.append(value=b"a")
    producer.flush(SOON)
    line.fail_next("put_if", path_prefix="head", error=REFUSED)
    handles = [producer.append(value=b"b"), producer.append_batch(records(b"c")), producer.produce([b"d"])]
    with pytest.raises(StorageError, match="403"):
        producer.flush(SOON)
    assert [failure_of(handle) for handle in handles] == [REFUSED] * 3
    assert_failed_for_good(producer)
    assert content(log) == [(0, b"a")]


def test_a_table_that_could_not_be_encoded_is_in_no_batch_and_harms_no_other(
    log: ObjectLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[object] = []

    def encode_some(*args: object) -> object:
        pages.append(args)
        if len(pages) == 3:
            raise MemoryError
        return encode_page(*args)

    monkeypatch.setattr("strandline.log.object.upload.encode_page", encode_some)
    with log.producer(linger=NEVER) as producer:
        before = producer.append_batch(records(b"before"))
        with pytest.raises(MemoryError):
            # So many that they stay two pages, of which the first is encoded: a few records would be joined into one.
            producer.append_batch(pa.Table.from_batches([records(*[b"half"] * 8), records(b"lost")]))
        assert len(pages) == 3
        after = producer.append(value=b"after")
    assert [before.result(0), after.result(0)] == [Receipt(0, 1), Receipt(1, 1)]
    assert content(log) == [(0, b"before"), (1, b"after")]


@pytest.mark.parametrize("step", ["tickets_of", "page_of"])
def test_an_append_that_has_no_memory_for_queued_records_raises_and_is_in_no_batch(
    log: ObjectLog, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def no_memory(_: object) -> None:
        raise MemoryError

    producer, handles = log.producer(linger=NEVER), []
    monkeypatch.setattr(f"strandline.log.produce.state.{step}", no_memory)
    with pytest.raises(MemoryError):
        handles.extend(producer.append(value=b"queued") for _ in range(10_000))
    monkeypatch.undo()
    with pytest.raises(ProducerFailed):
        producer.close()
    assert log.bounds() == Bounds(0, 0)
    assert {type(failure_of(handle)) for handle in handles} == {MemoryError}


def test_a_batch_that_is_just_being_listed_counts_though_there_is_no_memory_for_later_records(
    log: ObjectLog, line: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def no_memory(_: object) -> None:
        failed.set()
        raise MemoryError

    gate = Gate(line, "head", stage="after")
    producer = log.producer(linger=0.01)
    listed = producer.append_batch(records(b"listed"))
    assert gate.reached.wait(SOON)
    monkeypatch.setattr("strandline.log.produce.state.page_of", no_memory)
    lost = producer.append(value=b"lost")
    assert failed.wait(SOON)  # in the thread that closes batches in time
    while producer._state.failure is None:
        threading.Event().wait(0.001)
    with pytest.raises(ProducerFailed):
        producer.append(value=b"refused")
    gate.open()
    assert listed.result(SOON) == Receipt(0, 1)
    assert isinstance(failure_of(lost), MemoryError)
    with pytest.raises(ProducerFailed):
        producer.close()
    assert content(log) == [(0, b"listed")]


def test_a_batch_whose_filling_was_interrupted_is_not_listed(log: ObjectLog, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = log.producer(linger=NEVER)
    before = producer.append_batch(records(b"before"))
    draft = type(producer._state._open.draft)
    add = draft.add

    def add_and_interrupt(*args: object) -> None:
        add(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(draft, "add", add_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        producer.append_batch(records(b"interrupted"))
    monkeypatch.undo()
    with pytest.raises(ProducerFailed):
        producer.flush(SOON)
    assert isinstance(failure_of(before), ProducerFailed)
    assert_failed_for_good(producer)
    assert log.bounds() == Bounds(0, 0)


def test_an_append_that_waits_for_room_raises_when_the_producer_fails(log: ObjectLog, line: FaultyStore) -> None:
    failing = threading.Event()

    def fail_when_told(call: Call) -> None:
        if call.path.startswith("batches/") and call.stage == "before":
            assert failing.wait(SOON)
            raise REFUSED

    line.hook(fail_when_told)
    producer = log.producer(budget=10_000, linger=NEVER, compression="none")
    producer.append(value=bytes(range(256)) * 100)
    told: list[BaseException] = []

    def append_more() -> None:
        try:
            producer.append(value=b"more").result(SOON)
        except ProducerFailed as error:
            told.append(error)

    thread = threading.Thread(target=append_more, daemon=True)
    thread.start()
    failing.set()
    thread.join(SOON)
    assert [type(error) for error in told] == [ProducerFailed]
    with pytest.raises(ProducerFailed):
        producer.close()


@pytest.mark.parametrize("landed", [True, False], ids=["landed", "not landed"])
def test_an_outcome_that_stays_unknown_is_raised_and_the_call_can_be_repeated(
    line: FaultyStore, *, landed: bool
) -> None:
    log = open_log(line, create=True, env=Env(clock=ManualClock(), chance=SeededChance(1)))
    producer = log.producer(linger=0.0)
    stage = "after" if landed else "before"
    line.hook(lambda call: line.turn_down() if (call.name, call.stage) == ("put_if", stage) else None)
    line.lose_answers(1, path_prefix="head")
    handle = producer.append(value=b"a")
    assert isinstance(failure_of(handle), OutcomeUnknown)
    with pytest.raises(ProducerFailed):
        producer.close()
    line.unhook()
    line.heal()
    assert log.bounds() == Bounds(0, int(landed))
    # The writer and the number are public: whoever kept the record can ask again, and it is there once.
    assert append(log, b"a", writer=producer.writer, number=0) == Receipt(0, 1)
    assert content(log) == [(0, b"a")]
    with log.producer(writer=producer.writer) as successor:
        assert successor.append(value=b"b").result(SOON) == Receipt(1, 1)


def test_a_store_that_is_down_for_a_while_delays_and_loses_nothing() -> None:
    place, clock = PlainStore(), ManualClock()
    line = FaultyStore(place)
    patient = RetryingStore(line, backoff=Backoff(attempts=50), env=Env(clock=clock, chance=SeededChance(1)))
    log = open_log(patient, create=True, env=Env(clock=clock, chance=SeededChance(2)))
    failed = []

    def come_back(call: Call) -> None:
        failed.append(call)
        if len(failed) % 20 == 0:
            line.turn_up()

    with log.producer(linger=0.0, batch_bytes=1) as producer:
        handles = []
        line.hook(come_back)
        for number in range(10):
            line.turn_down()
            handles.append(producer.append(value=b"%d" % number * 20_000))
            assert handles[-1].result(SOON) == Receipt(number, 1)
    assert len(failed) > 100
    assert [value[:1] for _, value in content(open_log(place))] == [b"%d" % number for number in range(10)]


@pytest.mark.parametrize("seed", some(range(20), 6))
def test_a_bad_line_loses_nothing_and_doubles_nothing(seed: int) -> None:
    place, clock = PlainStore(), ManualClock()
    line = FaultyStore(place, seed=seed, faults=Faults(before=0.1, after=0.2, late=0.05, throttled=0.05))
    patient = RetryingStore(line, backoff=Backoff(attempts=50), env=Env(clock=clock, chance=SeededChance(seed)))
    opened = open_log(place, create=True)
    log = open_log(patient, env=Env(clock=clock, chance=SeededChance(seed + 100)))
    with log.producer(linger=0.0, batch_bytes=20_000, uploads=2) as producer:
        handles = [producer.append(value=b"%d" % number) for number in range(2000)]
        for handle in handles[::100]:
            handle.result(SOON)
    assert [handle.result(0).first for handle in handles] == list(range(2000))
    assert content(opened) == [(number, b"%d" % number) for number in range(2000)]


def test_a_full_disk_is_reported_and_listed_batches_stay(tmp_path: Path) -> None:
    disk = FullDisk(DISK, 60_000)
    log = open_log(LocalStore(str(tmp_path), env=Env(disk=disk)), create=True)
    producer = log.producer(linger=NEVER, compression="none")
    acknowledged = 0
    while (handle := producer.append(value=b"x" * 5000)) and disk.room > 6000:
        producer.flush(SOON)
        acknowledged += handle.result(0).count
    with pytest.raises(DiskFull, match="room"):
        producer.flush(SOON)
    assert isinstance(failure_of(handle), DiskFull)
    assert_failed_for_good(producer)
    assert disk.refused > 0
    assert 3 < acknowledged < 12
    assert content(open_log(str(tmp_path))) == [(number, b"x" * 5000) for number in range(acknowledged)]
    disk.make_room(1 << 20)
    with log.producer() as successor:
        assert successor.append(value=b"y").result(SOON) == Receipt(acknowledged, 1)


def test_transient_failures_that_never_end_fail_the_producer(line: FaultyStore) -> None:
    clock = ManualClock()
    log = open_log(RetryingStore(line, env=Env(clock=clock, chance=SeededChance(1))), create=True, env=Env(clock=clock))
    producer = log.producer(linger=0.0)
    line.turn_down()
    assert isinstance(failure_of(producer.append(value=b"a")), TransientStorageError)
    line.turn_up()
    with pytest.raises(ProducerFailed):
        producer.close()
    assert log.bounds() == Bounds(0, 0)
