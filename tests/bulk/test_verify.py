"""Verification of a whole log: damage to real bytes is found in either tier, and moves are no damage."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

import strandline as sl
from strandline.bulk.span_checks import CheckTask
from strandline.errors import CorruptData, CursorExpired, NotFound, NotReady
from strandline.log.findings import FindingKind, Severity
from strandline.log.object import ObjectLog
from strandline.log.object.log import open_log
from strandline.log.read.span_tasks import spans_between
from strandline.model.cursor import Bounds, Limit
from strandline.model.head import WriterId
from strandline.model.records import READ_SCHEMA, record_batch
from strandline.model.segments import COLD_FILE, SegmentState, SegmentUpdate
from strandline.tables.files.layout import HashRange, file_name
from strandline.tables.rows.hashing import key_hashes
from strandline.testing.plain import PlainStore
from strandline.tier.copy.segment_files import forget_tails, segment_path
from tests.bulk.test_export import Interrupted
from tests.tier.read.tiered_logs import Kind, Tiers, value_at

TIERS = ("object", "wal")


@pytest.fixture
def log(tmp_path: Path) -> ObjectLog:
    """Twelve batches of ten records."""
    return grown(sl.open(f"file://{tmp_path}/log", create=True), 120)


def grown(log: Any, count: int, tag: bytes = b"") -> Any:
    first = log.bounds().next
    with log.producer(linger=0) as producer:
        for number in range(first, first + count):
            producer.append(key=b"k%d" % (number % 17), value=b"%sv%d" % (tag, number))
            if number % 10 == 9:
                producer.flush()
    return log


@pytest.fixture(params=TIERS)
def tiers(request: pytest.FixtureRequest) -> Iterator[Tiers]:
    """A log whose first part is in both tiers, some of it only in the cold one."""
    kind: Kind = request.param
    both = Tiers(kind)
    for _ in range(12):
        both.append(4)
    both.tier()
    for _ in range(3):
        both.append(4)
    yield both
    forget_tails()


def kinds(audit: sl.bulk.Verification) -> list[FindingKind]:
    return [finding.kind for finding in audit.damage]


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_a_healthy_log_is_clean_and_every_record_is_read(log: ObjectLog) -> None:
    told: list[tuple[int, int]] = []
    audit = sl.bulk.verify(log, on_progress=lambda done, total: told.append((done, total)))
    assert audit.is_clean
    assert audit.examined["records"] == 120
    assert (audit.bounds, told[-1]) == (Bounds(0, 120), (120, 120))
    part = sl.bulk.verify(log, since=15, upto=33)
    assert (part.bounds.first, part.bounds.next, part.examined["records"]) == (15, 33, 18)


def test_an_empty_log_is_clean(tmp_path: Path) -> None:
    audit = sl.bulk.verify(sl.open(f"file://{tmp_path}/log", create=True))
    assert (audit.is_clean, audit.examined["records"]) == (True, 0)


@pytest.mark.parametrize("at", [8, -40, -9])
def test_a_flipped_bit_in_a_batch_is_found_and_the_rest_is_read(log: ObjectLog, tmp_path: Path, at: int) -> None:
    path = tmp_path / "log" / log.head().tail[3].location
    data = path.read_bytes()
    path.write_bytes(flipped(data, at % len(data)))
    audit = sl.bulk.verify(log)
    assert kinds(audit) == [FindingKind.BATCH]
    assert audit.examined["records"] == 110
    assert audit.damage[0].offsets == (30, 40)


def test_a_missing_batch_and_one_in_the_place_of_another_are_found(log: ObjectLog, tmp_path: Path) -> None:
    tail = log.head().tail
    (tmp_path / "log" / tail[3].location).unlink()
    shutil.copy(tmp_path / "log" / tail[7].location, tmp_path / "log" / tail[8].location)
    audit = sl.bulk.verify(log)
    assert kinds(audit) == [FindingKind.BATCH] * 2
    places = [(one.where, one.offsets) for one in audit.damage]
    assert places == [(tail[3].location, (30, 40)), (tail[8].location, (80, 90))]
    assert "30 to 39" in audit.damage[0].message


def test_quick_reads_no_batch_and_finds_a_missing_one(log: ObjectLog, tmp_path: Path) -> None:
    (tmp_path / "log" / log.head().tail[3].location).unlink()
    audit = sl.bulk.verify(log, quick=True)
    assert (kinds(audit), audit.examined["records"]) == ([FindingKind.BATCH], 120)
    assert "is missing" in audit.damage[0].message


def test_a_damaged_head_is_a_finding(log: ObjectLog, tmp_path: Path) -> None:
    store = sl.followers.MemoryStore()
    sl.follow(log, store, upto="end")
    (tmp_path / "log" / "head").write_bytes(b"{")
    assert kinds(sl.bulk.verify(log, stores=[store])) == [FindingKind.HEAD]


def test_a_lost_chunk_of_the_listing_is_a_hole_and_what_follows_is_read() -> None:
    store = PlainStore()
    log = open_log(store, create=True)
    batch = record_batch(timestamps=[0], ops=[0], keys=[b"k"], values=[b"v"])
    writer = WriterId(UUID(int=1))
    for number in range(300):  # enough for chunks
        log.append(batch, writer=writer, number=number).result()
    chunks = sorted(item.path for item in store.list("chunks/") if "/00-" in item.path)
    assert len(chunks) > 1
    store.delete(chunks[0])
    audit = sl.bulk.verify(open_log(store))
    holes = [finding for finding in audit.damage if finding.kind is FindingKind.HOLE]
    assert len(holes) == 1
    assert holes[0].offsets is not None
    low, high = holes[0].offsets
    assert 0 <= low < high < 300
    assert f"Offsets {low} to {high - 1} are missing" in holes[0].message
    assert audit.examined["records"] == 300 - (high - low)
    with pytest.raises(CorruptData):
        open_log(store).plan(log.cursor_at(high - 1), Limit(batches=1))


@pytest.mark.matrix
def test_both_tiers_are_compared_where_both_have_records(tiers: Tiers) -> None:
    log = tiers.tiered()
    audit = sl.bulk.verify(log)
    assert audit.is_clean, audit.findings
    tiered = max(segment.end for segment in tiers.finished()) + 1
    assert audit.examined["compared"] == tiered
    tiers.trim(tiered // 2)
    start = tiers.hot().bounds().first
    assert start
    audit = sl.bulk.verify(log)
    assert audit.is_clean, audit.findings
    assert audit.examined["records"] == log.bounds().next
    assert audit.examined["compared"] == tiered - start


@pytest.mark.parametrize("is_trimmed", [False, True])
def test_a_damaged_segment_is_found_whether_the_log_still_has_its_records(tiers: Tiers, is_trimmed: bool) -> None:
    damaged = tiers.finished()[1]
    path = segment_path(damaged.segment, damaged.start)
    data = bytes(tiers.plain.get(path).data)
    log = tiers.tiered()
    if is_trimmed:
        tiers.trim(damaged.end + 1)
    tiers.plain.put(path, flipped(data, 40))
    forget_tails()
    audit = sl.bulk.verify(log)
    assert set(kinds(audit)) == {FindingKind.SEGMENT}
    assert {finding.where for finding in audit.damage} == {path}
    assert {finding.offsets for finding in audit.damage} <= {(damaged.start, damaged.end + 1)}
    tiers.plain.delete(path)
    forget_tails()
    audit = sl.bulk.verify(log)
    assert set(kinds(audit)) <= {FindingKind.SEGMENT, FindingKind.HOLE}
    assert kinds(audit)


@pytest.mark.matrix
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_cold_tier_that_cannot_be_read_is_a_finding_and_the_log_itself_is_read(tiers: Tiers, is_lost: bool) -> None:
    """The end of the last segment is needed to know whether the cold tier belongs to the log."""
    last = tiers.finished()[-1]
    path = segment_path(last.segment, last.start)
    tiers.trim(last.end + 1)
    log = tiers.tiered()
    if is_lost:
        tiers.plain.delete(path)
    else:
        tiers.plain.put(path, bytes(tiers.plain.get(path).data)[:40])
    forget_tails()
    audit = sl.bulk.verify(log)
    assert kinds(audit) == [FindingKind.SEGMENT]
    assert path in audit.damage[0].message
    assert audit.examined["records"] == len(tiers.truth) - last.end - 1


@pytest.mark.matrix
def test_a_damaged_slot_of_a_log_with_a_cold_tier_is_one_finding() -> None:
    tiers = Tiers("object", batches=12)
    tiers.tier()
    tiers.hot().slots.create("reader", 3)
    tiers.plain.put("slots/reader.json", b"{")
    audit = sl.bulk.verify(tiers.tiered())
    assert kinds(audit) == [FindingKind.SLOT]
    assert audit.examined["records"] == len(tiers.truth)
    forget_tails()


def test_a_log_that_lost_the_way_to_its_cold_tier_is_damaged() -> None:
    tiers = Tiers("object", batches=12)
    tiers.tierer(target=1).run_once(everything=True)
    tiers.trim()
    first = tiers.hot().bounds().first
    assert first > 0
    tiers.plain.delete(COLD_FILE)
    audit = sl.bulk.verify(open_log(tiers.plain))
    (damage,) = audit.damage
    assert damage.where == COLD_FILE
    assert f"below offset {first} cannot be read" in damage.message


def test_a_hole_between_segments_is_found_exactly_and_the_rest_is_read(tiers: Tiers) -> None:
    lost = tiers.finished()[1]
    tiers.trim(tiers.finished()[2].end + 1)
    assert tiers.hot().bounds().first > lost.end
    state = SegmentState.DELETE_STARTED
    tiers.manager().update(SegmentUpdate(segment=lost.segment, broker=0, event_timestamp=0, state=state))
    audit = sl.bulk.verify(tiers.tiered(), since=0)
    assert kinds(audit) == [FindingKind.HOLE]
    assert audit.damage[0].offsets == (lost.start, lost.end + 1)
    count = lost.end + 1 - lost.start
    assert audit.examined["records"] == len(tiers.truth) - count
    assert f"offsets {lost.start} to {lost.end} are lost" in audit.damage[0].message
    quick = sl.bulk.verify(tiers.tiered(), since=0, quick=True)
    assert set(kinds(quick)) == {FindingKind.HOLE}


@pytest.mark.matrix
def test_segments_with_other_values_than_the_log_are_found_with_both_sides(tiers: Tiers) -> None:
    backup = tiers.backup()
    for _ in range(3):
        tiers.append(4)
    tiers.tier()
    common, end = backup.end, len(tiers.truth)
    tiers.restore(backup)
    for _ in range(3):
        tiers.append(4)  # the same offsets, other values
    forget_tails()
    audit = sl.bulk.verify(tiers.tiered())
    (difference,) = (one for one in audit.damage if one.kind is FindingKind.DIFFERENCE)
    assert set(kinds(audit)) == {FindingKind.DIFFERENCE, FindingKind.HISTORY}
    assert difference.offsets == (common, end)
    message = difference.message
    assert f"At offset {common} the tiers differ in key, value" in message
    ours, theirs = (value_at(common, history)[:8].decode("latin-1") for history in (1, 0))
    assert ours[:3] in message
    assert theirs[:3] in message
    assert audit.examined["records"] == end


@pytest.mark.matrix
def test_records_that_move_to_the_cold_tier_during_a_verification_are_found_there(tiers: Tiers) -> None:
    tiers.tier()
    end = max(segment.end for segment in tiers.finished()) + 1
    log = tiers.tiered()
    audit = sl.bulk.verify(log, pool=Interrupted(0, lambda: tiers.trim(end)))
    assert audit.findings == []
    assert tiers.hot().bounds().first > 0
    assert audit.examined["records"] == len(tiers.truth)


def test_records_that_are_trimmed_during_a_verification_are_a_note(log: ObjectLog) -> None:
    def trim() -> None:
        log.set_retention("bytes:1")
        log.trim(grace=0)

    audit = sl.bulk.verify(log, pool=Interrupted(0, trim))
    assert audit.is_clean
    notes = [one.kind for one in audit.findings if one.severity is Severity.NOTE]
    assert notes
    assert set(notes) == {FindingKind.TRIM}


def test_records_that_were_trimmed_before_are_a_note_too(log: ObjectLog) -> None:
    log.set_retention("bytes:1")
    log.trim(grace=0)
    first = log.bounds().first
    assert first
    audit = sl.bulk.verify(log, since=0)
    assert audit.is_clean
    assert audit.examined["records"] == 120 - first
    assert f"Offsets 0 to {first - 1} were trimmed." in [one.message for one in audit.findings]


def test_a_task_that_gets_other_records_than_planned_says_so(log: ObjectLog) -> None:
    spans = log.plan(log.cursor_at(0))
    shifted = replace(spans[1], first=spans[1].first + 3)  # gives seven records
    assert CheckTask(0, 20, (spans[0], shifted))().problems == ()
    wrong = replace(spans[1], entry=replace(spans[1].entry, first=500))
    (problem,) = CheckTask(0, 20, (spans[0], wrong))().problems
    assert (problem.kind, problem.first, problem.next) == (FindingKind.CONTINUITY, 10, 20)


def test_only_what_two_records_differ_in_is_reported() -> None:
    values = [b"%d" % number for number in range(50)]
    rows = pa.table(
        {
            "offset": pa.arange(0, 50),
            "timestamp": pa.arange(0, 50).cast(pa.timestamp("us", tz="UTC")),
            "op": pa.array([0] * 50, pa.int8()),
            "key": pa.array([None] * 50, pa.binary()),
            "value": pa.array(values, pa.binary()),
            "headers": pa.array([[("h", b"1")]] * 50, pa.map_(pa.string(), pa.binary())),
        }
    ).cast(READ_SCHEMA)
    headers = pa.array([[("h", b"1" if row not in (7, 31) else b"2")] for row in range(50)], READ_SCHEMA.field(5).type)
    other = rows.set_column(5, READ_SCHEMA.field(5), headers)
    hot = (Fixed(0, 20, rows.slice(0, 20)), Fixed(20, 50, rows.slice(20)))
    cold = (Fixed(0, 5, other.slice(0, 5)), Fixed(5, 45, other.slice(5, 40)))
    report = CheckTask(0, 50, hot, cold)()
    assert (report.records, report.compared) == (50, 45)
    assert [(one.first, one.next) for one in report.problems] == [(7, 8), (31, 32)]
    assert "differ in headers" in report.problems[0].message


def test_a_record_that_neither_tier_can_read_is_a_problem_of_both() -> None:
    class Broken(Fixed):
        def fetch(self, columns: Any = None) -> list[pa.RecordBatch]:
            raise CorruptData("broken on purpose")

    class Trimmed(Fixed):
        def fetch(self, columns: Any = None) -> list[pa.RecordBatch]:
            raise CursorExpired("trimmed on purpose")

    empty = READ_SCHEMA.empty_table()
    (trimmed,) = CheckTask(0, 10, (Trimmed(0, 10, empty),))().problems
    assert trimmed.kind is FindingKind.TRIM
    report = CheckTask(0, 10, (Broken(0, 10, empty),), (Broken(0, 10, empty),))()
    assert [(one.kind, one.is_read) for one in report.problems] == [
        (FindingKind.BATCH, False),
        (FindingKind.BATCH, True),
    ]


@dataclass(frozen=True)
class Fixed:
    """A span of a table."""

    first: int
    next: int
    rows: pa.Table
    size: int = 100

    def fetch(self, columns: Any = None) -> list[pa.RecordBatch]:
        return self.rows.to_batches()


@pytest.mark.parametrize("mode", ["latest", "append", "history"])
def test_tables_are_compared_with_the_log_at_their_own_cursor(log: ObjectLog, tmp_path: Path, mode: Any) -> None:
    right, wrong = (sl.DeltaSink(tmp_path / name, mode=mode) for name in ("right", "wrong"))
    for sink in (right, wrong):
        sl.follow(log, sink, upto="end")
    grown(log, 20)
    audit = sl.bulk.verify(log, tables=[right, wrong])
    assert audit.is_clean, audit.findings
    assert audit.examined["rows"] > 0
    damage_file(tmp_path / "wrong")
    audit = sl.bulk.verify(log, tables=[right, wrong], pool=sl.bulk.ThreadPool(4))
    assert kinds(audit) == [FindingKind.TABLE]
    (damage,) = audit.damage
    assert (damage.where, damage.offsets) == (wrong.where, (0, 120))
    assert "1 rows are missing, 1 are too many" in damage.message


def damage_file(place: Path) -> None:
    """Change one value in a data file, as a bad disk would if Parquet had no checksums."""
    path = next(place.glob("*.parquet"))
    rows = pq.read_table(path)
    at = rows.schema.get_field_index("value")
    values = [b"other", *rows.column("value").to_pylist()[1:]]
    pq.write_table(rows.set_column(at, rows.schema.field(at), pa.array(values, rows.schema.field(at).type)), path)


@pytest.mark.parametrize(("place", "offset"), [(0, -5), (-1, 5000)])
def test_a_row_outside_of_the_offsets_of_a_table_is_an_extra_one(
    log: ObjectLog, tmp_path: Path, place: int, offset: int
) -> None:
    sink = sl.DeltaSink(tmp_path / "table", mode="append")
    sl.follow(log, sink, upto="end")
    path = next((tmp_path / "table").glob("*.parquet"))
    rows = pq.read_table(path)
    offsets = rows.column("offset").to_pylist()
    offsets[place] = offset
    at = rows.schema.get_field_index("offset")
    pq.write_table(rows.set_column(at, rows.schema.field(at), pa.array(offsets, pa.int64())), path)
    check = sl.tables.verify(sink, log, pool=sl.bulk.ThreadPool(3))
    assert (check.missing, check.extra) == (1, 1)


def test_a_row_in_a_file_of_other_keys_is_an_extra_one(log: ObjectLog, tmp_path: Path) -> None:
    sink = sl.DeltaSink(tmp_path / "table")
    sl.follow(log, sink, upto="end")
    (task,) = sink.comparison(120, 1)
    (path,) = task.paths
    rows = pq.read_table(tmp_path / "table" / path)
    name = file_name("keys", HashRange(1, 0), "7c1d" * 17)
    pq.write_table(rows, tmp_path / "table" / name)
    strays = int((~HashRange(1, 0).mask(key_hashes(rows.column("key")))).sum())
    assert 0 < strays < 17
    spans = spans_between(log, 0, 120)
    half = replace(task, paths=(name,), share=HashRange(1, 0), spans=spans)()
    assert (half.missing, half.extra) == (0, strays)
    assert "a file of other keys" in half.first[0]


def test_stores_are_compared_with_the_log_at_their_own_cursor(log: ObjectLog, tmp_path: Path) -> None:
    with (
        sl.followers.AppendLogStore.open(tmp_path / "right") as right,
        sl.followers.AppendLogStore.open(tmp_path / "wrong") as wrong,
    ):
        for store in (right, wrong):
            sl.follow(log, store, upto="end")
        grown(log, 20)
        assert sl.bulk.verify(log, stores=[right, wrong]).is_clean
        wrong.begin_resync(log.log_id)
        changed = record_batch(
            timestamps=[0] * 3, ops=[0, 1, 0], keys=[b"k1", b"k2", b"k99"], values=[b"other", None, b"more"]
        )
        wrong.resync(pa.Table.from_batches([changed]))
        wrong.end_resync(log.cursor_at(120))
        audit = sl.bulk.verify(log, stores=[right, wrong])
        assert kinds(audit) == [FindingKind.STORE]
        (finding,) = audit.damage
        assert "in 3 keys: 'k1': the log gives 'v" in finding.message
        assert "'k2': the log gives 'v" in finding.message
        assert "'k99': the log gives None, the store has 'more'" in finding.message
        assert (finding.where, finding.offsets) == (repr(wrong), (0, 120))
        with sl.followers.AppendLogStore.open(tmp_path / "new") as new, pytest.raises(NotReady):
            sl.bulk.verify(log, stores=[new])
        log.set_retention("bytes:1")
        log.trim(grace=0)
        audit = sl.bulk.verify(log, stores=[right])
        assert audit.is_clean
        assert "no longer has its first records" in audit.findings[0].message


def test_the_events_of_a_cold_tier_are_checked(tiers: Tiers) -> None:
    lost = next(segment for segment in tiers.finished() if segment.start)
    tiers.trim(lost.end + 1)
    log = tiers.tiered()
    assert sl.bulk.verify(log, quick=True).findings == []
    segment = replace(lost.segment, id=UUID(int=77))
    tiers.manager().add(replace(lost, segment=segment, state=SegmentState.COPY_STARTED))
    audit = sl.bulk.verify(tiers.tiered())
    assert audit.is_clean
    assert FindingKind.STATE in [finding.kind for finding in audit.findings]


def test_a_table_that_another_program_changed_is_a_finding(log: ObjectLog, tmp_path: Path) -> None:
    sink = sl.DeltaSink(tmp_path / "table")
    sl.follow(log, sink, upto="end")
    DeltaTable(tmp_path / "table").delete()
    audit = sl.bulk.verify(log, tables=[sl.DeltaSink(tmp_path / "table")])
    assert kinds(audit) == [FindingKind.TABLE]
    with pytest.raises(NotFound):
        sl.bulk.verify(log, tables=[sl.DeltaSink(tmp_path / "nothing")])


class Elsewhere:
    """Workers of other machines, which have no folder of this one."""

    count = 2

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self, tasks: Any, title: str) -> Iterator[tuple[int, Any]]:
        away = self._folder.with_name("away")
        for number, task in enumerate(tasks):
            self._folder.rename(away)
            try:
                report = task()
            finally:
                away.rename(self._folder)
            yield number, report


def test_workers_that_cannot_reach_a_log_are_told_from_damage(log: ObjectLog, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="keep the log where all workers reach it"):
        sl.bulk.verify(log, pool=Elsewhere(tmp_path / "log"))
    next((tmp_path / "log" / "batches").rglob("*.batch")).unlink()
    with pytest.raises(NotFound, match="keep the log where all workers reach it"):
        sl.bulk.verify(log, pool=Elsewhere(tmp_path / "log"))
    assert not sl.bulk.verify(log).is_clean


class WithDamagedCopy:
    """Workers to which a batch arrives with a changed byte, as from a damaged replica."""

    count = 2

    def __init__(self, batch: Path) -> None:
        self._batch = batch

    def run(self, tasks: Any, title: str) -> Iterator[tuple[int, Any]]:
        data = self._batch.read_bytes()
        for number, task in enumerate(tasks):
            self._batch.write_bytes(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
            try:
                report = task()
            finally:
                self._batch.write_bytes(data)
            yield number, report


def test_damage_that_only_workers_read_is_damage_and_not_a_lack_of_reach(log: ObjectLog, tmp_path: Path) -> None:
    batch = next((tmp_path / "log" / "batches").rglob("*.batch"))
    audit = sl.bulk.verify(log, pool=WithDamagedCopy(batch))
    (damage,) = audit.damage
    assert batch.name in damage.message
    assert "This process reads them" in damage.message
