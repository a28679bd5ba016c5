"""Dead letters as they are told: together with the rows of their range, whatever crashes between the two commits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import strandline as sl
from strandline.cli.app import app
from strandline.errors import InvalidInput, NotFound
from strandline.log.memory import MemoryLog
from strandline.tables.delta.commits import DeltaCommits
from strandline.tables.files.sink import FileTableSink
from strandline.tables.iceberg.commits import IcebergCommits
from strandline.tables.maintain.replay import LetterReplay
from strandline.tables.rows.shape import DeadLetters
from strandline.tables.sql.postgres_transaction import PostgresTransaction
from strandline.tables.sql.sqlite_transaction import SqliteTransaction
from strandline.testing.faulty import Crash
from tests.tables.test_maintenance_formats import Delta, Iceberg, Postgres, Sqlite, opened_place
from tests.tables.test_rebuild import letters

NARROW = sl.Json(pa.schema({"id": pa.int32()}))
WIDE = sl.Json(pa.schema({"id": pa.int64()}))
BAD = [1, 4, 5, 8]
COMMITS: dict[type, tuple[type, str]] = {
    Delta: (DeltaCommits, "commit"),
    Iceberg: (IcebergCommits, "commit"),
    Sqlite: (SqliteTransaction, "store"),
    Postgres: (PostgresTransaction, "store"),
}


@pytest.fixture(params=["delta", "iceberg", "sqlite", "postgres"])
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


def test_a_letter_is_told_with_the_commit_of_its_rows_after_a_crash_between_both(
    place: Any, log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = COMMITS[type(place)]
    commit = getattr(owner, name)
    crashes: list[int] = []

    def crashing(self: Any, *arguments: Any, **options: Any) -> Any:
        followed = getattr(self, "followed", None)  # a SQL table has no commit of its own for letters
        if followed is not None and isinstance(followed.shape, DeadLetters):
            return commit(self, *arguments, **options)  # the letters are stored, and their rows are not
        raise Crash

    with pytest.raises(NotFound):
        told(place, log)
    for until in (3, 5, 10):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, crashing)
            with pytest.raises(Crash):
                sl.follow(log, place.sink(value=NARROW, **place.options), until=until)
        at = place.sink(value=NARROW, **place.options).cursor(log.log_id)
        if at is not None:
            assert told(place, log) == [offset for offset in BAD if offset < at.next]
            assert sl.tables.replay_letters(place.sink(value=NARROW, **place.options), log).unreadable == len(
                told(place, log)
            )
        crashes.append(until)
        sl.follow(log, place.sink(value=NARROW, **place.options), until=until)
        assert told(place, log) == [offset for offset in BAD if offset < until]
    assert crashes == [3, 5, 10]


@pytest.mark.parametrize("mode", ["append", "latest"])
def test_a_rebuild_with_a_corrected_schema_removes_the_letters_of_the_rows_that_it_made(
    place: Any, log: MemoryLog, mode: str
) -> None:
    place.options["mode"] = mode
    sl.follow(log, place.sink(value=NARROW, **place.options), until="end")
    assert told(place, log) == BAD
    sl.tables.rebuild(place.sink(value=NARROW, **place.options), log, start=2)
    assert told(place, log) == [4, 5, 8]
    sl.tables.rebuild(place.sink(value=WIDE, **place.options), log, start=5)
    assert told(place, log, WIDE) == []
    sl.tables.rebuild(place.sink(value=WIDE, **place.options), log, start="beginning")
    assert told(place, log, WIDE) == []
    assert sl.tables.verify(place.sink(value=WIDE, **place.options), log).is_right
    assert sl.tables.replay_letters(place.sink(value=WIDE, **place.options), log).applied == 0


def test_letters_that_a_rebuild_cannot_remove_are_removed_by_the_next_replay(
    place: Any, log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not isinstance(place.sink(**place.options), FileTableSink):
        return  # one transaction
    sl.follow(log, place.sink(value=NARROW, **place.options), until="end")

    def refused(_: Any) -> None:
        raise InvalidInput("Not now.")

    with monkeypatch.context() as patch:
        patch.setattr(LetterReplay, "discard", refused)
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
    sl.follow(log, sink, until="end")
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
