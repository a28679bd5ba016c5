"""Ingests of one log into another: exactly once, from the position that the target remembers."""

from __future__ import annotations

import threading
from uuid import UUID

import pyarrow as pa
import pytest

import strandline as sl
from strandline.errors import CursorExpired, Diverged, InvalidInput, OutOfOrder
from strandline.ingestion.log_sink import LogSink
from strandline.ingestion.run import IngestProgress
from strandline.log.memory import MemoryLog
from strandline.log.source_writers import advancing, source_writer
from strandline.log.wal.log import WalLog
from strandline.log.writers import MAX_SOURCES, MAX_WRITERS
from strandline.model.head import Head, WriterId
from tests.ingest.parts import a_log, append, changes, content, fill, position

PAIRS = [
    pytest.param("object", "wal"),
    *(
        pytest.param(source, target, marks=pytest.mark.matrix)
        for source, target in [
            ("memory", "memory"),
            ("wal", "object"),
            ("wal", "wal"),
            ("object", "remote"),
            ("object", "node"),
            ("remote", "object"),
            ("node", "wal"),
            ("remote", "remote"),
            ("object", "object"),
        ]
    ),
]


@pytest.mark.parametrize(("source_kind", "target_kind"), PAIRS)
def test_every_record_of_the_source_is_in_the_target_as_it_was_once_and_in_order(tmp_path, source_kind, target_kind):
    with a_log(source_kind, tmp_path / "source") as source, a_log(target_kind, tmp_path / "target") as target:
        fill(source)
        done = sl.ingest(source, target)
        assert (done.records, done.source.next, done.target.next) == (100, 100, 100)
        assert content(target).equals(content(source))
        assert sl.ingest(source, target).records == 0
        append(source, changes(10, 100), number=4)
        assert sl.ingest(source, target).records == 10
        assert content(target).equals(content(source))


def test_the_position_is_known_again_after_the_target_was_opened_again(tmp_path):
    source = MemoryLog()
    fill(source)
    for _ in range(3):
        with WalLog.open(tmp_path / "wal") as target:
            sl.ingest(source, target)
            assert target.bounds().next == 100
            assert position(source, target) == 100


def test_addresses_are_opened_and_targets_are_made(tmp_path):
    with sl.open(tmp_path / "source", create=True) as source:
        fill(source)
    done = sl.ingest(f"file://{tmp_path}/source", f"wal://{tmp_path}/wal")
    assert done.records == 100
    back = sl.ingest(f"wal://{tmp_path}/wal", tmp_path / "copy")
    assert back.records == 100
    assert content(sl.open(tmp_path / "copy")).equals(content(source))


def test_a_target_that_trimmed_every_record_still_knows_its_position(tmp_path):
    source = MemoryLog()
    fill(source)
    with WalLog.open(tmp_path / "wal", roll_bytes=4096) as target:
        sl.ingest(source, target)
        target.trim(100)
    append(source, changes(5, 100), number=4)
    with WalLog.open(tmp_path / "wal") as target:
        assert target.bounds().count == 0
        assert sl.ingest(source, target).records == 5
        assert content(target).equals(content(source, 100))


def test_records_of_other_writers_stay_between_those_of_the_source(tmp_path):
    source = MemoryLog()
    with WalLog.open(tmp_path / "wal") as target:
        for number in range(4):
            append(source, changes(25, number * 25), number=number)
            append(target, changes(1, 10_000 + number), writer=8, number=number)
            sl.ingest(source, target)
        assert target.bounds().next == 104
        assert position(source, target) == 100
        own = [batch for batch in target.read() if batch.num_rows > 1]
        assert [batch.column("timestamp")[0].value % 1000 for batch in own] == [0, 25, 50, 75]


def test_a_source_trimmed_behind_its_target_is_refused_until_the_loss_is_accepted():
    source, target = MemoryLog(), MemoryLog()
    fill(source, batches=2)
    sl.ingest(source, target)
    fill_more(source, 2, 4)
    source.trim(75)
    with pytest.raises(CursorExpired, match=r"^The source begins at offset 75, .* holds it up to 50: the 25 offsets"):
        sl.ingest(source, target)
    assert target.bounds().next == 50
    done = sl.ingest(source, target, skip_trimmed=True)
    assert (done.records, position(source, target)) == (25, 100)
    assert content(target, 50).equals(content(source, 75))
    assert sl.ingest(source, target).records == 0


def fill_more(log, since, upto):
    for number in range(since, upto):
        append(log, changes(25, number * 25), number=number)


def test_a_source_whose_beginning_was_trimmed_is_ingested_from_what_is_retained_only_if_asked():
    source, target = MemoryLog(), MemoryLog()
    fill(source)
    source.trim(50)
    with pytest.raises(CursorExpired, match="start='retained'"):
        sl.ingest(source, target)
    assert sl.ingest(source, target, start="retained").records == 50
    assert position(source, target) == 100


def test_a_source_that_ends_before_the_ingested_records_is_another_history():
    source, target = MemoryLog(), MemoryLog()
    fill(source)
    sl.ingest(source, target)
    restored = MemoryLog()
    restored._head = Head(source.log_id)
    fill(restored, batches=1)
    with pytest.raises(Diverged, match=r"^The source ends at offset 25, and .* holds it up to 100"):
        sl.ingest(restored, target)


def test_a_restored_source_that_has_grown_differently_is_another_history():
    source, target = MemoryLog(), MemoryLog()
    fill(source)
    sl.ingest(source, target)
    restored = MemoryLog()
    restored._head = Head(source.log_id)
    for number in range(5):
        append(restored, changes(25, 1000 + number * 25), number=number)
    with pytest.raises(Diverged, match=r"^The last record that .* holds of the source is not the one at offset 99"):
        sl.ingest(restored, target)
    assert target.bounds().next == 100


def test_of_two_ingests_of_one_source_the_slower_one_is_refused_and_nothing_is_doubled(tmp_path):
    source = MemoryLog()
    fill(source)
    with WalLog.open(tmp_path / "wal") as target:
        one, other = LogSink(target), LogSink(target)
        assert one.cursor(source.log_id) is None
        assert other.cursor(source.log_id) is None
        since = source.start()
        one.apply(table(source, 0, 40), since=since, upto=since.at(40))
        with pytest.raises(OutOfOrder, match="the log has all of it below 40: another ingest"):
            other.apply(table(source, 0, 60), since=since, upto=since.at(60))
        other.apply(table(source, 0, 40), since=since, upto=since.at(40))  # the same again changes nothing
        assert target.bounds().next == 40
        sl.ingest(source, target)
        assert content(target).equals(content(source))


def test_a_target_that_lost_its_end_is_refused_what_follows_the_lost_records():
    source, target = MemoryLog(), MemoryLog()
    fill(source)
    sink = LogSink(target)
    since = source.start()
    sink.apply(table(source, 0, 40), since=since, upto=since.at(40))
    before = target._head
    sink.apply(table(source, 40, 50), since=since.at(40), upto=since.at(50))
    target._head = before  # as after a forced promotion, or a restore from a backup
    with pytest.raises(OutOfOrder, match="or the log lost its end"):
        sink.apply(table(source, 50, 60), since=since.at(50), upto=since.at(60))
    sl.ingest(source, target)
    assert content(target).equals(content(source))


def table(log, since, upto):
    return pa.Table.from_batches(list(log.read(since, upto=upto)))


def test_ingests_that_race_double_and_lose_nothing(tmp_path):
    source = MemoryLog()
    fill(source, batches=40)
    limits = sl.Batching(records=50)
    with WalLog.open(tmp_path / "wal") as target:
        outcomes = []

        def run():
            try:
                outcomes.append(sl.ingest(source, target, batching=limits).records)
            except OutOfOrder as error:
                outcomes.append(error)

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(outcomes) == 4
        sl.ingest(source, target)
        assert content(target).equals(content(source))


def test_a_source_is_remembered_whatever_number_of_other_writers_comes_after_it(tmp_path):
    source, late = MemoryLog(), MemoryLog()
    fill(source, batches=1)
    fill(late, batches=1)
    with WalLog.open(tmp_path / "wal") as wal:
        for target in (wal, MemoryLog()):
            sl.ingest(source, target)
            for writer in range(MAX_WRITERS + 3):
                append(target, changes(1), writer=1000 + writer)
            assert position(source, target) == 25
            assert sl.ingest(source, target).records == 0
            assert sl.ingest(late, target).records == 25


def test_a_log_remembers_so_many_sources_and_refuses_another_one():
    target = MemoryLog()
    for number in range(MAX_SOURCES):
        writer = advancing(source_writer(f"source {number}"), 1)
        target.append(changes(1), writer=writer, number=5).result()
    source = MemoryLog()
    fill(source, batches=1)
    with pytest.raises(InvalidInput, match=f"remembers the positions of {MAX_SOURCES} sources"):
        LogSink(target).apply(table(source, 0, 5), since=source.start(), upto=source.start().at(5))


@pytest.mark.parametrize("kind", ["memory", "wal", "object"])
def test_an_append_from_a_source_that_advances_nothing_or_too_far_is_refused(tmp_path, kind):
    with a_log(kind, tmp_path / "log") as log:
        for writer, number in ((source_writer("a"), 0), (advancing(source_writer("a"), 9), (1 << 63) - 5)):
            with pytest.raises(InvalidInput, match="the id of its writer holds the advance"):
                log.append(changes(1), writer=writer, number=number).result()
        assert log.bounds().next == 0


def test_a_log_is_not_ingested_into_itself():
    log = MemoryLog()
    with pytest.raises(InvalidInput, match="into itself"):
        sl.ingest(log, log)


def test_what_cannot_be_appended_to_or_read_is_refused_in_one_sentence(tmp_path):
    log = MemoryLog()
    with WalLog.open(tmp_path / "wal"), pytest.raises(InvalidInput, match="cannot be the target of an ingest"):
        sl.ingest(log, sl.open(f"wal://{tmp_path}/wal", read_only=True))


def test_an_empty_source_leaves_the_target_as_it_is():
    source, target = MemoryLog(), MemoryLog()
    done = sl.ingest(source, target)
    assert (done.records, done.target, target.bounds().next) == (0, None, 0)


def test_the_progress_is_told_after_each_append():
    source, target = MemoryLog(), MemoryLog()
    fill(source)
    told: list[IngestProgress] = []
    sl.ingest(source, target, on_progress=told.append, batching=sl.Batching(records=50))
    assert told[-1] == IngestProgress(100, 100, 100)
    assert [progress.next for progress in told] == [50, 100]


def test_following_goes_on_until_it_is_stopped_and_its_slot_moves_with_the_target(tmp_path):
    source, stop = MemoryLog(), threading.Event()
    fill(source, batches=2)
    with WalLog.open(tmp_path / "wal") as target:
        thread = threading.Thread(target=lambda: sl.ingest(source, target, follow=True, stop=stop))
        thread.start()
        target.wait(sl.Cursor(target.log_id, 49), 30)
        fill_more(source, 2, 4)
        assert target.wait(sl.Cursor(target.log_id, 99), 30)
        stop.set()
        thread.join(30)
        assert not thread.is_alive()
        (slot,) = source.slots.list()
        assert (slot.name, slot.position) == (f"ingest-{target.log_id}", 100)


def test_a_source_is_pinned_while_it_is_read_and_not_afterwards():
    source, target = MemoryLog(), MemoryLog()
    fill(source, batches=2)
    sl.ingest(source, target)
    fill_more(source, 2, 4)
    seen = []
    sl.ingest(source, target, on_progress=lambda _: seen.append([slot.position for slot in source.slots.list()]))
    assert seen == [[50]]
    assert source.slots.list() == []


def test_a_numbered_writer_with_a_random_id_is_none_of_a_source():
    log = MemoryLog()
    for number in range(3):
        log.append(changes(1), writer=WriterId(UUID(int=9)), number=number).result()
    assert log.last_append(WriterId(UUID(int=9))).number == 2
