"""Dead letters as ``letters`` lists them: with the rows of their range, also after a crash between both commits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from typer.testing import CliRunner

import strandline as sl
from strandline.cli.app import app
from strandline.errors import Conflict, Diverged, InvalidInput, NotFound
from strandline.log.memory import MemoryLog
from strandline.model.head import WriterId
from strandline.model.records import record_batch
from strandline.tables.delta.commits import DeltaCommits
from strandline.tables.files.letters import stored_letters
from strandline.tables.files.replay import ReplayedFiles
from strandline.tables.files.sink import FileTableSink
from strandline.tables.iceberg.table import FollowedIceberg
from strandline.tables.maintain.replay import prove_letters
from strandline.tables.rows.shape import DeadLetters
from strandline.tables.sql.postgres_transaction import PostgresTransaction
from strandline.tables.sql.sqlite_transaction import SqliteTransaction
from strandline.testing.faulty import Crash
from tests.matrix_cases import some
from tests.tables.maintain.test_maintenance_formats import Delta, Iceberg, Postgres, Sqlite, opened_place
from tests.tables.maintain.test_rebuild import letters

NARROW = sl.values.Json(pa.schema({"id": pa.int32()}))
WIDE = sl.values.Json(pa.schema({"id": pa.int64()}))
BAD = [1, 4, 5, 8]
COMMITS: dict[type, tuple[type, str]] = {
    Delta: (DeltaCommits, "commit"),
    Iceberg: (FollowedIceberg, "commit"),
    Sqlite: (SqliteTransaction, "store"),
    Postgres: (PostgresTransaction, "store"),
}


@pytest.fixture(params=some(["delta", "iceberg", "sqlite", "postgres"], 2))
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with opened_place(request.param, request, tmp_path, monkeypatch) as found:
        found.options = {"mode": "append", "dead_letters": letters(found, tmp_path)}
        yield found


@pytest.fixture
def log() -> MemoryLog:
    log = MemoryLog()
    with log.producer() as producer:
        for number in range(10):
            value = 3_000_000_000 if number in BAD else number
            producer.append(key=b"k%d" % (number % 3), value=json.dumps({"id": value}).encode()).result()
    return log


def told(place: Any, log: MemoryLog, value: Any = NARROW) -> list[int]:
    found: list[int] = sl.tables.letters(place.sink(value=value, **place.options), log).column("offset").to_pylist()
    return found


@pytest.mark.matrix
def test_a_letter_is_listed_with_the_commit_of_its_rows_after_a_crash_between_both(
    place: Any, log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = COMMITS[type(place)]
    commit = getattr(owner, name)
    crashes: list[int] = []

    def crashing(self: Any, *arguments: Any, **options: Any) -> Any:
        # A SQL table has no commit of its own for letters.
        if isinstance(getattr(self, "shape", None), DeadLetters):
            return commit(self, *arguments, **options)  # the letters are stored, and their rows are not
        raise Crash

    with pytest.raises(NotFound):
        told(place, log)
    for until in (3, 5, 10):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, crashing)
            with pytest.raises(Crash):
                sl.follow(log, place.sink(value=NARROW, **place.options), upto=until)
        at = place.sink(value=NARROW, **place.options).cursor(log.log_id)
        if at is not None:
            assert told(place, log) == [offset for offset in BAD if offset < at.next]
            assert sl.tables.replay_letters(place.sink(value=NARROW, **place.options), log).unreadable == len(
                told(place, log)
            )
        crashes.append(until)
        sl.follow(log, place.sink(value=NARROW, **place.options), upto=until)
        assert told(place, log) == [offset for offset in BAD if offset < until]
    assert crashes == [3, 5, 10]


def stored(place: Any, log: MemoryLog) -> list[int]:
    """All letters that are stored, also those that are not told."""
    sink = place.sink(value=NARROW, **place.options)
    replay = sink._letter_replay(log)
    table = replay.opened()
    box = table.letters_now
    files = [stored_letters(box.files, path, box.columns) for path in table.box.sizes(box)]
    return sorted(offset for file in files for offset in file.column("offset").to_pylist())


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["append", "latest"])
@pytest.mark.parametrize("place", ["delta", "iceberg"], indirect=True)
def test_a_letter_whose_record_got_a_row_from_a_corrected_sink_after_a_crash_is_removed(
    place: Any, log: MemoryLog, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.options["mode"] = mode
    with log.producer() as producer:
        producer.append(key=b"k", value=b"no JSON").result()
    sl.follow(log, place.sink(value=NARROW, **place.options), upto=2)
    owner, name = COMMITS[type(place)]
    commit = getattr(owner, name)

    def crashing(self: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(self.shape, DeadLetters):
            return commit(self, *arguments, **options)
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, crashing)
        with pytest.raises(Crash):
            sl.follow(log, place.sink(value=NARROW, **place.options), upto="end")
    assert stored(place, log) == [*BAD, 10]
    ends = [5, 8, 11]
    for corrected in (WIDE, NARROW, WIDE):  # the range is divided differently, and the correction is taken back
        since, end = log.cursor_at(told_cursor(place, log)), log.cursor_at(ends.pop(0))
        records = pa.Table.from_batches(list(log.read(since, upto=end.next)))
        place.sink(value=corrected, **place.options).apply(records, since=since, upto=end)
        if corrected is NARROW and mode == "append":
            assert told(place, log) == [1, 5]
    assert told(place, log) == stored(place, log) == [1, 5, 10]
    assert sl.tables.replay_letters(place.sink(value=WIDE, **place.options), log).applied == 2
    assert sl.tables.verify(place.sink(value=WIDE, **place.options), log).is_clean
    assert stored(place, log) == [10]


def told_cursor(place: Any, log: MemoryLog) -> int:
    at = place.sink(value=NARROW, **place.options).cursor(log.log_id)
    assert at is not None
    return int(at.next)


@pytest.mark.matrix
@pytest.mark.parametrize("place", ["delta", "iceberg"], indirect=True)
def test_letters_that_cannot_be_removed_behind_a_commit_are_removed_by_the_next_replay(
    place: Any, log: MemoryLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sl.follow(log, place.sink(value=NARROW, **place.options), upto=2)
    owner, name = COMMITS[type(place)]
    commit = getattr(owner, name)
    refused: list[bool] = []

    def crashing(self: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(self.shape, DeadLetters) is not bool(refused):
            return commit(self, *arguments, **options)
        raise Conflict("Another job was first.") if refused else Crash

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, crashing)
        with pytest.raises(Crash):
            sl.follow(log, place.sink(value=NARROW, **place.options), upto="end")
        refused.append(True)
        assert sl.follow(log, place.sink(value=WIDE, **place.options), upto="end") == log.end()
    assert "stay, though their records have rows" in caplog.text
    assert told(place, log, WIDE) == BAD
    assert sl.tables.replay_letters(place.sink(value=WIDE, **place.options), log).applied == len(BAD)
    assert sl.tables.verify(place.sink(value=WIDE, **place.options), log).rows == 10


def test_the_letter_of_another_log_at_an_offset_is_not_taken_for_the_own_one_after_a_crash(
    tmp_path: Path, log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Delta(tmp_path)
    options = {"mode": "append", "dead_letters": tmp_path / "letters"}
    sl.follow(log, place.sink(value=NARROW, **options), upto="end")  # its letters are at BAD
    shutil.rmtree(place.address)
    other = MemoryLog()
    with other.producer() as producer:
        for number in range(10):
            producer.append(key=b"k", value=b'{"id": %d, "n": %d}' % (1 << 40 if number == 7 else 1, number)).result()
    sl.follow(other, place.sink(value=NARROW, **options), upto=2)
    commit = DeltaCommits.commit

    def crashing(self: Any, *arguments: Any, **given: Any) -> Any:
        if isinstance(self.shape, DeadLetters):
            return commit(self, *arguments, **given)
        raise Crash

    def apply(value: Any) -> None:
        records = pa.Table.from_batches(list(other.read(2)))
        place.sink(value=value, **options).apply(records, since=other.cursor_at(2), upto=other.end())

    with monkeypatch.context() as patch:
        patch.setattr(DeltaCommits, "commit", crashing)
        with pytest.raises(Crash):
            apply(NARROW)  # stores the letter at 7
    apply(sl.values.Json(pa.schema({"id": pa.int32(), "n": pa.bool_()})))  # all are bad now, also those at 4, 5 and 8
    rows = pq.read_table(DeltaTable(tmp_path / "letters").file_uris()).to_pylist()
    assert {row["offset"] for row in rows if b'"n"' in row["value"]} == {*range(2, 10)}


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["append", "latest"])
def test_a_rebuild_with_a_corrected_schema_removes_the_letters_of_the_rows_that_it_made(
    place: Any, log: MemoryLog, mode: str
) -> None:
    place.options["mode"] = mode
    sl.follow(log, place.sink(value=NARROW, **place.options), upto="end")
    assert told(place, log) == BAD
    sl.tables.rebuild(place.sink(value=NARROW, **place.options), log, start=2)
    assert told(place, log) == [4, 5, 8]
    sl.tables.rebuild(place.sink(value=WIDE, **place.options), log, start=5)
    assert told(place, log, WIDE) == []
    sl.tables.rebuild(place.sink(value=WIDE, **place.options), log, start="beginning")
    assert told(place, log, WIDE) == []
    assert sl.tables.verify(place.sink(value=WIDE, **place.options), log).is_clean
    assert sl.tables.replay_letters(place.sink(value=WIDE, **place.options), log).applied == 0


def test_letters_that_a_rebuild_cannot_remove_are_removed_by_the_next_replay(
    place: Any, log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not isinstance(place.sink(**place.options), FileTableSink):
        return  # one transaction
    sl.follow(log, place.sink(value=NARROW, **place.options), upto="end")

    def refused(*_: Any) -> None:
        raise InvalidInput("Not now.")

    with monkeypatch.context() as patch:
        patch.setattr(ReplayedFiles, "replace_letters", refused)
        assert sl.tables.rebuild(place.sink(value=WIDE, **place.options), log) == log.end()
    assert told(place, log, WIDE) == BAD
    assert sl.tables.replay_letters(place.sink(value=WIDE, **place.options), log).applied == len(BAD)
    assert told(place, log, WIDE) == []
    assert sl.tables.verify(place.sink(value=WIDE, **place.options), log).rows == 10


@pytest.mark.parametrize("is_sql", [False, True])
def test_the_command_shows_letters_with_their_reasons(tmp_path: Path, is_sql: bool) -> None:
    log = sl.open(f"{tmp_path}/log", create=True)
    with log.producer() as producer:
        producer.append(key=b"a", value=b'{"id": 1}')
        producer.append(key=b"b\x1b[2J", value=b"\xff")
        producer.append(key=b"c", value=b"no JSON").result()
    sink: Any = sl.DeltaSink(tmp_path / "table", value=WIDE, dead_letters=tmp_path / "bad")
    arguments = [f"{tmp_path}/table", log.url, "--dead-letters", f"{tmp_path}/bad"]
    if is_sql:
        sink = sl.SqliteSink(tmp_path / "shop.db", table="orders", value=WIDE, dead_letters=True)
        arguments = [f"sqlite:{tmp_path}/shop.db#orders", log.url]
    sl.follow(log, sink, upto="end")
    (tmp_path / "schema.json").write_text('{"type": "object", "properties": {"id": {"type": "integer"}}}')
    command = ["table", "letters", *arguments, "--schema", f"{tmp_path}/schema.json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    first, one, two = done.output.splitlines()
    assert (first, one.split()[:3], two.split()[:4]) == (
        "2 dead letters.",
        ["1", r"b\x1b[2J", "0xff"],
        ["2", "c", "no", "JSON"],
    )
    assert "malformed" in two
    found = json.loads(CliRunner().invoke(app, [*command, "--limit", "1", "--json"]).output)
    assert (found["letters"], [one["offset"] for one in found["first"]]) == (2, [1])
    assert "1 more: see --limit." in CliRunner().invoke(app, [*command, "--limit", "1"]).output


@pytest.mark.parametrize("command", ["letters", "replay"])
def test_a_command_says_that_there_is_no_table_of_letters_at_an_address(tmp_path: Path, command: str) -> None:
    log = sl.open(f"{tmp_path}/log", create=True)
    with log.producer() as producer:
        producer.append(key=b"a", value=b"no JSON").result()
    sl.follow(log, sl.DeltaSink(tmp_path / "table", value=WIDE, dead_letters=tmp_path / "bad"), upto="end")
    (tmp_path / "schema.json").write_text('{"type": "object", "properties": {"id": {"type": "integer"}}}')
    arguments = ["table", command, f"{tmp_path}/table", log.url, "--schema", f"{tmp_path}/schema.json"]
    wrong = CliRunner().invoke(app, [*arguments, "--dead-letters", f"{tmp_path}/bda"])
    assert (wrong.exit_code, "There is no table at" in wrong.output) == (0, True)
    right = CliRunner().invoke(app, [*arguments, "--dead-letters", f"{tmp_path}/bad"])
    assert (right.exit_code, "There is no table at" in right.output) == (0, False)


def test_a_letter_whose_value_the_log_has_erased_is_no_letter_of_another_history() -> None:
    log = MemoryLog()
    batch = record_batch(timestamps=[1, 2], ops=[sl.Op.PURGE, sl.Op.PUT], keys=[b"a", b"b"], values=[None, b"v"])
    log.append(batch, writer=WriterId(uuid4()), number=0).result(60)
    stored = pa.Table.from_batches(log.read())
    for kept, is_same in ((b"v", True), (b"w", False)):  # the value of "a" is erased
        columns = {**stored.to_pydict(), "op": [sl.Op.PUT, sl.Op.PUT], "value": [b"personal", kept]}
        letters = pa.table(columns, schema=stored.schema)
        with nullcontext() if is_same else pytest.raises(Diverged, match="offset 1"):
            prove_letters(log, log.end(), letters, 0, "t")
