"""Looking after a table: described, verified, compacted, vacuumed and rebuilt beside its follower."""

from __future__ import annotations

import json
import os

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

import strandline as sl
from strandline.errors import Diverged, InvalidInput, NotFound
from strandline.log.memory import MemoryLog
from strandline.log.read.planning import divided
from strandline.model.records import record_batch
from strandline.tables.maintain.operations import describe, optimize, rebuild, vacuum, verify
from strandline.tables.maintain.rebuilding import rebuild_table
from strandline.tables.work import InProcess

ORDER = pa.schema({"id": pa.int64(), "city": pa.string()})


def extend(log: MemoryLog, count: int) -> None:
    first = log.end().next
    values = [json.dumps({"id": n, "city": f"c{n % 3}"}).encode() for n in range(first, first + count)]
    batch = record_batch(
        timestamps=list(range(first, first + count)),
        ops=[1 if n % 7 == 6 else 0 for n in range(first, first + count)],
        keys=[b"k%d" % (n % 5) for n in range(first, first + count)],
        values=values,
    )
    with log.producer() as producer:
        producer.append_batch(pa.Table.from_batches([batch]))


@pytest.fixture
def log() -> MemoryLog:
    log = MemoryLog()
    extend(log, 30)
    return log


@pytest.fixture(params=["latest", "append", "history"])
def sink(request, tmp_path, log) -> sl.DeltaSink:
    sink = sl.DeltaSink(str(tmp_path / "table"), mode=request.param, value=sl.values.Json(ORDER))
    for end in (10, 20, 30):
        sl.follow(log, sink, upto=end)
    return sink


def test_a_table_is_described(sink, log):
    found = describe(sink, log)
    assert (found.kind, found.cursor, found.rows) == (sink.mode, log.end(), sink.rows().num_rows)
    assert ("city", "string") in found.columns
    assert found.bytes > 0
    with pytest.raises(NotFound):
        describe(sl.DeltaSink(sink.url + "-absent"))


def test_a_table_that_its_follower_wrote_is_right(sink, log):
    check = verify(sink, log)
    assert check.is_clean, check.first
    assert check.cursor == log.end()


def test_a_lost_and_a_changed_row_are_found(sink, log):
    DeltaTable(sink.url).delete("id = 29")
    sink.adopt(log.log_id)
    check = verify(sink, log)
    assert (check.missing, check.extra) == (1, 0)
    assert "'id': 29" in check.first[0]


class Two(InProcess):
    """Two workers, one after the other."""

    def tasks(self, spans) -> int:
        return 2


def test_a_damaged_table_is_rebuilt_in_one_commit_and_followed_on(sink, log):
    version = DeltaTable(sink.url).version()
    DeltaTable(sink.url).delete("id > 3")
    fresh = sl.DeltaSink(sink.url, mode=sink.mode, value=sl.values.Json(ORDER))
    with pytest.raises(Diverged):
        fresh.cursor(log.log_id)
    rebuild_table(fresh, log, start=None, upto=None, workers=Two(), is_verified=True)
    assert verify(fresh, log).is_clean
    assert DeltaTable(sink.url).version() == version + 2
    extend(log, 10)
    sl.follow(log, fresh, upto="end")
    assert verify(fresh, log).is_clean


def test_files_of_a_failed_job_are_removed_only_when_they_are_old(sink, log):
    orphan = f"{sink.url}/part-{'0' * 70}.parquet"
    with open(orphan, "wb") as file:
        file.write(b"x")
    vacuum(sink)
    assert os.path.exists(orphan)
    os.utime(orphan, (1, 1))
    assert vacuum(sink) >= 1
    assert not os.path.exists(orphan)
    assert verify(sink, log).is_clean
    extend(log, 5)
    sl.follow(log, sink, upto="end")
    with pytest.raises(InvalidInput):
        vacuum(sink, 0)


def test_small_files_of_all_changes_are_joined(sink, log):
    if sink.mode == "latest":
        with pytest.raises(InvalidInput, match="has no files to join"):
            optimize(sink)
        return
    assert optimize(sink) == 2  # of a history, the files of the versions that each commit has ended
    assert verify(sink, log).is_clean
    extend(log, 5)
    sl.follow(log, sink, upto="end")
    assert verify(sink, log).is_clean


def test_a_rebuild_takes_new_fields_and_dead_letters_along(tmp_path, log):
    place = str(tmp_path / "table")
    sl.follow(log, sl.DeltaSink(place, mode="append", value=sl.values.Json(pa.schema({"id": pa.int64()}))), upto="end")
    wider = sl.DeltaSink(place, mode="append", value=sl.values.Json(ORDER), dead_letters=str(tmp_path / "letters"))
    rebuild(wider, log)
    assert verify(wider, log).is_clean
    assert wider.rows()["city"].null_count == 0


def test_a_rebuild_refuses_a_table_of_another_log_of_none_and_of_another_kind(tmp_path, log):
    place = str(tmp_path / "table")
    sl.follow(log, sl.DeltaSink(place, mode="append"), upto="end")
    other = MemoryLog()
    extend(other, 5)
    with pytest.raises(Diverged):
        rebuild(sl.DeltaSink(place, mode="append"), other)
    with pytest.raises(InvalidInput, match="mode 'append'"):
        rebuild(sl.DeltaSink(place, mode="latest"), log)
    write_deltalake(str(tmp_path / "foreign"), pa.table({"x": [1]}))
    with pytest.raises(Diverged):
        rebuild(sl.DeltaSink(str(tmp_path / "foreign"), mode="append"), log)
    assert DeltaTable(str(tmp_path / "foreign")).to_pyarrow_table().num_rows == 1


def test_a_large_range_is_divided_into_exactly_as_many_groups_as_there_are_parts():
    class Span:
        def __init__(self, size: int) -> None:
            self.size = size

    for count in range(1, 9):
        spans = [Span(200 << 20), Span(1), Span(300 << 20), Span(0)]
        groups = divided(spans, count)
        assert len(groups) == count
        assert [span for group in groups for span in group] == spans
