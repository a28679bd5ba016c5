"""Export: every record of a range once, in order, on any hands, killed and continued at any request."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import strandline as sl
from strandline.bulk.exporting import PartTask
from strandline.errors import CorruptData, CursorExpired, InvalidInput
from strandline.log.object import ObjectLog
from strandline.model.records import READ_SCHEMA
from strandline.testing.faulty import Crash, FaultyStore
from strandline.testing.plain import PlainStore


@pytest.fixture
def log(tmp_path: Path) -> ObjectLog:
    """Six batches of ten records."""
    log = sl.open(f"file://{tmp_path}/log", create=True)
    assert isinstance(log, ObjectLog)
    with log.producer(linger=0) as producer:
        for number in range(60):
            producer.append(key=b"k%d" % number, value=b"v%d" % number, headers={"h": b"\xff"} if number == 7 else None)
            if number % 10 == 9:
                producer.flush()
    return log


def whole(log: ObjectLog, first: int = 0, end: int = 60) -> pa.Table:
    return pa.Table.from_batches(log.read(), READ_SCHEMA).slice(first, end - first)


def exported(target: Path) -> pa.Table:
    manifest = json.loads((target / "manifest.json").read_text())
    return pa.concat_tables([pq.read_table(target / part["path"]) for part in manifest["parts"]])


def test_every_record_of_the_range_is_in_the_parts_once_and_in_order(log: ObjectLog, tmp_path: Path) -> None:
    done = sl.bulk.export(log, tmp_path / "out", part_bytes=1)
    assert (done.records, len(done.parts)) == (60, 6)
    assert exported(tmp_path / "out").equals(whole(log))
    assert [part.bytes for part in done.parts] == [(tmp_path / "out" / part.path).stat().st_size for part in done.parts]
    part = sl.bulk.export(log, tmp_path / "some", since=15, upto=33, part_bytes=1)
    assert (part.since, part.upto, part.records) == (15, 33, 18)
    assert exported(tmp_path / "some").equals(whole(log, 15, 33))


def test_json_lines_have_text_where_it_is_text(log: ObjectLog, tmp_path: Path) -> None:
    done = sl.bulk.export(log, tmp_path / "out", format="jsonl", since=6, upto=9)
    (part,) = done.parts
    rows = [json.loads(line) for line in (tmp_path / "out" / part.path).read_text().splitlines()]
    assert [(row["offset"], row["key"], row["value"]) for row in rows] == [
        (number, f"k{number}", f"v{number}") for number in (6, 7, 8)
    ]
    assert rows[1]["headers"] == {"h": {"base64": "/w=="}}


def test_an_empty_range_is_a_manifest_without_parts(log: ObjectLog, tmp_path: Path) -> None:
    done = sl.bulk.export(log, tmp_path / "out", since=60)
    assert (done.records, done.parts) == (0, ())


def test_a_repeated_export_writes_nothing_and_records_that_came_since_are_not_in_it(
    log: ObjectLog, tmp_path: Path
) -> None:
    first = sl.bulk.export(log, tmp_path / "out")
    with log.producer() as producer:
        producer.append(value=b"later")
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert sl.bulk.export(log, tmp_path / "out") == first
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == times


@pytest.mark.parametrize("after", [False, True])
def test_an_export_that_is_killed_at_any_request_continues(
    log: ObjectLog, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(100):
        inner = PlainStore()
        store = FaultyStore(inner)
        monkeypatch.setattr("strandline.bulk.exporting.open_store", lambda *_, store=store: store)
        store.crash_at(number, after=after)
        hands = sl.bulk.Threads(1)
        with contextlib.suppress(Crash):
            sl.bulk.export(log, "plain", hands=hands, part_bytes=1)
        requests = len(store.log)
        store.unhook()
        end = log.bounds().next
        if number in (1, 6):
            with log.producer() as producer:
                producer.append(value=b"later")
            begun = any(item.path == "plan.json" for item in inner.list(""))
            end += not begun  # the range is fixed by then
        done = sl.bulk.export(log, "plain", hands=hands, part_bytes=1)
        assert (done.since, done.upto) == (0, end)
        parts = [pq.read_table(pa.BufferReader(bytes(inner.get(part.path).data))) for part in done.parts]
        assert pa.concat_tables(parts).equals(whole(log, 0, end))
        if requests < number:
            break
    assert number > 8


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"upto": 59}, "from offset 0 up to 60"),
        ({"since": 3}, "from offset 0 up to 60"),
        ({"format": "jsonl"}, "has an export as parquet"),
    ],
)
def test_another_export_at_the_same_place_is_refused(
    log: ObjectLog, tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    sl.bulk.export(log, tmp_path / "out")
    with pytest.raises(InvalidInput, match=says):
        sl.bulk.export(log, tmp_path / "out", **options)
    (tmp_path / "out" / "manifest.json").unlink()
    with pytest.raises(InvalidInput, match=says):
        sl.bulk.export(log, tmp_path / "out", **options)
    other = sl.open("memory://other-export", create=True)
    with pytest.raises(InvalidInput, match="another log"):
        sl.bulk.export(other, tmp_path / "out")


def test_a_range_that_the_log_does_not_have_is_refused(log: ObjectLog, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="the log ends at 60"):
        sl.bulk.export(log, tmp_path / "out", upto=61)
    with pytest.raises(InvalidInput, match="is none"):
        sl.bulk.export(log, tmp_path / "out", since=30, upto=20)
    log.set_retention("bytes:1")
    log.trim(grace=0)
    assert log.bounds().first
    with pytest.raises(CursorExpired):
        sl.bulk.export(log, tmp_path / "out", since="beginning")
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_task_that_gets_other_records_than_planned_stores_nothing(log: ObjectLog) -> None:
    store = PlainStore()
    spans = tuple(log.plan(log.cursor_at(0)))
    for broken in (spans[1:], spans[:-1], (*spans, spans[0]), ()):
        with pytest.raises(CorruptData):
            PartTask(store, "part", "parquet", 0, 60, broken)()
    assert not list(store.list(""))


def test_damaged_notes_of_an_export_are_named(log: ObjectLog, tmp_path: Path) -> None:
    sl.bulk.export(log, tmp_path / "out")
    (tmp_path / "out" / "manifest.json").write_bytes(b"{}")
    with pytest.raises(CorruptData, match=r"manifest\.json is damaged"):
        sl.bulk.export(log, tmp_path / "out")
