"""Export: every record of a range once, in order, in any pool, killed and continued at any request."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import strandline as sl
from strandline.bulk.exporting import PartTask
from strandline.errors import CorruptData, CursorExpired, Diverged, InvalidInput, NotFound
from strandline.log.object import ObjectLog
from strandline.model.records import READ_SCHEMA
from strandline.testing.faulty import Crash, FaultyStore
from strandline.testing.plain import PlainStore

R = TypeVar("R")


@pytest.fixture
def log(tmp_path: Path) -> ObjectLog:
    """Six batches of ten records."""
    log = sl.open(f"file://{tmp_path}/log", create=True)
    assert isinstance(log, ObjectLog)
    with log.producer(linger=60) as producer:
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
    assert rows[1]["headers_base64"] == {"h": "/w=="}


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
        pool = sl.bulk.ThreadPool(1)
        with contextlib.suppress(Crash):
            sl.bulk.export(log, "plain", pool=pool, part_bytes=1)
        requests = len(store.log)
        store.unhook()
        end = log.bounds().next
        if number in (1, 6):
            with log.producer() as producer:
                producer.append(value=b"later")
            begun = any(item.path == "plan.json" for item in inner.list(""))
            end += not begun  # the range is fixed by then
        done = sl.bulk.export(log, "plain", pool=pool, part_bytes=1)
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
    with pytest.raises(InvalidInput, match="behind its end"):
        sl.bulk.export(log, tmp_path / "out", since=30, upto=20)
    log.set_retention("bytes:1")
    log.trim(grace=0)
    assert log.bounds().first
    with pytest.raises(CursorExpired):
        sl.bulk.export(log, tmp_path / "out", since="beginning")
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_an_export_into_the_folder_of_a_log_is_refused(log: ObjectLog) -> None:
    with pytest.raises(InvalidInput, match="holds a log"):
        sl.bulk.export(log, log.url)
    assert not list(log.store.list("plan"))


def test_a_task_that_gets_other_records_than_planned_stores_nothing(log: ObjectLog) -> None:
    store = PlainStore()
    spans = tuple(log.plan(log.cursor_at(0)))
    for broken in (spans[1:], spans[:-1], (*spans, spans[0]), ()):
        with pytest.raises(CorruptData):
            PartTask(store, "parquet", "part", 0, 60, broken)()
    assert not list(store.list(""))


def test_damaged_notes_of_an_export_are_named(log: ObjectLog, tmp_path: Path) -> None:
    sl.bulk.export(log, tmp_path / "out")
    (tmp_path / "out" / "manifest.json").write_bytes(b"{}")
    with pytest.raises(CorruptData, match=r"manifest\.json is damaged"):
        sl.bulk.export(log, tmp_path / "out")


def test_parts_without_a_plan_are_not_taken_for_those_of_another_log(log: ObjectLog, tmp_path: Path) -> None:
    sl.bulk.export(log, tmp_path / "out")
    (tmp_path / "out" / "manifest.json").unlink()
    (tmp_path / "out" / "plan.json").unlink()
    other = sl.open(f"file://{tmp_path}/other", create=True)
    with other.producer() as producer:
        producer.append_batch(pa.table({"value": pa.array([b"other"] * 60, pa.binary())}))
    for one in (log, other):
        with pytest.raises(InvalidInput, match=r"no plan\.json that says of which job it is"):
            sl.bulk.export(one, tmp_path / "out")


@pytest.mark.parametrize("is_whole", [False, True])
def test_an_export_does_not_continue_on_a_restored_log_with_other_records(tmp_path: Path, is_whole: bool) -> None:
    def grown(tag: bytes) -> ObjectLog:
        log = sl.open(f"file://{tmp_path}/log", create=True)
        assert isinstance(log, ObjectLog)
        with log.producer(linger=0) as producer:
            for number in range(3):
                producer.append(value=b"%s%d" % (tag, number))
                producer.flush()
        return log

    grown(b"kept")
    shutil.copytree(tmp_path / "log", tmp_path / "copy")
    done = sl.bulk.export(grown(b"lost"), tmp_path / "out", part_bytes=1)
    if not is_whole:
        (tmp_path / "out" / "manifest.json").unlink()
        (tmp_path / "out" / done.parts[0].path).unlink()
    shutil.rmtree(tmp_path / "log")
    shutil.copytree(tmp_path / "copy", tmp_path / "log")
    with pytest.raises(Diverged, match="restored from a copy"):
        sl.bulk.export(sl.open(f"file://{tmp_path}/log"), tmp_path / "out")
    with pytest.raises(Diverged, match="restored from a copy"):
        sl.bulk.export(grown(b"new"), tmp_path / "out")


class Interrupted:
    """A pool that does something between two tasks."""

    count = 1

    def __init__(self, at: int, action: Callable[[], object]) -> None:
        self.at, self.action = at, action

    def run(self, tasks: Sequence[Callable[[], R]], title: str) -> Iterator[tuple[int, R]]:
        for number, task in enumerate(tasks):
            if number == self.at:
                self.action()
            yield number, task()


def test_records_that_are_trimmed_during_an_export_end_it(log: ObjectLog, tmp_path: Path) -> None:
    def trim() -> None:
        log.set_retention("bytes:1")
        log.trim(grace=0)

    with pytest.raises(CursorExpired):
        sl.bulk.export(log, tmp_path / "out", pool=Interrupted(2, trim), part_bytes=1)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_parts_that_tasks_have_stored_elsewhere_are_not_listed_as_whole(log: ObjectLog, tmp_path: Path) -> None:
    """As on a cluster whose machines have disks of their own."""
    place = tmp_path / "out"

    def move() -> None:
        for part in place.glob("part-*"):
            part.unlink()

    with pytest.raises(NotFound, match="executors write to their own disks"):
        sl.bulk.export(log, place, pool=Interrupted(2, move), part_bytes=1)
    assert not (place / "manifest.json").exists()


def test_a_batch_that_is_lost_ends_an_export(log: ObjectLog, tmp_path: Path) -> None:
    def lose() -> None:
        log.store.delete(log.head().tail[3].location)

    with pytest.raises(NotFound, match="offsets 30 to 39"):
        sl.bulk.export(log, tmp_path / "out", pool=Interrupted(2, lose), part_bytes=1)


def test_a_log_that_is_restored_during_an_export_ends_it(log: ObjectLog, tmp_path: Path) -> None:
    place = tmp_path / "log"
    shutil.copytree(place, tmp_path / "copy")
    with log.producer() as producer:
        producer.append(value=b"lost")

    def restore() -> None:
        shutil.rmtree(place)
        shutil.copytree(tmp_path / "copy", place)
        with sl.open(f"file://{place}").producer() as producer:
            producer.append(value=b"new")

    with pytest.raises(Diverged):
        sl.bulk.export(log, tmp_path / "out", upto=61, pool=Interrupted(2, restore), part_bytes=1)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_an_export_from_a_time_continues_when_its_first_records_were_trimmed(log: ObjectLog, tmp_path: Path) -> None:
    since = datetime(2020, 1, 1, tzinfo=UTC)
    done = sl.bulk.export(log, tmp_path / "out", since=since, part_bytes=1)
    (tmp_path / "out" / "manifest.json").unlink()
    log.set_retention("bytes:1")
    log.trim(grace=0)
    assert sl.bulk.export(log, tmp_path / "out", since=since) == done


def test_json_lines_have_every_header_and_any_time(tmp_path: Path) -> None:
    log = sl.open(f"file://{tmp_path}/log", create=True)
    rows = pa.table(
        {
            "timestamp": pa.array([0, 2**62, -(2**62)]).view(pa.timestamp("us", tz="UTC")),
            "headers": pa.array([[("h", b"1"), ("h", None), ("g", b"2")], [], None], pa.map_(pa.string(), pa.binary())),
        }
    )
    with log.producer() as producer:
        producer.append_batch(rows)
    (part,) = sl.bulk.export(log, tmp_path / "out", format="jsonl").parts
    found = [json.loads(line) for line in (tmp_path / "out" / part.path).read_text().splitlines()]
    assert [row["timestamp"] for row in found] == ["1970-01-01T00:00:00.000000Z", 2**62, -(2**62)]
    assert [row.get("headers") for row in found] == [{"h": ["1", None], "g": "2"}, {}, None]


@pytest.mark.parametrize("cuts", [[10, 20], [0, 20, 10], [0, 60], []])
def test_a_plan_whose_parts_are_not_its_range_is_refused(log: ObjectLog, tmp_path: Path, cuts: list[int]) -> None:
    sl.bulk.export(log, tmp_path / "out")
    (tmp_path / "out" / "manifest.json").unlink()
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    (tmp_path / "out" / "plan.json").write_text(json.dumps({**plan, "cuts": cuts}))
    with pytest.raises(CorruptData, match=r"plan\.json is damaged"):
        sl.bulk.export(log, tmp_path / "out")
    (tmp_path / "out" / "plan.json").write_text(json.dumps({**plan, "version": 2}))
    with pytest.raises(CorruptData, match=r"plan\.json is damaged"):
        sl.bulk.export(log, tmp_path / "out")


def test_a_part_that_something_has_emptied_is_written_again(log: ObjectLog, tmp_path: Path) -> None:
    done = sl.bulk.export(log, tmp_path / "out", part_bytes=1)
    whole = exported(tmp_path / "out")
    (tmp_path / "out" / "manifest.json").unlink()
    (tmp_path / "out" / done.parts[1].path).write_bytes(b"")
    assert sl.bulk.export(log, tmp_path / "out", part_bytes=1) == done
    assert exported(tmp_path / "out").equals(whole)
