"""Random histories of a table that is moved between logs, against lists: it has what the log that it follows says."""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

import strandline as sl
from strandline.errors import CursorExpired, Diverged, NotFound, NotReady, OutOfOrder, Unsupported
from strandline.log.memory import MemoryLog
from strandline.model.cursor import Limit
from strandline.model.records import record_batch

Row = tuple[int, bytes, bytes | None, int]
"""The operation, the key, the value and the time, by which a record is told from all others."""
STEPS = 25


class Kept:
    """A log, what it should hold, and how far it holds each other log."""

    def __init__(self, name: str) -> None:
        self.name, self.log = name, MemoryLog()
        self.rows: list[Row] = []
        self.copied: dict[str, int] = {}

    def append(self, rows: list[Row]) -> None:
        ops, keys, values, times = (list(column) for column in zip(*rows, strict=True))
        with self.log.producer() as producer:
            producer.append_batch(
                pa.Table.from_batches([record_batch(timestamps=times, ops=ops, keys=keys, values=values)])
            )
        self.rows += rows


class World:
    """Three logs, of which each may be ingested into another one and have writers of its own, and a table."""

    def __init__(self, seed: int, kind: str, folder: Path) -> None:
        self.dice, self.kind, self.place = random.Random(seed), kind, folder / "table"
        self.mode = self.dice.choice(["append", "latest"])
        self.logs = [Kept(name) for name in "xyz"]
        self.followed: Kept | None = None
        self.held: list[Row] = []
        self.start = self.cursor = self.count = 0
        self.outcomes: Counter[str] = Counter()

    def sink(self) -> Any:
        if self.kind == "delta":
            return sl.DeltaSink(self.place, mode=self.mode)
        return sl.SqliteSink(self.place, table="orders", mode=self.mode)

    def check(self) -> None:
        """The table has the rows that the model has: nothing is doubled, and nothing lost."""
        if self.followed is None:
            return
        expected: dict[Any, tuple[int, bytes, bytes | None]] = {}
        for offset, (op, key, value, _) in enumerate(self.held, self.start):
            if op and self.mode == "latest":
                expected.pop(key, None)
            else:
                expected[offset if self.mode == "append" else key] = (offset, key, value)
        assert self.rows() == sorted(expected.values())
        assert self.sink().cursor(self.followed.log.log_id).next == self.cursor

    def rows(self) -> list[tuple[int, bytes, bytes | None]]:
        if self.kind == "delta":
            found = DeltaTable(self.place).to_pyarrow_table(columns=["offset", "key", "value"]).to_pydict()
            return sorted(zip(*found.values(), strict=True))
        with closing(sqlite3.connect(self.place)) as database:
            return sorted(database.execute("SELECT offset, key, value FROM orders"))

    def append(self) -> None:
        rows: list[Row] = []
        for _ in range(self.dice.randint(1, 6)):
            self.count += 1
            op = int(self.dice.random() < 0.2)
            rows.append((op, b"k%d" % self.dice.randrange(4), None if op else b"v%d" % self.count, self.count))
        self.dice.choice([*self.logs[:1] * 7, *self.logs]).append(rows)

    def follow(self) -> None:
        log = self.followed or self.dice.choice(self.logs[:2])
        begin = log.log.bounds().first if self.followed is None else self.cursor
        end = self.dice.randint(begin, max(begin, len(log.rows)))
        if begin == len(log.rows):
            return
        with suppress(CursorExpired):
            sl.follow(log.log, self.sink(), start="retained" if self.followed is None else "beginning", upto=end)
            if self.followed is None:
                self.followed, self.start = log, begin
            self.held += log.rows[begin:end]
            self.cursor = end

    def ingest(self) -> None:
        source, target = self.dice.choice([(0, 1), (0, 1), (0, 1), (1, 0), (1, 2), (0, 2)])
        origin, copy = self.logs[source], self.logs[target]
        before, start = len(copy.rows), self.dice.choice(["beginning", "beginning", "retained"])
        with suppress(CursorExpired, Diverged, OutOfOrder):
            sl.ingest(origin.log, copy.log, start=start, skip_trimmed=self.dice.random() < 0.3)
            taken = copy.log.end().next - before
            if taken:
                copy.rows += origin.rows[-taken:]
                copy.copied[origin.name] = len(origin.rows)

    def trim(self) -> None:
        log = self.dice.choice(self.logs)
        if log.rows and self.dice.random() < 0.3:
            log.log.trim(self.dice.randint(log.log.bounds().first, len(log.rows)))

    def move(self) -> None:
        former, new = self.followed, self.dice.choice([*self.logs[:2] * 2, self.logs[2]])
        if former is None:
            return
        before = self.rows()
        try:
            moved = sl.bulk.move_table(self.sink(), former.log, new.log)
        except (Unsupported, NotReady, CursorExpired, NotFound) as error:
            self.outcomes[type(error).__name__] += 1
            self.check_refused(former, new, error)
            return
        self.outcomes["there" if moved.was_there else "moved"] += 1
        assert moved.was_there is (new is former)
        assert self.rows() == before
        assert new.rows[self.start : self.cursor] == self.held
        self.followed = new
        if new is not former:
            new.log.plan(moved.cursor, Limit(batches=1))
            with pytest.raises(Diverged):
                sl.follow(former.log, self.sink(), upto="end", repair=self.dice.random() < 0.5)

    def check_refused(self, former: Kept, new: Kept, error: Exception) -> None:
        """It had a reason: what the table holds is elsewhere, or the logs cannot show that it is not."""
        there, back = new.copied.get(former.name, 0), former.copied.get(new.name, 0)
        if isinstance(error, NotReady):
            assert there < max(1, self.cursor)
        elif isinstance(error, Unsupported) and self.held and bool(there) != bool(back) and "z" not in (
            former.name, new.name,  # it may have the same records by way of another log
        ):  # fmt: skip
            assert new.rows[self.start : self.cursor] != self.held
        elif isinstance(error, CursorExpired):
            assert max(log.log.bounds().first for log in (former, new)) > self.start


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["sqlite", "delta"])
def test_a_table_is_always_the_fold_of_the_log_that_it_follows(kind: str, tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(60):
        (tmp_path / str(seed)).mkdir()
        world = World(seed, kind, tmp_path / str(seed))
        for _ in range(STEPS):
            world.dice.choice([world.append, world.follow, world.ingest, world.ingest, world.move, world.trim])()
            world.check()
        outcomes += world.outcomes
    assert min(outcomes[each] for each in ("moved", "there", "Unsupported", "NotReady")) > 2, outcomes
