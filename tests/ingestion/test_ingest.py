"""Ingests of one log into another: exactly once, from the position that the target remembers."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import pairwise
from uuid import UUID

import pyarrow as pa
import pytest

import strandline as sl
from strandline.bulk import ingesting
from strandline.bulk.verifying import verify as verify_log
from strandline.errors import (
    CursorExpired,
    Diverged,
    InvalidInput,
    LogFailed,
    NotReady,
    OutOfOrder,
    SchemaRefused,
    TransientStorageError,
)
from strandline.followers.run import Batching
from strandline.ingestion.log_sink import LogSink, pieces_of
from strandline.ingestion.run import IngestProgress, WriteBehind
from strandline.log.memory import MemoryLog
from strandline.log.object.head.edits import SPILL_AT
from strandline.log.object.log import open_log
from strandline.log.wal.log import WalLog
from strandline.log.wal.recover.rewind import rewind
from strandline.log.writers.numbered import MAX_SOURCES, MAX_WRITERS
from strandline.log.writers.source import advancing, source_writer
from strandline.model.cursor import Bounds
from strandline.model.head import Head, Receipt, WriterId
from strandline.model.records import record_batch
from strandline.storage.env import Env
from strandline.storage.task_pool import ThreadPool
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.plain import PlainStore
from tests.ingestion.sources import a_log, append, changes, content, fill, position

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
    with pytest.raises(CursorExpired, match="from 'retained'"):
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
        append(restored, changes(25, 1000 + number * 25), writer=8, number=number)
    with pytest.raises(Diverged, match=r"^The source has another history than the one that .* holds of it"):
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
    limits = sl.followers.Batching(records=50)
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
    with pytest.raises(
        InvalidInput, match=f"remembers the positions of {MAX_SOURCES} sources.*under a name that it knows"
    ):
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
    sl.ingest(source, target, on_progress=told.append, batching=sl.followers.Batching(records=50))
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


def test_a_log_with_ingested_records_is_found_whole(tmp_path):
    source = MemoryLog()
    object_log = sl.open(tmp_path / "log", create=True)
    with WalLog.open(tmp_path / "wal") as wal:
        for number in range(70):  # so many frames have an entry in the index
            append(source, changes(1, number), number=number)
        sl.ingest(source, wal, batching=sl.followers.Batching(records=1))
        assert (wal.verify().findings, wal.append_at(69).first) == ([], 69)
    for number in range(70, 73):
        append(source, changes(1, number), number=number)
        append(object_log, changes(3), writer=8, number=number - 70)
        sl.ingest(source, object_log)
    assert not verify_log(object_log).findings


@pytest.mark.parametrize("kind", ["memory", "wal", "object", pytest.param("remote", marks=pytest.mark.matrix)])
def test_an_append_from_a_source_that_is_repeated_is_answered_as_the_first_time(tmp_path, kind):
    with a_log(kind, tmp_path / "log") as log:
        append(log, changes(2))
        writer = source_writer("orders")
        first = log.append(changes(5), writer=advancing(writer, 5), number=10).result()
        assert (first.first, first.count) == (2, 5)
        assert log.append(changes(5), writer=advancing(writer, 5), number=10).result() == first
        second = log.append(changes(3), writer=advancing(writer, 8), number=15).result()
        assert (second.first, log.last_append(writer).number) == (7, 23)
        log.append(changes(5), writer=advancing(writer, 5), number=10).result()
        for number in (14, 22, 24):
            with pytest.raises(OutOfOrder):
                log.append(changes(2), writer=advancing(writer, 12), number=number).result()
        assert log.bounds().next == 10


def test_a_repeated_append_is_answered_as_the_first_time_after_its_entry_has_left_the_head():
    log = open_log(PlainStore(), create=True, env=Env(clock=ManualClock(), chance=SeededChance(1)))
    append(log, changes(2))
    writer = advancing(source_writer("orders"), 5)
    first = log.append(changes(5), writer=writer, number=10).result()
    for number in range(SPILL_AT + 2):
        append(log, changes(1), writer=8, number=number)
    assert all(entry.writer != writer for entry in log.head().tail)
    assert log.append(changes(5), writer=writer, number=10).result() == first == Receipt(2, 5)


def test_compressed_batches_are_read_in_pieces_that_fit_into_memory():
    source, target = MemoryLog(), MemoryLog()
    rows = 2000
    for number in range(60):
        values = [bytes(1000)] * rows
        batch = record_batch(timestamps=[1] * rows, ops=[0] * rows, keys=[None] * rows, values=values)
        append(source, batch, number=number)
    # As stored, they are small.
    source._head = replace(source._head, tail=tuple(replace(entry, size=50) for entry in source._head.tail))
    planned = []

    class Watched(Undecided):
        def plan(self, since, limit):
            spans = self._log.plan(since, limit)
            planned.append(sum(span.next - span.first for span in spans) * 1000)
            return spans

    sl.ingest(Watched(source), target, batching=sl.followers.Batching(bytes=8 << 20))
    assert target.bounds().next == 60 * rows
    assert max(planned) <= 8 << 20
    assert len(planned) < 60


def test_an_ingest_waits_until_the_last_append_in_a_node_is_committed_and_says_so_if_it_is_not():
    source, target, clock = MemoryLog(), MemoryLog(), ManualClock()
    fill(source, batches=1)
    sl.ingest(source, target)

    class Uncommitted(Undecided):
        looks = 0

        def bounds(self):
            self.looks += 1
            return Bounds(0, 25 if self.looks > late else 10)

    late = 3
    node = Uncommitted(target)
    assert LogSink(node, env=Env(clock=clock)).cursor(source.log_id).next == 25
    assert node.looks == 4
    late = 1_000_000
    with pytest.raises(NotReady, match="has not committed its records up to offset 25"):
        LogSink(node, env=Env(clock=clock)).cursor(source.log_id)


def test_the_position_goes_back_with_a_rewound_target(tmp_path):
    source = MemoryLog()
    fill(source)
    with WalLog.open(tmp_path / "wal") as target:
        sl.ingest(source, target, batching=sl.followers.Batching(records=25))
        assert position(source, target) == 100
    rewind(str(tmp_path / "wal"), 50, quarantine=str(tmp_path / "aside"))
    with WalLog.open(tmp_path / "wal") as target:
        assert position(source, target) == 50
        assert sl.ingest(source, target).records == 50
        assert content(target).equals(content(source))


def test_few_large_records_among_many_small_ones_are_appended_in_parts_that_fit():
    rows = [b"small"] * 400 + [bytes(1000)] * 3 + [b"small"] * 400
    batch = record_batch(timestamps=[1] * 803, ops=[0] * 803, keys=[None] * 803, values=rows)
    source = MemoryLog()
    append(source, batch)
    pieces = list(pieces_of(table(source, 0, 803).to_batches(), 803, most=1500))
    assert sum(piece.num_rows for piece, _ in pieces) == 803
    assert max(piece.nbytes for piece, _ in pieces if piece.num_rows > 1) <= 1500
    positions = [0, *(behind for _, behind in pieces)]
    assert [later - before for before, later in pairwise(positions)] == [piece.num_rows for piece, _ in pieces]


def test_an_interrupted_ingest_does_not_try_an_unreachable_target_again():
    tried, again, interrupted = [], threading.Event(), threading.Event()

    class Unreachable(Undecided):
        def append(self, batch, *, writer, number, expect=None):
            tried.append(number)
            if len(tried) == 2:
                again.set()
                interrupted.wait(10)
            raise TransientStorageError("no answer")

    sink = LogSink(Unreachable(MemoryLog()), env=Env(clock=ManualClock()))
    source = MemoryLog()
    fill(source, batches=1)
    behind = WriteBehind(sink, 1000, lambda _: None)
    gives_up = sink.give_up

    def give_up():
        gives_up()
        interrupted.set()

    sink.give_up = give_up
    behind._pool.submit(sink.apply, table(source, 0, 25), since=source.start(), upto=source.start().at(25))
    assert again.wait(30)
    behind.__exit__(KeyboardInterrupt, None, None)
    assert len(tried) == 2


class Undecided:
    """A log whose appends are begun, and never become durable."""

    def __init__(self, log):
        self._log = log

    def __getattr__(self, name):
        return getattr(self._log, name)

    def append(self, batch, *, writer, number, expect=None):
        if number < 50:
            return self._log.append(batch, writer=writer, number=number, expect=expect)
        return Lost()


class Lost:
    def done(self):
        return False

    def result(self, timeout=None):
        raise LogFailed("it could not write")


def test_neither_the_slot_nor_the_progress_moves_before_the_append_is_durable():
    source, target, told = MemoryLog(), MemoryLog(), []
    fill(source)
    limits = sl.followers.Batching(records=25)
    with pytest.raises(LogFailed):
        sl.ingest(
            source, Undecided(target), slot="copy", batching=limits, on_progress=lambda done: told.append(done.next)
        )
    assert (told, source.slots.get("copy").position, target.bounds().next) == ([25, 50], 50, 50)
    sl.ingest(source, target, slot="copy")
    assert content(target).equals(content(source))
    assert source.slots.get("copy").position == 100


def test_values_of_another_format_are_refused_before_anything_is_appended():
    source = MemoryLog(value=sl.values.Json(pa.schema({"id": pa.int64()})))
    with source.producer() as producer:
        producer.append(value={"id": 1})
    target = MemoryLog(value=sl.values.MessagePack(pa.schema({"id": pa.int64()})))
    with pytest.raises(SchemaRefused, match="cannot decode the values of the source"):
        sl.ingest(source, target)
    assert target.bounds().next == 0
    assert sl.ingest(source, MemoryLog()).records == 1
    assert sl.ingest(source, MemoryLog(value=source.value)).records == 1
    plain = MemoryLog()
    fill(plain, 3)
    assert sl.ingest(plain, target).records == 75


@pytest.mark.parametrize("kind", ["memory", "object", "wal"])
@pytest.mark.parametrize("is_parallel", [False, True], ids=["one", "parallel"])
def test_a_new_copy_of_a_typed_log_has_its_format_in_all_versions(tmp_path, kind, is_parallel):
    if is_parallel and kind != "object":
        return
    source = sl.open(f"{tmp_path}/source", create=True, value=sl.values.Json(pa.schema({"id": pa.int32()})))
    with source.producer() as producer:
        producer.append(value={"id": 1})
    source.evolve_value(sl.values.Json(pa.schema({"id": pa.int64()})))
    url = {"memory": f"memory://copy-{tmp_path.name}", "object": f"{tmp_path}/copy", "wal": f"wal://{tmp_path}/copy"}
    target = sl.open(url[kind], create=True)
    copy = sl.bulk.ingest if is_parallel else sl.ingest
    assert copy(source, target).records == 1
    assert [one.schema for one in target.value_versions] == [one.schema for one in source.value_versions]
    source.evolve_value(sl.values.Json(pa.schema({"id": pa.int64(), "city": pa.string()})))
    with source.producer() as producer:
        producer.append(value={"id": 2, "city": "Oslo"})
    assert copy(source, target).records == 1
    assert target.value == source.value
    assert len(target.value_versions) == 3
    target.close()


@pytest.mark.parametrize("is_parallel", [False, True], ids=["one", "parallel"])
def test_a_format_that_evolves_during_an_ingest_is_recorded_before_its_values(tmp_path, monkeypatch, is_parallel):
    monkeypatch.setattr(ingesting, "TASK_BYTES", 1)
    monkeypatch.setattr(ingesting, "WAVE", 1)
    source = sl.open(f"{tmp_path}/source", create=True, value=sl.values.Json(pa.schema({"id": pa.int32()})))
    target = sl.open(f"{tmp_path}/copy", create=True)
    newer = sl.values.Json(pa.schema({"id": pa.int32(), "city": pa.string()}))
    for number in range(6):
        with source.producer() as producer:
            producer.append(value={"id": number})
    evolved = []

    def evolve(progress):
        if progress.next < 6 and not evolved:
            evolved.append(source.evolve_value(newer))
        assert len(target.value_versions) == 1 or evolved

    if is_parallel:
        sl.bulk.ingest(source, target, pool=ThreadPool(1), on_progress=evolve)
    else:
        sl.ingest(source, target, batching=Batching(records=1), on_progress=evolve)
    assert evolved
    assert [one.schema for one in target.value_versions] == [one.schema for one in source.value_versions]


def test_a_format_that_evolves_while_an_ingest_follows_is_recorded_then(tmp_path):
    source = sl.open(f"{tmp_path}/source", create=True, value=sl.values.Json(pa.schema({"id": pa.int32()})))
    target = sl.open(f"{tmp_path}/copy", create=True)
    stop = threading.Event()
    with source.producer() as producer:
        producer.append(value={"id": 0})
    running = threading.Thread(target=sl.ingest, args=(source, target), kwargs={"follow": True, "stop": stop})
    running.start()
    try:
        assert target.wait(target.cursor_at(0), 30)
        source.evolve_value(sl.values.Json(pa.schema({"id": pa.int32(), "city": pa.string()})))
        with source.producer() as producer:
            producer.append(value={"id": 1, "city": "Oslo"})
        assert target.wait(target.cursor_at(1), 30)
        assert target.value == source.value, "before its first value is there"
    finally:
        stop.set()
        running.join()


def test_a_log_of_plain_bytes_that_has_records_stays_one(tmp_path):
    source = MemoryLog(value=sl.values.Json(pa.schema({"id": pa.int64()})))
    with source.producer() as producer:
        producer.append(value={"id": 1})
    target = MemoryLog()
    fill(target, 1)
    assert sl.ingest(source, target).records == 1
    assert target.value is None


def test_a_format_of_a_newer_release_is_not_taken_over(monkeypatch, caplog):
    source, target = MemoryLog(value=sl.values.Json(pa.schema({"id": pa.int64()}))), MemoryLog()
    with source.producer() as producer:
        producer.append(value={"id": 1})
    unknown = [replace(one, format="cbor") for one in source.value_versions]
    monkeypatch.setattr(source, "_values", tuple(unknown))
    assert sl.ingest(source, target).records == 1
    assert target.value is None
    assert "does not get the value format" in caplog.text
