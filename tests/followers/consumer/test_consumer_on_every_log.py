"""The queue contract on logs without an object store: where batches begin, and where damaged ones go."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import strandline as sl
from strandline.errors import (
    CorruptData,
    CursorExpired,
    Diverged,
    Fenced,
    InvalidInput,
    NotReady,
    SlotInvalid,
    Unsupported,
)
from strandline.log.queue.contract import Queue
from strandline.log.queue.slot_queue import SlotQueue
from strandline.log.wal.log import WalLog
from strandline.storage.env import Env
from strandline.storage.objects.store import ObjectStore
from strandline.testing.clock import ManualClock
from tests.contracts.logs import append
from tests.contracts.queues import QueueContract, QueuePlace, without_store

SOON = 60.0


class LogPlace(QueuePlace):
    """A log whose slots are queues."""

    def __init__(self, log: Any, trim: Callable[[int], object]) -> None:
        self.log, self.trim = log, trim
        self.number = 0

    def queue(self, store: ObjectStore | None = None) -> Queue:
        assert store is None
        return SlotQueue(self.log, url=self.log.url, letters=None, env=Env(clock=ManualClock()))

    def produce(self, *entries: bytes, metadata: bytes = b"") -> None:
        append(self.log, *entries, number=self.number)
        self.number += 1

    def forget(self, count: int) -> None:
        self.trim(count)
        assert self.log.bounds().first == count


class LogQueueContract(QueueContract):
    zero = (b"0",)


@without_store
class TestWriteAheadLog(LogQueueContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[QueuePlace]:
        with sl.open(f"wal://{tmp_path}/log", create=True) as log:
            yield LogPlace(log, log.trim)


@pytest.mark.matrix
@without_store
class TestPrimary(LogQueueContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[QueuePlace]:
        with sl.node.Primary.open(tmp_path / "a") as log:
            yield LogPlace(log, log.trim)


@pytest.mark.matrix
@without_store
class TestRemoteLog(LogQueueContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[QueuePlace]:
        with sl.node.Primary.open(tmp_path / "a") as primary, sl.open(primary.url) as log:
            yield LogPlace(log, primary.trim)


@pytest.mark.matrix
@without_store
class TestTieredWriteAheadLog(LogQueueContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[QueuePlace]:
        url = f"wal://{tmp_path}/log"
        with sl.open(url, create=True) as log:
            sl.tier.attach(log, (tmp_path / "cold").as_uri())
        with sl.open(url) as log:
            assert isinstance(log, sl.tier.TieredLog)
            yield LogPlace(log, lambda upto: log.trim(upto, beyond_slots=True))


# --- numbers -----------------------------------------------------------------------------------------------------


@pytest.fixture
def wal(tmp_path: Path) -> Iterator[WalLog]:
    """Ten records in batches of 3, 1, 4 and 2."""
    with WalLog.open(tmp_path / "wal") as log:
        for number, count in enumerate((3, 1, 4, 2)):
            append(log, *[b"%d" % number] * count, number=number)
        yield log


def test_batches_are_numbered_by_the_offset_of_their_last_record_which_last_acked_takes(wal: WalLog) -> None:
    with sl.Consumer(wal, slot="billing") as consumer:
        assert [batch.sequence for batch in consumer] == [2, 3, 7, 9]
        assert (consumer.next_to_read, consumer.next_to_ack, len(consumer)) == (10, 0, 10)
        consumer.ack(2)
        with pytest.raises(sl.errors.OutOfOrderAck, match="the next one is 3, and handed out are 3 through 9"):
            consumer.ack(7)
        consumer.ack_through(7)
        assert (wal.slots.get("billing").position, len(consumer)) == (8, 2)
    with sl.Consumer(wal, slot="billing") as consumer:
        assert [batch.values for batch in consumer] == [[b"3", b"3"]]
    with sl.Consumer(wal, slot="billing", last_acked=4) as consumer:  # in the middle of a batch
        assert [(batch.sequence, len(batch.values)) for batch in consumer] == [(7, 3), (9, 2)]


def test_an_acknowledgement_is_durable_when_it_returns(wal: WalLog) -> None:
    consumer = sl.Consumer(wal, slot="billing", ack_every=2)
    consumer.next_descriptors(4)
    consumer.ack(2)
    assert sl.log.WalReader(wal.folder).slots.get("billing").position == 0
    consumer.ack(3)
    assert sl.log.WalReader(wal.folder).slots.get("billing").position == 4  # in the file, not only in memory
    consumer.ack_through(7)
    assert sl.log.WalReader(wal.folder).slots.get("billing").position == 8
    consumer.close()


def test_over_flight_an_acknowledgement_survives_a_crash_of_the_node(tmp_path: Path) -> None:
    with sl.node.Primary.open(tmp_path / "a") as primary, sl.open(primary.url) as log:
        append(log, b"a", b"b", number=0)
        with sl.Consumer(primary.url, slot="billing") as consumer:
            consumer.next_batch()
            consumer.ack_through(1)
            stored = sl.log.WalReader(primary.node.primary.log.folder).slots.list()
            assert [slot.position for slot in stored] == [2]


def test_a_consumer_reads_segments_and_continues_in_the_hot_tier(tmp_path: Path) -> None:
    url = f"wal://{tmp_path}/log"
    with sl.open(url, create=True) as log:
        for number in range(4):
            append(log, b"%d" % number, number=number)
        sl.tier.attach(log, (tmp_path / "cold").as_uri())
        with sl.tier.tiering(log) as tierer:
            tierer.run_once(everything=True)
        append(log, b"4", number=4)
        assert log.trim(3) == 3
    with sl.Consumer(url) as consumer:  # it opens the log, and closes it
        found = [batch.values for batch in consumer]
        assert [value for values in found for value in values] == [b"0", b"1", b"2", b"3", b"4"]
        consumer.ack_through(3)
    with sl.open(url) as log, sl.Consumer(log) as consumer:
        assert [batch.values for batch in consumer] == [[b"4"]]


# --- who may consume ---------------------------------------------------------------------------------------------


def test_a_write_ahead_log_is_consumed_by_the_process_that_writes_it(wal: WalLog, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="opened for reading"):
        sl.Consumer(sl.log.WalReader(wal.folder))
    with pytest.raises(Fenced, match="open it for reading"):
        sl.Consumer(wal.url)
    sl.open(f"wal://{tmp_path}/other", create=True).close()
    for _ in range(2):  # a failed opening lets go of the log
        with pytest.raises(InvalidInput, match="last_acked=7"):
            sl.Consumer(f"wal://{tmp_path}/other", last_acked=7)
    sl.open(f"wal://{tmp_path}/other").close()


@pytest.mark.matrix
def test_a_replica_has_no_slots_and_names_the_primary(tmp_path: Path) -> None:
    with (
        sl.node.Primary.open(tmp_path / "a", name="a") as primary,
        sl.node.Replica.open(tmp_path / "b", primary.url, name="b") as replica,
    ):
        append(primary, b"x", number=0)
        replica.reading(after=primary.end(), timeout=SOON)
        with pytest.raises(NotReady, match="b is no primary: ask a"):
            sl.Consumer(replica)


def test_a_slot_that_is_dropped_or_unknown_to_a_new_primary_says_how_to_continue(wal: WalLog) -> None:
    consumer = sl.Consumer(wal, slot="billing")
    consumer.next_descriptors(2)
    consumer.ack_through(3)
    wal.slots.drop("billing")
    for call in (consumer.next_batch, consumer.flush):
        with pytest.raises(SlotInvalid, match="last_acked=3 to continue"):
            call()
    with sl.Consumer(wal, slot="billing", last_acked=3) as again:
        assert [batch.sequence for batch in again] == [7, 9]


def test_a_log_that_was_restored_under_its_consumer_is_diverged(tmp_path: Path) -> None:
    with sl.node.Primary.open(tmp_path / "a") as primary:
        append(primary, b"a", number=0)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    port = free_port()
    with sl.node.Primary.open(tmp_path / "a", listen=("127.0.0.1", port)) as primary:
        consumer = sl.Consumer(primary.url, trim_every=None)
        append(primary, b"b", number=1)
        consumer.next_descriptors(2)
    with sl.node.Primary.open(tmp_path / "b", listen=("127.0.0.1", port)) as primary:
        append(primary, b"other", number=1)
        primary.slots.create("default", 0)
        primary.slots.claim("default", consumer.holder)
        for call in (consumer.next_batch, lambda: consumer.ack_through(1)):
            with pytest.raises(Diverged, match="another history"):
                call()
        assert primary.slots.get("default").position == 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


# --- batches that cannot be read ---------------------------------------------------------------------------------


def damaged(folder: Path) -> Callable[[], None]:
    """A closed log with three batches, of which the second is damaged; returns a function that repairs it."""
    with WalLog.open(folder, roll_bytes=1) as log:  # a file for each: opening reads the last one
        for number in range(3):
            append(log, b"value %d" % number, number=number)
        file = Path(log.plan(log.start())[1].frame.path)
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"value 1", b"value X"))
    return lambda: file.write_bytes(whole)


def test_a_damaged_batch_raises_and_leaves_the_cursor_or_is_set_aside_where_the_caller_says(tmp_path: Path) -> None:
    heal = damaged(tmp_path / "log")
    url = f"wal://{tmp_path}/log"
    with pytest.raises(InvalidInput, match="pass dead_letters="):
        sl.Consumer(url, on_poison="dead-letter")
    with sl.Consumer(url) as consumer:
        assert consumer.next_batch().sequence == 0
        for _ in range(2):
            with pytest.raises(CorruptData):
                consumer.next_batch()
        assert consumer.next_to_read == 1
        (bad,) = consumer.next_descriptors(1)
        with pytest.raises(Unsupported, match="pass dead_letters="):
            consumer.dead_letter(bad, "not for us")
    letters = tmp_path / "letters"
    with sl.Consumer(url, on_poison="dead-letter", dead_letters=letters.as_uri()) as consumer:
        assert [batch.sequence for batch in consumer] == [0, 2]
        assert consumer.dead_letters == 1
        consumer.ack(0)
        consumer.ack(2)
    (letter,) = [json.loads(path.read_bytes()) for path in letters.rglob("*.json")]
    assert (letter["descriptor"]["start"], letter["descriptor"]["sequence"]) == (1, 1)
    assert "span" not in letter["descriptor"]
    assert b"value X" in (letters / letter["bytes"]).read_bytes()
    heal()
    with sl.Consumer(url, slot="again") as consumer:
        assert len(list(consumer)) == 3


def test_dead_letters_of_a_log_with_a_store_of_its_own_stay_there() -> None:
    log = sl.open(f"memory://{uuid4().hex}", create=True)
    with pytest.raises(InvalidInput, match="keeps them in its own"):
        sl.Consumer(log, dead_letters="memory://elsewhere")


def test_what_is_gone_is_not_skipped(wal: WalLog) -> None:
    wal.trim(4)
    with pytest.raises(CursorExpired):
        sl.Consumer(wal, last_acked=2)
    with sl.Consumer(wal) as consumer:
        assert consumer.next_to_read == 4
