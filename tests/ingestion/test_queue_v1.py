"""Queues of version 1 as sources."""

from __future__ import annotations

import shutil

import pytest

import strandline as sl
from strandline.compat.v1.log import QueueLog
from strandline.compat.v1.upgrade import upgrade
from strandline.errors import CursorExpired, Diverged, InvalidInput
from strandline.log.memory import MemoryLog
from strandline.log.object.log import open_log
from strandline.log.read.span_tasks import last_record
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock
from strandline.testing.plain import PlainStore
from tests.ingestion.sources import a_log, content, position


def filled(queue: QueueLog, first: int, batches: int) -> None:
    with queue.producer() as producer:
        for number in range(first, first + batches):
            producer.produce([b"%d of %d" % (row, number) for row in range(3)])
            producer.flush()


@pytest.fixture
def queue() -> QueueLog:
    return QueueLog(PlainStore(), "ingest/manifest", "ingest")


@pytest.mark.parametrize(
    "kind", ["wal", pytest.param("remote", marks=pytest.mark.matrix), pytest.param("object", marks=pytest.mark.matrix)]
)
def test_each_batch_of_a_queue_is_an_append_of_its_own_and_the_queue_is_not_changed(queue, tmp_path, kind):
    with a_log(kind, tmp_path / "log") as target:
        filled(queue, 0, 3)
        assert sl.ingest(queue, target).records == 9
        filled(queue, 3, 2)
        assert sl.ingest(queue, target).records == 6
        assert sl.ingest(queue, target).records == 0
        assert content(target).column("value").to_pylist() == [
            b"%d of %d" % (row, number) for number in range(5) for row in range(3)
        ]
        assert position(queue, target) == 5
        assert [target.append_at(offset).first for offset in (0, 4, 8, 14)] == [0, 3, 6, 12]
        assert (queue.bounds().count, queue.manifest().epoch) == (5, 0)
        for sequence in range(6):
            there = sl.bulk.translate_cursor(queue.cursor_at(sequence), source=queue, target=target)
            assert there.next == 3 * sequence
            assert sl.bulk.translate_cursor(there, source=queue, target=target).next == sequence


def test_batches_that_the_queue_s_consumer_took_before_are_skipped_only_if_that_is_said(queue):
    target = MemoryLog()
    filled(queue, 0, 2)
    sl.ingest(queue, target)
    filled(queue, 2, 3)
    queue.slots.reset("queue", 4)
    with pytest.raises(CursorExpired, match="--skip-trimmed"):
        sl.ingest(queue, target)
    assert sl.ingest(queue, target, skip_trimmed=True).records == 3
    assert content(target).column("value").to_pylist()[6:] == [b"0 of 4", b"1 of 4", b"2 of 4"]


def test_an_ingest_with_the_queue_s_own_slot_takes_what_is_durable_out_of_the_queue(queue):
    target = MemoryLog()
    filled(queue, 0, 3)
    assert sl.ingest(queue, target, slot="queue").records == 9
    assert (queue.bounds().first, queue.bounds().count) == (3, 0)
    filled(queue, 3, 1)
    assert sl.ingest(queue, target, slot="queue").records == 3
    assert target.bounds().next == 12


def test_a_large_queue_is_ingested_in_parallel_as_one_process_would(queue: QueueLog) -> None:
    filled(queue, 0, 12)
    alone, together = open_log(PlainStore(), create=True), open_log(PlainStore(), create=True)
    sl.ingest(queue, alone)
    done = sl.bulk.ingest(queue, together, pool=sl.bulk.ThreadPool(2))
    assert done.records == alone.bounds().next
    assert [batch.to_pylist() for batch in together.read()] == [batch.to_pylist() for batch in alone.read()]
    filled(queue, 12, 3)
    assert sl.ingest(queue, together).records == sl.ingest(queue, alone).records > 0


@pytest.mark.parametrize("ingest", [sl.ingest, sl.bulk.ingest])
def test_a_log_into_which_a_queue_was_upgraded_refuses_its_ingest_and_the_other_way_round(queue, ingest):
    filled(queue, 0, 2)
    upgraded, ingested = open_log(PlainStore(), create=True), open_log(PlainStore(), create=True)
    upgrade(queue, upgraded)
    with pytest.raises(InvalidInput, match="through batch 1 by an upgrade, and would hold its records twice"):
        ingest(queue, upgraded)
    ingest(queue, ingested)
    with pytest.raises(InvalidInput, match="by an ingest, which would be there twice"):
        upgrade(queue, ingested)
    filled(queue, 2, 1)
    assert ingest(queue, ingested).records == upgrade(queue, upgraded).records == 3
    assert content(ingested)["value"].to_pylist() == content(upgraded)["value"].to_pylist()


def test_a_queue_with_more_batches_than_one_commit_lists_is_ingested_in_parallel(queue, monkeypatch):
    for module in ("strandline.bulk.ingesting", "strandline.log.object.staging"):
        monkeypatch.setattr(f"{module}.MOST_BATCHES", 4)
    filled(queue, 0, 10)
    alone, together = open_log(PlainStore(), create=True), open_log(PlainStore(), create=True)
    assert sl.ingest(queue, alone).records == sl.bulk.ingest(queue, together).records == 30
    assert content(together).equals(content(alone))


@pytest.mark.parametrize("copies", ["ingest", "upgrade"])
@pytest.mark.parametrize("again", ["ingest", "upgrade"])
def test_a_queue_is_not_copied_again_by_another_address(tmp_path, copies, again):
    (tmp_path / "queue").mkdir()
    (tmp_path / "link").symlink_to("queue")
    by_name, by_link = (sl.open(tmp_path / name, create=True, format="queue-v1") for name in ("queue", "link"))
    filled(by_name, 0, 3)
    target = open_log(tmp_path / "log", create=True)
    call = {"ingest": sl.ingest, "upgrade": upgrade}
    call[copies](by_name, target)
    with pytest.raises(InvalidInput, match="before batch 3, copied from another address"):
        call[again](by_link, target)
    filled(by_name, 3, 2)
    with pytest.raises(InvalidInput, match="before batch 3, copied from another address"):
        call[again](by_link, target)
    assert target.bounds().next == 9
    call[copies](by_name, target)
    assert target.bounds().next == 15


def test_two_queues_with_the_same_values_are_two_queues(tmp_path):
    target = open_log(tmp_path / "log", create=True)
    for name in ("one", "two"):
        queue = sl.open(tmp_path / name, create=True, format="queue-v1")
        filled(queue, 0, 3)
        assert sl.ingest(queue, target).records == 9


def test_a_queue_that_was_created_again_with_the_same_records_is_another_history(tmp_path):
    target, place = MemoryLog(), tmp_path / "queue"
    queue = sl.open(place, create=True, format="queue-v1", env=Env(clock=ManualClock()))
    filled(queue, 0, 2)
    sl.ingest(queue, target)
    shutil.rmtree(place)
    queue = sl.open(place, create=True, format="queue-v1", env=Env(clock=ManualClock()))
    filled(queue, 0, 3)
    assert last_record(queue, 2).equals(last_record(target, 6))
    with pytest.raises(Diverged, match=r"^The source has another history"):
        sl.ingest(queue, target)


def test_a_skip_without_a_record_behind_it_is_said_to_be_not_stored(queue, caplog):
    target = MemoryLog()
    filled(queue, 0, 2)
    sl.ingest(queue, target)
    filled(queue, 2, 2)
    queue.slots.reset("queue", 4)
    assert sl.ingest(queue, target, skip_trimmed=True).records == 0
    assert "stores the position 4 with the next record" in caplog.text
    with pytest.raises(CursorExpired, match="--skip-trimmed"):
        sl.ingest(queue, target)
    filled(queue, 4, 1)
    assert sl.ingest(queue, target, skip_trimmed=True).records == 3
    assert sl.ingest(queue, target).records == 0
