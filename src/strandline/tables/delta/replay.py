"""Replay of dead letters: records that can be decoded by now become rows of their table, each once, in its place.

The table is committed first, then the letters are removed. A crash in between is harmless, because applying a letter
again changes nothing: a table of all changes is asked for the letter's offset, and in a keyed table everything that
happened to the letter's key since then is merged again, as the log has it. For that each record since has to have the
key by which the table holds it: otherwise the table would hold it twice, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import Conflict, Contended, Diverged, InvalidInput, NotFound
from strandline.model.cursor import Cursor
from strandline.model.records import READ_SCHEMA
from strandline.storage.clock import CHANCE
from strandline.tables.delta.files import added, removed
from strandline.tables.delta.history import letter_logs
from strandline.tables.delta.letters import LettersOf, address_in_letters, check_letters
from strandline.tables.delta.table import FollowedDelta, columns_of, data_files, id_of, log_of
from strandline.tables.files import write_file
from strandline.tables.kinds import Rewind, distinct
from strandline.tables.layout import WHOLE, KeptFile
from strandline.tables.part import TablePart, in_schema
from strandline.tables.shape import LETTER_SCHEMA, TableShape

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from strandline.model.sink import DataFile

ReadLog: TypeAlias = Callable[[int, int], Iterable[pa.RecordBatch]]
"""The records of the log between two offsets."""

_ATTEMPTS: Final = 8
_PAIRS: Final = pa.schema({"offset": pa.int64(), "key": pa.binary()})


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay did with the dead letters of a table."""

    applied: int
    """Letters whose records the table has now; they are removed from the dead-letter table."""
    unreadable: int
    """Letters that still cannot become rows; they stay."""
    expired: int
    """Letters that stay because the log no longer has the records since, which decide what their keys have now."""
    first_reason: str = ""
    """Offset and reason of the first one that cannot become a row."""
    of_others: int = 0
    """Letters that name other tables; they stay."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The letters to replay: their changes, and the offsets that are done once these are in the table."""

    changes: pa.Table
    done: pa.Array
    bad: pa.Table
    expired: int
    of_others: int

    def result(self) -> Replayed:
        first = ""
        if self.bad.num_rows:
            first = f"offset {self.bad.column('offset')[0].as_py()}: {self.bad.column('reason')[0].as_py()}"
        return Replayed(len(self.done), len(distinct(self.bad.column("offset"))), self.expired, first, self.of_others)


@dataclass(slots=True)
class LetterReplay:
    """Replays the letters of one table; ``read`` reads its log, which retains everything from ``first`` on."""

    followed: FollowedDelta
    letters_of: LettersOf
    shape: TableShape
    log_id: UUID
    first: int
    read: ReadLog = field(repr=False)

    def run(self) -> Replayed:
        """Apply and remove what can be decoded by now; again if another job committed meanwhile.

        ``NotFound`` without a table, ``Diverged`` if it is not the one of the log, ``InvalidInput`` if the letters are
        of several logs, the table does not keep offsets, or a record since has another key than in the table.
        """
        for _ in range(_ATTEMPTS):
            try:
                return self._attempt()
            except Conflict:
                continue
        raise Contended(
            f"Other jobs committed to the table {self.followed.url}, or to its dead letters, at each of {_ATTEMPTS} "
            "tries: try again."
        )

    def _attempt(self) -> Replayed:
        table = self.followed.open()
        if table is None:
            raise NotFound(f"There is no table at {self.followed.url}.")
        at = self.followed.last_commit(table, self.log_id).cursor
        letters = self.letters_of(id_of(table))
        box = letters.open()
        if box is None:
            return Replayed(0, 0, 0)
        check_letters(letters, box)
        letters.refuse_append_only(box, "a replay removes letters")
        self._check_logs(letters, box)
        chosen = self._chosen(letters, box, range(self.followed.start(table), at.next))
        if chosen.changes.num_rows:
            since_then = self._since(table, chosen.changes, at) if self.shape.is_keyed else []
            table = self.followed.evolved(table, at)
            self._apply(table, chosen.changes, since_then, at)
        if len(chosen.done):
            self._remove(letters, box, chosen.done, at)
        return chosen.result()

    def _check_logs(self, letters: FollowedDelta, box: DeltaTable) -> None:
        """Letters carry offsets, and no log: they can be replayed only if all are of one log."""
        commits = (letters.read_commit(version) for version in range(box.version() + 1))
        others = {log_of(box), *letter_logs(commits)} - {None, str(self.log_id)}
        if others:
            raise InvalidInput(
                f"The dead letters {letters.url} are of several logs, or of another one ({min(map(str, others))}): "
                "letters can be replayed if each log has a dead-letter table of its own."
            )

    def _chosen(self, letters: FollowedDelta, box: DeltaTable, held: range) -> _Chosen:
        """The table's letters, of the offsets that it holds: an earlier table at this address may have had others.

        Letters from the cursor on are of a range that was not committed yet.
        """
        files = [in_schema(letters.files.read(path), LETTER_SCHEMA) for path in data_files(box)]
        found = pa.concat_tables([LETTER_SCHEMA.empty_table(), *files])
        of_all = found.num_rows
        found = found.filter(self._is_mine(found))
        of_others = of_all - found.num_rows
        offsets = found.column("offset")
        is_held = pc.and_(pc.greater_equal(offsets, held.start), pc.less(offsets, held.stop))
        found = found.filter(is_held).sort_by("offset")
        found = found.take(_firsts(found.column("offset")))
        expired = 0
        if self.shape.is_keyed:
            is_kept = pc.greater_equal(found.column("offset"), self.first)
            expired = found.num_rows - (pc.sum(is_kept).as_py() or 0)
            found = found.filter(is_kept)
        records = found.select(READ_SCHEMA.names).cast(READ_SCHEMA)
        shaped = self.shape.rows(records)
        offsets = distinct(found.column("offset"))
        is_done = pc.invert(pc.is_in(offsets, value_set=distinct(shaped.bad.column("offset"))))
        return _Chosen(shaped.rows, offsets.filter(is_done), shaped.bad.sort_by("offset"), expired, of_others)

    def _is_mine(self, letters: pa.Table) -> pa.ChunkedArray:
        return pc.equal(letters.column("of_table"), address_in_letters(self.followed.url))

    def _apply(self, table: DeltaTable, changes: pa.Table, since_then: list[pa.Table], at: Cursor) -> None:
        part = TablePart(self.shape, columns_of(table), self.followed.files, str(CHANCE.uuid()))
        gone: list[str] = []
        if self.shape.is_keyed:
            adds, gone = self._merged(table, replace(part, share=WHOLE), changes, since_then)
        else:
            adds = self._added(table, part, changes)
        if not adds and not gone:
            return
        now, known = self.followed.now(), data_files(table)
        actions = [*[added(file, now) for file in adds], *[removed(*known[path], now) for path in gone]]
        self.followed.commit(table, actions, at)

    def _added(self, table: DeltaTable, part: TablePart, changes: pa.Table) -> list[DataFile]:
        """The changes that a table of all changes does not have yet."""
        name = self.shape.names.offset
        if name not in columns_of(table).names or name not in changes.column_names:
            raise InvalidInput(
                f"The table {self.followed.url} does not keep the offsets of its records ({name}), so that letters "
                "could be applied twice: build it again with sl.tables.rebuild."
            )
        offsets = distinct(changes.column(name))
        has = [pa.array([], pa.int64())]
        for path in data_files(table):
            known = part.files.read(path).column(name)
            has.append(distinct(known.filter(pc.is_in(known, value_set=offsets))))
        missing = changes.filter(pc.invert(pc.is_in(changes.column(name), value_set=pa.concat_arrays(has))))
        return part.appended(missing)

    def _merged(
        self, table: DeltaTable, part: TablePart, changes: pa.Table, since_then: list[pa.Table]
    ) -> tuple[list[DataFile], list[str]]:
        """All that happened to the letters' keys since the first letter, merged into the rows from before it."""
        keys, since = self._keys_since(changes)
        old = tuple(KeptFile(path, size, is_shared=False) for path, (_, size) in data_files(table).items())
        rewind = Rewind(since, keys) if self.shape.kind == "history" else None
        return replace(part, old=old, rewind=rewind).merged(since_then)

    def _keys_since(self, changes: pa.Table) -> tuple[pa.Array, int]:
        names = self.shape.names
        return distinct(changes.column(names.key)), pc.min(changes.column(names.offset)).as_py()

    def _since(self, table: DeltaTable, changes: pa.Table, at: Cursor) -> list[pa.Table]:
        """All changes of the letters' keys since the first letter; ``InvalidInput`` if one has another key by now."""
        names = self.shape.names
        keys, since = self._keys_since(changes)
        found, given, bad = [], [_PAIRS.empty_table()], [pa.array([], pa.int64())]
        for batch in self.read(since, at.next):
            records = pa.Table.from_batches([batch])
            if self.shape.has_record_keys:
                records = records.filter(pc.is_in(records.column("key"), value_set=keys))
            if records.num_rows:
                shaped = self.shape.rows(records)
                given.append(_pairs(shaped.rows, names.offset, names.key))
                bad.append(distinct(shaped.bad.column("offset")))
                found.append(shaped.rows.filter(pc.is_in(shaped.rows.column(names.key), value_set=keys)))
        self._refuse_other_keys(table, pa.concat_tables(given), pa.concat_arrays(bad))
        return found

    def _refuse_other_keys(self, table: DeltaTable, given: pa.Table, bad: pa.Array) -> None:
        """``InvalidInput`` if the table holds one of these records under a key that it is not given now."""
        names, schema = self.shape.names, columns_of(table)
        of_changes = (names.offset,) if self.shape.kind == "latest" else (names.valid[0], names.valid[2])
        offsets = pa.concat_arrays([distinct(given.column("offset")), bad])
        for path in data_files(table):
            rows = in_schema(self.followed.files.read(path), schema)
            for name in of_changes:
                held = _pairs(rows, name, names.key)
                held = held.filter(pc.is_in(held.column("offset"), value_set=offsets))
                other = held.join(given, ["offset", "key"], join_type="left anti")
                if other.num_rows:
                    first = pc.min(other.column("offset")).as_py()
                    raise InvalidInput(
                        f"The table {self.followed.url} has a row of the record at offset {first} under a key that the "
                        "record no longer has with this schema and transform, so that a replay would double or lose "
                        "rows: rebuild the table with sl.tables.rebuild."
                    )

    def _remove(self, letters: FollowedDelta, box: DeltaTable, done: pa.Array, at: Cursor) -> None:
        """Remove the table's letters of these offsets, and no other table's."""
        now = letters.now()
        actions: list[Any] = []
        for path, (stored, size) in data_files(box).items():
            rows = in_schema(letters.files.read(path), LETTER_SCHEMA)  # others may have written it with other types
            is_done = pc.and_(self._is_mine(rows), pc.is_in(rows.column("offset"), value_set=done))
            if not pc.any(is_done).as_py():
                continue
            kept = rows.filter(pc.invert(is_done))
            actions.append(removed(stored, size, now))
            if kept.num_rows:
                name = f"part-{CHANCE.uuid()}-{CHANCE.uuid()}.parquet"
                actions.append(added(write_file(letters.files, name, kept), now))
        try:
            known = letters.next_in(box, self.log_id)
        except Diverged:  # these letters are of an earlier table at this place
            known = at.next
        if actions:
            letters.commit(box, actions, Cursor(self.log_id, known))


def _pairs(rows: pa.Table, offset: str, key: str) -> pa.Table:
    """Offset and key of each row."""
    return rows.select([offset, key]).rename_columns(["offset", "key"]).cast(_PAIRS)


def _firsts(offsets: pa.ChunkedArray) -> pa.Array:
    """The position of the first row of each offset."""
    places = pa.table({"offset": offsets, "row": pa.array(range(len(offsets)), pa.int64())})
    found: pa.Array = places.group_by("offset").aggregate([("row", "min")]).column("row_min").combine_chunks()
    return found.take(pc.sort_indices(found))
