"""Replay of dead letters: records that can be decoded by now become rows of their table, each once, in its place.

Applying a letter again changes nothing: a table of all changes is asked for the letter's offset, and in a keyed table
everything that happened to the letter's key since then is merged again, as the log has it. So a table that is committed
before its letters are removed may crash in between. Each record since has to have the key by which the table holds it:
otherwise the table would hold it twice, and nothing is written. Table and letters are proved against the log first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import Conflict, Contended, Diverged, InvalidInput
from strandline.log.contract import Log
from strandline.log.read.erased_records import same_unless_erased
from strandline.model.cursor import Cursor, Limit
from strandline.model.records import READ_SCHEMA
from strandline.tables.rows.bad_records import first_bad
from strandline.tables.rows.kinds import KeyRewind
from strandline.tables.rows.shape import BAD_SCHEMA, ShapedRows, TableShape

R = TypeVar("R")
T = TypeVar("T")
_ATTEMPTS: Final = 8
PAIRS: Final = pa.schema({"offset": pa.int64(), "key": pa.binary()})
"""Offset and key of a row."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of a replay: how many dead letters were applied, and how many stay, by cause."""

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
class LetterChanges:
    """Changes of a table by a replay."""

    rows: pa.Table
    """Rows that a table of all changes lacks; or all changes of some keys since an offset, in order."""
    rewind: KeyRewind | None = None
    """These keys and that offset."""


class ReplayedTable(Protocol):
    """A table and its letters, in step with its log. Only :meth:`apply` writes; ``Conflict`` beside other commits."""

    @property
    def start(self) -> int:
        """The offset at which the table began."""

    @property
    def cursor(self) -> Cursor:
        """The table's cursor, with the fingerprint that the table has stored."""

    def columns(self) -> pa.Schema:
        """Its columns."""

    def letters(self) -> tuple[pa.Table, int]:
        """Its letters, with the columns of a record; and how many are of other tables at the same place."""

    def pairs(self, offset: str, key: str | None, since: int) -> Iterable[pa.Table]:
        """Offset and key of rows from an offset on (:data:`PAIRS`), by columns' names; null keys without ``key``."""

    def apply(self, changes: LetterChanges | None, done: pa.Array) -> None:
        """Commit the changes, if any, then remove the letters with these offsets; or both in one step."""


@dataclass(slots=True)
class LetterReplay:
    """Replays the letters of the table that ``opened`` gives, if there are any; ``shaped`` gives rows of records."""

    where: str
    opened: Callable[[], ReplayedTable | None]
    shape: TableShape
    shaped: Callable[[pa.Table], ShapedRows]
    log: Log = field(repr=False)

    def run(self, *, dry_run: bool = False) -> Replayed:
        """Apply and remove what can be decoded by now; again if another job committed meanwhile.

        ``dry_run`` writes nothing: the result is what a replay would do now.
        ``InvalidInput`` if the table does not keep offsets, or a record since has another key than in the table;
        ``Diverged`` if the log has another history than the table or its letters.
        """
        return repeated(
            self.where, self.opened, lambda table: self._replayed(table, dry_run=dry_run), Replayed(0, 0, 0)
        )

    def stored(self) -> pa.Table:
        """The letters of the offsets that the table holds, each once, in the order of their offsets."""
        nothing = BAD_SCHEMA.empty_table()
        return repeated(self.where, self.opened, lambda table: self._held(table, table.letters()[0]), nothing)

    def _replayed(self, table: ReplayedTable, *, dry_run: bool) -> Replayed:
        own, of_others = table.letters()
        found, expired, first = self._held(table, own), 0, self.log.bounds().first
        prove_letters(self.log, table.cursor, found, first, self.where)
        if self.shape.is_keyed:
            is_kept = pc.greater_equal(found.column("offset"), first)
            expired = found.num_rows - (pc.sum(is_kept).as_py() or 0)
            found = found.filter(is_kept)
        shaped = self.shaped(found.select(READ_SCHEMA.names).cast(READ_SCHEMA))
        bad, offsets = shaped.bad.sort_by("offset"), pc.unique(found.column("offset"))
        unreadable = pc.unique(bad.column("offset"))
        done = offsets.filter(pc.invert(pc.is_in(offsets, value_set=unreadable)))
        changes = None
        if shaped.rows.num_rows:
            changes = (self._since if self.shape.is_keyed else self._missing)(table, shaped.rows)
        if len(done) and not dry_run:
            table.apply(changes, done)
        return Replayed(len(done), len(unreadable), expired, first_bad(bad), of_others)

    @staticmethod
    def _held(table: ReplayedTable, letters: pa.Table) -> pa.Table:
        """The letters of what the table holds: not of an earlier table, nor of a range not committed yet."""
        offsets = letters.column("offset")
        is_held = pc.and_(pc.greater_equal(offsets, table.start), pc.less(offsets, table.cursor.next))
        found = letters.filter(is_held).sort_by("offset")
        return found.take(_firsts(found.column("offset"))).select(BAD_SCHEMA.names)

    def _missing(self, table: ReplayedTable, changes: pa.Table) -> LetterChanges:
        """The changes that a table of all changes does not have yet."""
        name = self.shape.names.offset
        if name not in table.columns().names or name not in changes.column_names:
            raise InvalidInput(
                f"The table {self.where} does not keep the offsets of its records ({name}), so that letters could be "
                "applied twice: rebuild it ('strandline table rebuild')."
            )
        since = pc.min(changes.column(name)).as_py()
        has = [pa.array([], pa.int64()), *[pc.unique(one.column("offset")) for one in table.pairs(name, None, since)]]
        missing = changes.filter(pc.invert(pc.is_in(changes.column(name), value_set=pa.concat_arrays(has))))
        return LetterChanges(missing)

    def _since(self, table: ReplayedTable, changes: pa.Table) -> LetterChanges:
        """All changes of the letters' keys since the first letter; ``InvalidInput`` if one has another key by now."""
        names = self.shape.names
        keys, since = pc.unique(changes.column(names.key)), pc.min(changes.column(names.offset)).as_py()
        found, given, bad = [changes.slice(0, 0)], [PAIRS.empty_table()], [pa.array([], pa.int64())]
        for batch in self.log.read(since, upto=table.cursor.next):
            records = pa.Table.from_batches([batch])
            if self.shape.has_record_keys:
                records = records.filter(pc.is_in(records.column("key"), value_set=keys))
            if records.num_rows:
                shaped = self.shaped(records)
                given.append(pairs_of(shaped.rows, names.offset, names.key))
                bad.append(pc.unique(shaped.bad.column("offset")))
                found.append(shaped.rows.filter(pc.is_in(shaped.rows.column(names.key), value_set=keys)))
        self._refuse_other_keys(table, pa.concat_tables(given), pa.concat_arrays(bad), since)
        return LetterChanges(pa.concat_tables(found, promote_options="default"), KeyRewind(since, keys))

    def _refuse_other_keys(self, table: ReplayedTable, given: pa.Table, bad: pa.Array, since: int) -> None:
        """``InvalidInput`` if the table holds one of these records under a key that it is not given now."""
        names = self.shape.names
        of_changes = (names.offset,) if self.shape.kind == "latest" else (names.valid[0], names.valid[2])
        offsets = pa.concat_arrays([pc.unique(given.column("offset")), bad])
        for name in of_changes:
            for rows in table.pairs(name, names.key, since):
                held = rows.filter(pc.is_in(rows.column("offset"), value_set=offsets))
                other = held.join(given, ["offset", "key"], join_type="left anti")
                if other.num_rows:
                    raise InvalidInput(
                        f"The table {self.where} has a row of the record at offset "
                        f"{pc.min(other.column('offset')).as_py()} under a key that the record no longer has with this "
                        "schema and transform, so that a replay would double or lose rows: rebuild the table "
                        "('strandline table rebuild')."
                    )


def repeated(where: str, opened: Callable[[], T | None], job: Callable[[T], R], nothing: R) -> R:
    """What a job does on a table and its letters, again if another job committed meanwhile."""
    for _ in range(_ATTEMPTS):
        try:
            table = opened()
            return nothing if table is None else job(table)
        except Conflict:
            continue
    raise Contended(
        f"Other jobs committed to the table {where}, or to its dead letters, at each of {_ATTEMPTS} tries: try again."
    )


def pairs_of(rows: pa.Table, offset: str, key: str | None) -> pa.Table:
    """Offset and key of each row; null without a key."""
    keys = pa.nulls(rows.num_rows, pa.binary()) if key is None else rows.column(key)
    return pa.table({"offset": rows.column(offset), "key": keys}).cast(PAIRS)


def _firsts(offsets: pa.ChunkedArray) -> pa.Array:
    """The position of the first row of each offset."""
    places = pa.table({"offset": offsets, "row": pa.array(range(len(offsets)), pa.int64())})
    found: pa.Array = places.group_by("offset").aggregate([("row", "min")]).column("row_min").combine_chunks()
    return found.take(pc.sort_indices(found))


_GAP: Final = 10_000
"""Offsets between two letters that are read rather than skipped: a new plan takes longer."""


def prove_letters(log: Log, cursor: Cursor, letters: pa.Table, first: int, where: str) -> None:
    """``Diverged`` if the log does not serve the table's cursor, or has another record at the offset of a letter.

    A log that was restored from a copy has other records at the same offsets. Letters may be older than the table, so
    that each is compared; those of records that the log no longer retains rest on the cursor alone.
    ``letters`` are in the order of their offsets; those below ``first`` are not retained. ``CursorExpired`` if the
    cursor is not, so that nothing can be proved.
    """
    log.plan(cursor, Limit(batches=1))
    letters = letters.select(READ_SCHEMA.names).cast(READ_SCHEMA)
    letters = letters.filter(pc.greater_equal(letters.column("offset"), first))
    records = _records_at(log, pc.unique(letters.column("offset")))
    if same_unless_erased(letters, records):
        return
    for row, offset in enumerate(letters.column("offset").to_pylist()):
        if not same_unless_erased(letters.slice(row, 1), records.slice(row, 1)):
            raise Diverged(
                f"The dead letter of offset {offset} of the table {where} is not the record that the log has there: "
                "the log was restored from a copy, and grew differently. Nothing was changed: rebuild the table "
                "('strandline table rebuild'), which replaces its letters, too."
            )


def _records_at(log: Log, offsets: pa.Array) -> pa.Table:
    found = [
        batch.filter(pc.is_in(batch.column("offset"), value_set=offsets))
        for some in _ranges(offsets.to_pylist())
        for batch in log.read(some.start, upto=some.stop)
    ]
    return pa.Table.from_batches(found, READ_SCHEMA)


def _ranges(offsets: list[int]) -> Iterator[range]:
    """The ranges of a log that hold some offsets, which ascend.

    >>> list(_ranges([3, 5, 90_000]))
    [range(3, 6), range(90000, 90001)]
    """
    since = 0
    for place, offset in enumerate(offsets):
        if place + 1 == len(offsets) or offsets[place + 1] - offset > _GAP:
            yield range(offsets[since], offset + 1)
            since = place + 1
