"""Contract suite for sinks, and a sink in memory."""
# ruff: noqa: D102 - the name of a test is its sentence, and its numbers are its example

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from uuid import UUID

import pyarrow as pa
import pytest

from strandline.errors import Diverged, Gap
from strandline.model.cursor import Cursor
from strandline.model.records import READ_SCHEMA, Op, record_batch, with_offsets
from strandline.model.sink import Sink, remaining

LOG = UUID(int=1)

Change = tuple[bytes | None, bytes | None]
"""A key and its new value. In a list of changes the value ``DELETE`` removes the key."""

DELETE = b"\0delete"


def changes(first: int, *rows: Change) -> pa.Table:
    """Records with offsets from ``first`` on."""
    gone = [value == DELETE for _, value in rows]
    batch = record_batch(
        timestamps=range(first, first + len(rows)),
        ops=[Op.DELETE if delete else Op.PUT for delete in gone],
        keys=[key for key, _ in rows],
        values=[None if delete else value for (_, value), delete in zip(rows, gone, strict=True)],
    )
    return pa.Table.from_batches(with_offsets([batch], first), READ_SCHEMA)


def folded(rows: Sequence[Change]) -> dict[bytes | None, bytes | None]:
    """The expected state: the newest value of each key that was not deleted since, by plain Python."""
    state: dict[bytes | None, bytes | None] = {}
    for key, value in rows:
        if value == DELETE:
            state.pop(key, None)
        else:
            state[key] = value
    return state


class MemorySink:
    """A sink in memory: every record, and the cursor. Tests may inspect it."""

    def __init__(self) -> None:
        """A newcomer."""
        self.records: list[pa.Table] = []
        self.at: Cursor | None = None
        self.applies = 0

    def cursor(self, log_id: UUID) -> Cursor | None:
        """The stored cursor in that log."""
        if self.at is not None and self.at.log_id != log_id:
            raise Diverged(f"This sink follows log {self.at.log_id}, not {log_id}.")
        return self.at

    def apply(self, records: pa.Table, *, since: Cursor, upto: Cursor) -> None:
        """Store the range and the cursor."""
        todo = remaining(records, since=since, upto=upto, at=self.cursor(since.log_id))
        if todo is None:
            return
        self.applies += 1
        self.records.append(todo)
        self.at = upto

    def rows(self) -> list[tuple[int, bytes | None, bytes | None]]:
        """Offset, key and value of everything applied, in order."""
        table = pa.concat_tables([READ_SCHEMA.empty_table(), *self.records])
        columns = (table.column(name).to_pylist() for name in ("offset", "key", "value"))
        return list(zip(*columns, strict=True))


class SinkContract(ABC):
    """Every sentence of :class:`~strandline.model.sink.Sink`, as a test.

    A subclass named ``Test...`` defines the fixture ``sink``, an empty sink for each test, and :meth:`content`.
    """

    null: bytes | None = None
    """The stored form of a null value."""

    @abstractmethod
    def content(self, sink: Sink) -> Mapping[bytes | None, bytes | None]:
        """The newest value of each key that the sink holds and that was not deleted."""

    def apply(self, sink: Sink, first: int, *rows: Change, since: int | None = None) -> Cursor:
        """Apply changes from offset ``first`` on; returns the cursor after them."""
        upto = Cursor(LOG, first + len(rows))
        sink.apply(changes(first, *rows), since=upto.at(first if since is None else since), upto=upto)
        return upto

    def test_a_newcomer_has_no_cursor(self, sink: Sink) -> None:
        assert sink.cursor(LOG) is None

    def test_data_and_cursor_are_there_after_apply(self, sink: Sink) -> None:
        upto = self.apply(sink, 0, (b"a", b"1"), (b"b", b"2"))
        assert sink.cursor(LOG) == upto
        assert self.content(sink) == {b"a": b"1", b"b": b"2"}

    def test_the_newest_by_offset_wins_and_deletes_remove(self, sink: Sink) -> None:
        rows = [(b"a", b"1"), (b"b", b"2"), (b"a", b"3"), (b"c", b"4"), (b"b", DELETE), (b"c", None)]
        self.apply(sink, 0, *rows)
        assert folded(rows) == {b"a": b"3", b"c": None}
        assert self.content(sink) == {b"a": b"3", b"c": self.null}
        later = [(b"a", DELETE), (b"b", b"again"), (b"d", DELETE)]
        self.apply(sink, 6, *later)
        assert folded([*rows, *later]) == {b"b": b"again", b"c": None}
        assert self.content(sink) == {b"b": b"again", b"c": self.null}

    def test_applying_the_same_range_again_changes_nothing(self, sink: Sink) -> None:
        self.apply(sink, 0, (b"a", b"1"), (b"b", b"2"))
        upto = self.apply(sink, 2, (b"a", b"3"))
        self.apply(sink, 0, (b"a", b"1"), (b"b", b"2"))
        assert sink.cursor(LOG) == upto
        assert self.content(sink) == {b"a": b"3", b"b": b"2"}

    def test_of_an_overlapping_range_only_what_is_new_is_applied(self, sink: Sink) -> None:
        self.apply(sink, 0, (b"a", b"1"), (b"b", DELETE))
        # Had the records below the cursor been applied again, "b" would be back.
        upto = self.apply(sink, 0, (b"a", b"1"), (b"b", b"ghost"), (b"c", b"3"))
        assert sink.cursor(LOG) == upto
        assert self.content(sink) == {b"a": b"1", b"c": b"3"}

    def test_a_range_above_the_cursor_is_a_gap_and_changes_nothing(self, sink: Sink) -> None:
        at = self.apply(sink, 0, (b"a", b"1"))
        with pytest.raises(Gap, match="skip 4 records"):
            self.apply(sink, 5, (b"a", b"2"))
        assert sink.cursor(LOG) == at
        assert self.content(sink) == {b"a": b"1"}

    def test_a_newcomer_begins_where_its_follower_says(self, sink: Sink) -> None:
        cursor = Cursor(LOG, 40)
        sink.apply(READ_SCHEMA.empty_table(), since=cursor, upto=cursor)
        assert sink.cursor(LOG) == cursor
        self.apply(sink, 40, (b"a", b"1"))
        assert sink.cursor(LOG) == cursor.at(41)

    def test_a_range_without_records_moves_the_cursor(self, sink: Sink) -> None:
        at = self.apply(sink, 0, (b"a", b"1"))
        sink.apply(READ_SCHEMA.empty_table(), since=at, upto=at.at(9))
        assert sink.cursor(LOG) == at.at(9)
        assert self.content(sink) == {b"a": b"1"}

    def test_deletes_of_absent_keys_move_the_cursor(self, sink: Sink) -> None:
        assert self.apply(sink, 0, (b"absent", DELETE)) == sink.cursor(LOG)
        assert self.apply(sink, 1, (b"absent", DELETE)) == sink.cursor(LOG)
        assert self.content(sink) == {}
        self.apply(sink, 2, (b"a", DELETE), (b"b", b"2"))
        assert self.apply(sink, 4, (b"absent", DELETE)) == sink.cursor(LOG)
        assert self.content(sink) == {b"b": b"2"}
        self.apply(sink, 5, (b"b", DELETE))
        assert self.apply(sink, 6, (b"b", DELETE)) == sink.cursor(LOG)
        assert self.content(sink) == {}

    def test_a_sink_of_another_log_is_diverged(self, sink: Sink) -> None:
        self.apply(sink, 0, (b"a", b"1"))
        with pytest.raises(Diverged):
            sink.cursor(UUID(int=2))
