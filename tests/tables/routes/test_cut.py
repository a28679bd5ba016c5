"""Cuts: versions of several tables with the state of one offset."""

import json

import pyarrow as pa
import pytest
from deltalake import DeltaTable

import strandline as sl
from strandline.errors import InvalidInput, NotReady

VALUES = sl.values.Json(pa.schema({"x": pa.int64()}))


def grown(log, count: int, start: int):
    with log.producer() as producer:
        for number in range(start, start + count):
            value = json.dumps({"t": "ab"[number % 2], "x": number}).encode()
            producer.append(key=b"%d" % number, value=value)


def sinks(folder):
    return [
        sl.DeltaSink(f"{folder}/{name}", mode="append", value=VALUES).taking(sl.tables.where(field="t", equals=name))
        for name in "ab"
    ]


@pytest.fixture
def log(tmp_path):
    return sl.open(str(tmp_path / "log"), create=True)


def test_a_cut_has_the_rows_below_one_offset_in_each_table(log, tmp_path):
    grown(log, 10, 0)
    sl.follow(log, sinks(tmp_path), upto="end")
    grown(log, 10, 10)
    sl.follow(log, sinks(tmp_path)[0], upto="end")  # one table goes on alone
    found = sl.tables.cut([str(tmp_path / name) for name in "ab"])
    assert (found.log_id, found.next) == (log.log_id, 10)
    rows = {
        where: sorted(DeltaTable(where, version=version).to_pyarrow_table()["x"].to_pylist())
        for where, version in found.versions.items()
    }
    assert list(rows.values()) == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    sl.follow(log, sinks(tmp_path), upto="end")
    assert sl.tables.cut(sinks(tmp_path)).next == 20


def test_an_undone_version_is_in_no_cut(log, tmp_path):
    grown(log, 10, 0)
    sl.follow(log, sinks(tmp_path), upto="end")
    grown(log, 10, 10)
    sl.follow(log, sinks(tmp_path), upto="end")
    DeltaTable(str(tmp_path / "a")).restore(1)
    with pytest.raises(sl.errors.Diverged):
        sl.follow(log, sinks(tmp_path), upto="end")
    sl.follow(log, sinks(tmp_path)[0], upto=10, repair=True)
    assert sl.tables.cut(sinks(tmp_path)).next in (10, 20)
    a = sl.tables.cut(sinks(tmp_path)).versions[str(tmp_path / "a")]
    held = DeltaTable(str(tmp_path / "a"), version=a).to_pyarrow_table().num_rows
    assert held == sl.tables.cut(sinks(tmp_path)).next / 2


def test_a_table_whose_files_were_joined_and_removed_is_in_a_cut_with_those_that_it_has(log, tmp_path):
    for start in (0, 10, 20):
        grown(log, 10, start)
        sl.follow(log, sinks(tmp_path), upto="end")
    table = DeltaTable(str(tmp_path / "a"))
    table.optimize.compact()
    table.vacuum(0, dry_run=False, enforce_retention_duration=False)
    found = sl.tables.cut(sinks(tmp_path))
    rows = [DeltaTable(where, version=version).to_pyarrow_table().num_rows for where, version in found.versions.items()]
    assert (found.next, rows) == (30, [15, 15])


def test_tables_without_a_common_offset_have_no_cut_yet(log, tmp_path):
    grown(log, 10, 0)
    sl.follow(log, sinks(tmp_path)[0], upto=4)
    sl.follow(log, sinks(tmp_path)[1], start=5, upto=6)
    with pytest.raises(NotReady, match="no version of one common offset"):
        sl.tables.cut(sinks(tmp_path))


def test_tables_of_two_logs_or_of_a_database_have_no_cut(log, tmp_path):
    grown(log, 2, 0)
    other = sl.open(str(tmp_path / "other"), create=True)
    grown(other, 2, 0)
    sl.follow(log, sl.DeltaSink(str(tmp_path / "x"), mode="append"), upto="end")
    sl.follow(other, sl.DeltaSink(str(tmp_path / "y"), mode="append"), upto="end")
    with pytest.raises(InvalidInput, match="different logs"):
        sl.tables.cut([str(tmp_path / "x"), str(tmp_path / "y")])
    with pytest.raises(InvalidInput, match="keeps no earlier versions"):
        sl.tables.cut([sl.SqliteSink(str(tmp_path / "db"), table="t")])
    with pytest.raises(InvalidInput, match="at least one table"):
        sl.tables.cut([])
