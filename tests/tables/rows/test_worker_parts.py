"""Parts of a range: what workers write together equals the work of one; holes and doubles are refused."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

import strandline as sl
from strandline.errors import BadRecord, CorruptData
from strandline.model.cursor import Cursor
from strandline.tables.delta.files import DeltaFiles
from strandline.tables.delta.sink import DeltaSink
from strandline.tables.files import layout
from strandline.tables.files.layout import WHOLE, HashRange, file_name, range_of, shares
from strandline.tables.work import is_exchanged, is_shuffled
from strandline.tables.written import Written, check_coverage
from strandline.testing.sinks import DELETE, LOG, changes
from tests.matrix_cases import some

MANY = [(b"key-%d" % (n % 37), DELETE if n % 11 == 10 else b"%d" % n) for n in range(200)]


def apply_by(sink: DeltaSink, tasks: int, first: int, end: int, *, cut: int | None = None) -> None:
    """Apply a range as several workers would, each of which is on another machine."""
    since, upto = Cursor(LOG, first), Cursor(LOG, end)
    transaction = sink.begin(since=since, upto=upto, tasks=tasks)
    assert transaction is not None
    records = changes(first, *MANY[first:end]).to_batches(max_chunksize=7)
    parts = [pickle.loads(pickle.dumps(part)) for part in transaction.parts]
    if parts[0].takes == "keys":
        written = [part.write(records) for part in parts]
    else:
        step = -(-len(records) // len(parts))
        written = [part.write(records[n * step : (n + 1) * step]) for n, part in enumerate(parts)]
    transaction.commit(written)


def rows_of(sink: DeltaSink) -> list[tuple[object, ...]]:
    table = DeltaTable(sink.url).to_pyarrow_table()
    return sorted([tuple(row.values()) for row in table.drop_columns(["headers"]).to_pylist()], key=str)


@pytest.mark.parametrize(
    ("mode", "tasks"),
    some([(mode, tasks) for tasks in [(1, 4), (4, 1), (2, 3), (8, 2)] for mode in ("latest", "append", "history")], 4),
)
def test_any_number_of_workers_writes_the_same_table(tmp_path, mode, tasks):
    alone, shared = DeltaSink(str(tmp_path / "alone"), mode=mode), DeltaSink(str(tmp_path / "shared"), mode=mode)
    for first, end, count in ((0, 120, tasks[0]), (120, 200, tasks[1])):
        apply_by(alone, 1, first, end)
        apply_by(shared, count, first, end)
    assert rows_of(shared) == rows_of(alone)
    assert shared.cursor(LOG) == Cursor(LOG, 200)


@pytest.mark.parametrize("mode", ["latest", "history"])
def test_files_that_grow_are_split_and_only_those_with_changed_keys_are_written_again(tmp_path, mode, monkeypatch):
    monkeypatch.setattr("strandline.tables.files.part.FILE_ROWS", 4)
    sink = DeltaSink(str(tmp_path / "table"), mode=mode)
    rows = [(b"key-%d" % n, b"1") for n in range(64)]
    sink.apply(changes(0, *rows), since=Cursor(LOG, 0), upto=Cursor(LOG, 64))
    before = set(DeltaTable(sink.url).file_uris())
    assert len(before) > 16
    sink.apply(changes(64, (b"key-7", b"2")), since=Cursor(LOG, 64), upto=Cursor(LOG, 65))
    after = set(DeltaTable(sink.url).file_uris())
    assert len(before - after) == 1
    assert len(after - before) == (1 if mode == "latest" else 2)


@pytest.mark.parametrize("mode", some(["latest", "history"], 1))
def test_a_compacted_table_is_divided_again_by_the_workers(tmp_path, mode):
    sink, twin = DeltaSink(str(tmp_path / "table"), mode=mode), DeltaSink(str(tmp_path / "twin"), mode=mode)
    for one in (sink, twin):
        apply_by(one, 4, 0, 100)
    DeltaTable(sink.url).optimize.compact()
    assert [range_of(path) for path in DeltaTable(sink.url).file_uris()] == [WHOLE]
    for one in (sink, twin):
        apply_by(one, 4, 100, 200)
    assert rows_of(sink) == rows_of(twin)
    assert WHOLE not in [range_of(path) for path in DeltaTable(sink.url).file_uris()]


def begun(tmp_path, mode, tasks):
    sink = DeltaSink(str(tmp_path / "table"), mode=mode)
    transaction = sink.begin(since=Cursor(LOG, 0), upto=Cursor(LOG, 20), tasks=tasks)
    records = changes(0, *MANY[:20]).to_batches(max_chunksize=5)
    return transaction, records


@pytest.mark.parametrize(
    "given",
    [
        lambda r: [r[:2], r[3:]],  # a batch is missing
        lambda r: [r[:2], r[1:]],  # one is doubled
        lambda r: [r[:2], r[2:3]],  # the end is missing
        lambda r: [r[1:2], r[2:]],  # the beginning is missing
        lambda r: [[r[0], r[2]], [r[1], r[3]]],  # reordered
    ],
)
def test_workers_by_offsets_that_saw_a_hole_or_a_double_commit_nothing(tmp_path, given):
    transaction, records = begun(tmp_path, "append", 2)
    with pytest.raises(CorruptData):
        transaction.commit([part.write(own) for part, own in zip(transaction.parts, given(records), strict=True)])
    assert not (tmp_path / "table" / "_delta_log").exists()


@pytest.mark.parametrize(
    "given",
    [
        lambda r: [r, r[1:]],
        lambda r: [r[:-1], r[:-1]],
        lambda r: [r, [*r[:2], *r[3:]]],
    ],
)
def test_workers_by_keys_that_did_not_see_everything_commit_nothing(tmp_path, given):
    transaction, records = begun(tmp_path, "latest", 2)
    with pytest.raises(CorruptData, match="lost or duplicated"):
        transaction.commit([part.write(own) for part, own in zip(transaction.parts, given(records), strict=True)])
    assert not (tmp_path / "table" / "_delta_log").exists()


def test_a_worker_that_took_keys_of_another_is_noticed(tmp_path):
    transaction, records = begun(tmp_path, "latest", 2)
    written = [part.write(records) for part in transaction.parts]
    written[0] = replace(written[0], taken=written[0].taken + 1)
    with pytest.raises(CorruptData):
        check_coverage(written, "keys", len(transaction.parts), 0, 20)


def test_a_missing_report_is_noticed(tmp_path):
    transaction, records = begun(tmp_path, "latest", 4)
    with pytest.raises(CorruptData, match="3 of 4"):
        transaction.commit([part.write(records) for part in transaction.parts[1:]])


def test_ranges_of_hashes_cover_everything_once():
    for tasks in range(1, 40):
        found = shares(tasks)
        assert len(found) >= tasks
        assert sum(one.high - one.low for one in found) == 1 << 32
        assert not any(a.overlaps(b) for n, a in enumerate(found) for b in found[:n])


@pytest.mark.parametrize("name", ["part-1.parquet", "keys-03-00000009-" + "a" * 68 + ".parquet", "x", ""])
def test_a_name_of_another_writer_covers_everything(name):
    assert range_of(name) == WHOLE


def test_a_cluster_of_many_cores_does_not_fetch_a_range_once_for_each(tmp_path, monkeypatch):
    transaction, _ = begun(tmp_path, "latest", 200)
    assert len(transaction.parts) == 8
    assert not is_shuffled(transaction.parts)
    monkeypatch.setattr(layout, "FEW_SHARES", 200)
    transaction, _ = begun(tmp_path, "latest", 200)
    assert len(transaction.parts) == 256
    assert is_shuffled(transaction.parts)
    appended, _ = begun(tmp_path / "other", "append", 200)
    assert len(appended.parts) == 200
    assert not is_shuffled(appended.parts)


def test_rows_whose_keys_are_found_by_decoding_are_exchanged_by_a_few_workers(tmp_path):
    sink = DeltaSink(str(tmp_path / "table"), value=sl.values.Json(pa.schema({"id": pa.int64()})), key="id")
    parts = sink.begin(since=Cursor(LOG, 0), upto=Cursor(LOG, 20), tasks=4).parts
    assert is_exchanged(parts)
    assert not is_exchanged(parts[:1])
    assert not is_exchanged(parts * 4)
    assert is_shuffled(parts * 4)


def through_a_shuffle(transaction, records) -> list[Written]:
    """Two readers, whose rows go to the writers of all parts."""
    parts, readers = transaction.parts, []
    rows: dict[int, list[pa.Table]] = {number: [] for number in range(len(parts))}
    for own in (records[:2], records[2:]):
        reader = parts[0].reader()
        for table in reader.rows(own):
            numbers = parts[0].numbers(table, len(parts))
            for number, own_rows in rows.items():
                own_rows.append(table.filter(pa.array(numbers == number)))
        readers.append(reader.passed_on())
    writers = [part.write_rows(rows[number], number=number) for number, part in enumerate(parts)]
    return [*readers, *writers]


@pytest.mark.parametrize("mode", ["latest", "history"])
def test_shuffled_rows_give_the_table_that_refetched_records_do(tmp_path, mode):
    transaction, records = begun(tmp_path, mode, 4)
    transaction.commit(through_a_shuffle(transaction, records))
    twin = DeltaSink(str(tmp_path / "twin"), mode=mode)
    apply_by(twin, 1, 0, 20)
    assert rows_of(DeltaSink(str(tmp_path / "table"), mode=mode)) == rows_of(twin)


@pytest.mark.parametrize(
    "damaged",
    [
        lambda w: w[1:],  # a reader is missing
        lambda w: [w[0], *w],  # a reader counts twice
        lambda w: w[:-1],  # a part was not written
        lambda w: [*w, w[-1]],  # a part was written twice
        lambda w: [*w[:-1], replace(w[-1], taken=w[-1].taken - 1)],  # a row was lost between them
        lambda w: [replace(w[0], records=w[0].records - 1), *w[1:]],  # a record was not read
    ],
)
def test_a_shuffle_that_lost_or_doubled_anything_commits_nothing(tmp_path, damaged):
    transaction, records = begun(tmp_path, "latest", 4)
    with pytest.raises(CorruptData):
        transaction.commit(damaged(through_a_shuffle(transaction, records)))
    assert not (tmp_path / "table" / "_delta_log").exists()


def test_the_range_of_a_file_is_in_its_name():
    assert range_of("folder/" + file_name("closed", HashRange(4, 9), "0" * 70)) == HashRange(4, 9)


def test_a_row_that_cannot_be_is_raised_before_anything_is_written(tmp_path):
    transaction, _ = begun(tmp_path, "latest", 1)
    bad = changes(0, (None, b"x"))
    with pytest.raises(BadRecord, match="offset 0"):
        transaction.parts[0].write(bad.to_batches())
    assert not (tmp_path / "table").exists()


def test_records_below_the_cursor_are_dropped_by_each_worker(tmp_path):
    sink = DeltaSink(str(tmp_path / "table"), mode="append")
    apply_by(sink, 1, 0, 50)
    apply_by(sink, 2, 20, 90)
    assert sorted(pa.table(DeltaTable(sink.url).to_pyarrow_table())["offset"].to_pylist()) == list(range(90))


@pytest.mark.parametrize("mode", ["latest", "history"])
def test_files_that_spark_wrote_again_have_the_same_times(tmp_path, mode):
    """Spark's OPTIMIZE writes times as 96-bit numbers without a zone."""
    sink, twin = DeltaSink(str(tmp_path / "table"), mode=mode), DeltaSink(str(tmp_path / "twin"), mode=mode)
    for one in (sink, twin):
        apply_by(one, 1, 0, 100)
    for uri in DeltaTable(sink.url).file_uris():
        path = uri.removeprefix("file://")
        if layout.is_closed(path):
            continue  # a merge does not read it
        rows = pq.read_table(path)
        pq.write_table(rows, path, use_deprecated_int96_timestamps=True, store_schema=False)
        assert pq.ParquetFile(path).schema_arrow != rows.schema
    for one in (sink, twin):
        apply_by(one, 1, 100, 200)
    assert rows_of(sink) == rows_of(twin)


def test_times_within_a_struct_are_found_in_files_of_spark(tmp_path):
    times = pa.array([1, 2], pa.timestamp("us", "UTC"))
    rows = pa.table({"at": times, "in": pa.StructArray.from_arrays([times, times.cast(pa.int64())], ["at", "n"])})
    pq.write_table(rows, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True, store_schema=False)
    assert DeltaFiles(str(tmp_path), {}).read("a.parquet").equals(rows)
