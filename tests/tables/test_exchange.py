"""Rows that workers exchange as pieces beside the table: each record is decoded once, and the table is the same."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog.memory import InMemoryCatalog

import strandline as sl
from strandline.errors import BadRecord, CorruptData, JobFailed
from strandline.log.contract import Log
from strandline.model.cursor import Cursor
from strandline.tables.apply import apply_with
from strandline.tables.delta.orphans import OrphanSweeper
from strandline.tables.exchange import exchanged
from strandline.tables.files.part import TablePart
from strandline.tables.work import is_exchanged
from strandline.tables.written import Written
from tests.matrix_cases import some

CODEC = sl.values.Json(pa.schema({"id": pa.int64(), "name": pa.string()}))
BATCHES, ROWS = 12, 40
Tasks = Sequence[Callable[[], Any]]


def sink_at(place: Path, mode: Any = "latest", **more: Any) -> Any:
    return sl.DeltaSink(place, mode=mode, value=CODEC, key="id", **more)


def filled(place: Path, seed: int, *, bad: float = 0.05) -> Log:
    """Changes of a few keys, with deletes; some values are no JSON, have no key, or a field of another type."""
    chance = random.Random(seed)
    log = sl.open(f"{place}", create=True)
    with log.producer() as producer:
        for _ in range(BATCHES):
            for _ in range(ROWS):
                key = chance.randrange(30)
                value = b'{"id": %d, "name": "%d"}' % (key, chance.randrange(1000))
                if chance.random() < bad:
                    value = chance.choice([b"no JSON", b"{}", b'{"id": "x"}', b'{"id": %d, "name": 5}' % key])
                op = sl.Op.DELETE if chance.random() < 0.2 else sl.Op.PUT
                producer.append(key=b"%d" % key, value=value, op=op)
            producer.flush()
    return log


class Machines:
    """Runs tasks as if each were on a machine of its own; ``dies`` before the task with that number."""

    def __init__(self, dies: int | None = None) -> None:
        self.dies = dies
        self.ran = 0

    def __call__(self, tasks: Tasks) -> list[Any]:
        found = []
        for task in tasks:
            if self.ran == self.dies:
                raise JobFailed("A worker was killed.")
            self.ran += 1
            found.append(pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(task))())))
        return found


def follow(log: Log, sink: Any, first: int, end: int, run: Callable[[Tasks], list[Any]]) -> Sequence[Written]:
    since, upto = log.cursor_at(first), log.cursor_at(end)
    spans = [span for span in log.plan(since) if span.next <= end]

    def work(parts: Sequence[TablePart]) -> Sequence[Written]:
        assert is_exchanged(parts)
        return exchanged(parts, spans, None, run)

    return apply_with(sink, work, since=since, upto=upto, tasks=4)


def state(sink: Any) -> list[Any]:
    return sorted((tuple(row.values()) for row in sink.rows().to_pylist()), key=repr)


def sink_letters(place: Path) -> list[int]:
    return list(DeltaTable(place).to_pyarrow_table().column("offset").to_pylist())


def parquet(place: Path) -> set[str]:
    return {file.name for file in place.glob("*.parquet")}


CASES = [(mode, seed) for seed in range(4) for mode in ("latest", "history", "marked")]


@pytest.mark.parametrize(("mode", "seed"), some(CASES, 2))
def test_exchanged_rows_give_the_table_and_the_letters_of_a_single_worker(tmp_path: Path, mode: str, seed: int) -> None:
    log = filled(tmp_path / "log", seed)
    alone = sink_at(tmp_path / "alone", mode, dead_letters=tmp_path / "alone-letters")
    shared = sink_at(tmp_path / "shared", mode, dead_letters=tmp_path / "shared-letters")
    middle, end = BATCHES // 2 * ROWS, log.end().next
    sl.follow(log, alone, upto=middle)
    follow(log, shared, 0, middle, Machines())
    sl.follow(log, alone, upto="end")
    written = follow(log, shared, middle, end, Machines())
    assert state(shared) == state(alone)
    assert [one.role for one in written] == ["reader"] * 4 + ["writer"] * 4
    assert sum(one.records for one in written) == end - middle, "each record is read once"
    letters = [sorted(sink_letters(tmp_path / f"{name}-letters")) for name in ("alone", "shared")]
    assert letters[1] == letters[0]
    assert len(set(letters[1])) == len(letters[1]) > 0


def test_no_piece_stays_beside_the_table(tmp_path: Path) -> None:
    log = filled(tmp_path / "log", 1, bad=0)
    sink = sink_at(tmp_path / "table")
    written = follow(log, sink, 0, log.end().next, Machines())
    assert parquet(tmp_path / "table") == {file.path for one in written for file in one.added}


@pytest.mark.parametrize("dies", some([*range(8)], 3))
def test_a_worker_that_dies_leaves_nothing_that_a_reader_sees_and_the_next_try_is_exact(
    tmp_path: Path, dies: int
) -> None:
    log = filled(tmp_path / "log", 2, bad=0)
    middle, end = BATCHES // 2 * ROWS, log.end().next
    sink, alone = sink_at(tmp_path / "table"), sink_at(tmp_path / "alone")
    follow(log, sink, 0, middle, Machines())
    before, named = state(sink), parquet(tmp_path / "table")
    with pytest.raises(JobFailed):
        follow(log, sink, middle, end, Machines(dies))
    assert state(sink) == before
    left = parquet(tmp_path / "table") - named
    assert len(left) == (4 * dies if dies < 4 else dies - 4), "pieces of readers, or files of writers"
    follow(log, sink, middle, end, Machines())
    sl.follow(log, alone, upto="end")
    assert state(sink) == state(alone)
    OrphanSweeper(sink._followed, hours=0).removed()
    assert not left & parquet(tmp_path / "table"), "they go as other files of failed jobs do"
    assert state(sink) == state(alone)


def test_no_piece_stays_beside_an_iceberg_table(tmp_path: Path) -> None:
    log = filled(tmp_path / "log", 5, bad=0)
    catalog = InMemoryCatalog("test", warehouse=f"file://{tmp_path}/warehouse")
    catalog.create_namespace("shop")
    sink = sl.IcebergSink(catalog, "shop.orders", value=CODEC, key="id")
    written = follow(log, sink, 0, log.end().next, Machines())
    files = {file.path.rpartition("/")[2] for one in written for file in one.added}
    assert {file.name for file in (tmp_path / "warehouse").rglob("*.parquet")} == files
    alone = sink_at(tmp_path / "alone")
    sl.follow(log, alone, upto="end")
    assert sorted(sink.rows().column("id").to_pylist()) == sorted(alone.rows().column("id").to_pylist())


def test_a_lost_piece_or_a_lost_reader_commits_nothing(tmp_path: Path) -> None:
    log = filled(tmp_path / "log", 3, bad=0)
    sink = sink_at(tmp_path / "table")
    rounds: list[int] = []

    def lossy(tasks: Tasks) -> list[Any]:
        rounds.append(len(tasks))
        found = Machines()(tasks)
        return found[:-1] if len(rounds) == 1 else found

    with pytest.raises(CorruptData):
        follow(log, sink, 0, log.end().next, lossy)
    assert sink.cursor(log.log_id) is None
    assert rounds == [4, 4]


def test_the_first_bad_record_is_raised_where_there_is_no_place_for_letters(tmp_path: Path) -> None:
    log = sl.open(f"{tmp_path}/log", create=True)
    with log.producer() as producer:
        for number in range(80):
            producer.append(key=b"k", value=b'{"id": %d}' % number if number not in (33, 61) else b"no JSON")
            if number % 10 == 9:
                producer.flush()
    with pytest.raises(BadRecord, match="offset 33"):
        follow(log, sink_at(tmp_path / "table"), 0, 80, Machines())


def test_a_table_by_the_keys_of_records_has_nothing_to_exchange(tmp_path: Path) -> None:
    sink = sl.DeltaSink(tmp_path / "table", value=CODEC)
    cursor = Cursor(sl.open(f"{tmp_path}/log", create=True).log_id, 0)
    transaction = sink.begin(since=cursor, upto=Cursor(cursor.log_id, 20), tasks=4)
    assert transaction is not None
    assert not is_exchanged(transaction.parts)
