"""A sink of one's own: a full-text index of orders in SQLite, exactly in step with a log."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pyarrow as pa

import strandline as sl
from strandline.followers import remaining


class OrderSearch:
    """The newest value of each key, searchable by its words. Rows and cursor are one transaction."""

    def __init__(self, path: Path | str) -> None:
        """Open the index in a file, or create it."""
        self.db = sqlite3.connect(path)
        with self.db:
            self.db.execute("create virtual table if not exists orders using fts5(key unindexed, value)")
            self.db.execute("create table if not exists position (only_row integer primary key, cursor text)")

    def cursor(self, log_id: UUID) -> sl.Cursor | None:
        """The stored cursor; an index of another log is refused."""
        row = self.db.execute("select cursor from position").fetchone()
        cursor = None if row is None else sl.Cursor.parse(row[0])
        if cursor is not None and cursor.log_id != log_id:
            raise sl.errors.Diverged(f"This index follows {cursor.log_id}, not {log_id}: use another file.")
        return cursor

    def apply(self, records: pa.Table, *, since: sl.Cursor, upto: sl.Cursor) -> None:
        """Store the records of a range and its cursor, both or neither."""
        with self.db:
            self.db.execute("begin immediate")  # a second follower waits, and then sees the first one's cursor
            rest = remaining(records, since=since, upto=upto, at=self.cursor(since.log_id))
            if rest is not None:
                self.store_rows(rest)
                self.store_cursor(upto)

    def store_rows(self, records: pa.Table) -> None:
        """Put and remove rows."""
        for op, key, value in zip(*(records.column(name).to_pylist() for name in ("op", "key", "value")), strict=True):
            self.db.execute("delete from orders where key = ?", (key,))
            if op == sl.Op.PUT:
                self.db.execute("insert into orders values (?, ?)", (key, (value or b"").decode()))

    def store_cursor(self, cursor: sl.Cursor) -> None:
        """Move the cursor."""
        self.db.execute("insert or replace into position values (1, ?)", (str(cursor),))

    def rows(self) -> Iterator[tuple[bytes, str]]:
        """Every key with its text."""
        yield from self.db.execute("select key, value from orders order by key")

    def find(self, words: str) -> list[bytes]:
        """The keys of all orders that have these words."""
        return [key for (key,) in self.db.execute("select key from orders where orders match ? order by key", (words,))]
