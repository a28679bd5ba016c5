"""A worker's share of a range: shapes records, merges them into the rows of its files, writes files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import CorruptData, InvalidInput
from strandline.model.cursor import OffsetRange
from strandline.model.records import READ_SCHEMA, Op
from strandline.storage.clock import CHANCE
from strandline.tables.files.columns import changes_schema, in_schema
from strandline.tables.files.data_files import TableFiles, write_file, write_files
from strandline.tables.files.layout import (
    MAX_DEPTH,
    WHOLE,
    HashRange,
    file_name,
    groups,
    range_of,
)
from strandline.tables.rows.bad_records import first_bad, letter_ids, refused
from strandline.tables.rows.hashing import HASH_BITS, key_hashes
from strandline.tables.rows.kinds import ColumnNames, KeyRewind, in_offset_order, merged_rows
from strandline.tables.rows.partitions import PartitionValues, partitions
from strandline.tables.rows.shape import BAD_SCHEMA, LETTER_SCHEMA, ShapedRows, TableShape, TransformedElsewhere
from strandline.tables.written import DataFile, LetterId, Takes, Written
from strandline.values.codecs.arrow import TableArrow

if TYPE_CHECKING:
    import numpy as np


_CHUNK_ROWS: Final = 65_536


def as_tables(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Batches as tables, small ones together: each step on a table costs more than a small batch."""
    few: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        few.append(batch)
        size += batch.num_rows
        if size >= _CHUNK_ROWS:
            yield pa.Table.from_batches(few, READ_SCHEMA)
            few, size = [], 0
    if few:
        yield pa.Table.from_batches(few, READ_SCHEMA)


FILE_ROWS: Final = 1 << 20
"""A file with more rows is split when it is written."""
FILE_BYTES: Final = 256 << 20
"""Likewise one of an append with more bytes in memory."""
KEYED_BYTES: Final = 64 << 20
"""Likewise one of a keyed table: a merge holds its rows twice."""


@dataclass(frozen=True, slots=True)
class TablePart:
    """One worker's share of a range. Picklable: several workers may do its work, also at the same time.

    ``share`` is None for a part by offsets. ``floor``: records below are in the table already, and dropped.
    ``schema`` is the table's. Records without a row are written for the dead-letter table ``dead``; without one the
    first of them is raised.
    """

    shape: TableShape
    schema: pa.Schema
    files: TableFiles
    job: str
    """Part of the names of all files that are written for one transaction."""
    floor: int = 0
    share: HashRange | None = None
    old: tuple[str, ...] = ()
    """Files that may have to be written again; one beyond the share is by each of its workers, with its own rows."""
    dead: TableFiles | None = None
    known_letters: frozenset[LetterId] | None = None
    """Letters that are stored already."""
    address: str = ""
    """The table, as its dead letters name it."""
    grows: bool = False
    """Whether the table gets columns that self-describing values bring: the work is done again with those."""
    rewind: KeyRewind | None = None
    """For a replay: the changes are all that happened to these keys since, and replace what a history has of it."""

    @property
    def takes(self) -> Takes:
        """Whether it is given its own records, or all of them."""
        return "offsets" if self.share is None else "keys"

    @property
    def is_transformed(self) -> bool:
        """Whether its rows come from a transform that another engine runs."""
        return isinstance(self.shape.transform, TransformedElsewhere)

    def reader(self) -> PartReader:
        """Reads records for all parts; before a transform they are decoded, and no more."""
        return PartReader(replace(self, share=None, old=()))

    def numbers(self, rows: pa.Table, parts: int) -> np.ndarray:
        """The part of each row, by its key; all are in part 0 if parts are by offsets."""
        import numpy as np

        hashes = key_hashes(rows.column(self.shape.names.key)) if self.share is not None else np.zeros(rows.num_rows)
        return hashes.astype(np.uint64) >> np.uint64(HASH_BITS - (parts - 1).bit_length())

    def write(self, batches: Iterable[pa.RecordBatch]) -> Written:
        """Write data files of these records, in the order of their offsets. Changes nothing that a reader sees."""
        reader = PartReader(self)
        return self.stored(reader, reader.rows(batches))

    def stored(self, reader: PartReader, rows: Iterable[pa.Table]) -> Written:
        """Write files of the rows of a reader; returns its report."""
        added, removed, _ = self._stored(rows)
        return reader.report(added=tuple(added), removed=tuple(removed))

    def write_rows(self, tables: Iterable[pa.Table], *, number: int) -> Written:
        """Write files of shuffled rows, in any order. Those of a transform are not counted: it may drop some."""
        added, removed, rows = self._stored(tables)
        counted = 0 if self.is_transformed else rows
        return Written(0, 0, 0, counted, tuple(added), tuple(removed), role="writer", number=number)

    def _stored(self, tables: Iterable[pa.Table]) -> tuple[list[DataFile], list[str], int]:
        """Append or merge rows; returns the new files, the replaced ones, and how many rows were given."""
        added: list[DataFile] = []
        taken: list[pa.Table] = []
        rows = count = size = 0
        for table in tables:
            taken.append(table)
            rows += table.num_rows
            count += table.num_rows
            size += table.nbytes
            if self.share is None and (count >= FILE_ROWS or size >= FILE_BYTES):
                added += self.appended(taken)
                taken, count, size = [], 0, 0
        if self.share is None:
            return [*added, *self.appended(taken)], [], rows
        added, removed = self.merged(taken)
        return added, removed, rows

    def finished(self, rows: pa.Table, end: int) -> pa.Table:
        """Rows of a transform as the table stores them; ``InvalidInput`` for rows that a keyed table cannot place.

        Each row keeps offset, operation and time of its record, and has a key: the transform ran on the records from
        ``floor`` up to ``end``.
        """
        rows = self.shape.finished(rows)
        if self.share is None or not rows.num_rows:
            return rows
        names = self.shape.names
        for name in names.all:
            if rows.column(name).null_count:
                raise InvalidInput(
                    f"The transform of a {self.shape.kind} table gives a row whose {name} is null: filter it out."
                )
        offsets, ops = (pc.min_max(rows.column(name)).as_py() for name in (names.offset, names.op))
        if offsets["min"] < self.floor or offsets["max"] >= end or ops["min"] < 0 or ops["max"] > Op.PURGE:
            raise InvalidInput(
                f"The transform of a {self.shape.kind} table gives rows with the offsets {offsets['min']} to "
                f"{offsets['max']} and the operations {ops['min']} to {ops['max']}: rows keep {names.offset} and "
                f"{names.op} of their records, which are between {self.floor} and {end - 1}."
            )
        return rows

    def _unique(self) -> str:
        """A name that no other attempt has."""
        return f"{self.job}-{CHANCE.uuid()}"

    def new_name(self) -> str:
        """The name of a file of any keys."""
        return f"part-{self._unique()}.parquet"

    def shaped(self, records: pa.Table) -> ShapedRows:
        """The rows of the records at or above the floor; only decoded ones if they are transformed elsewhere."""
        if self.floor > 0:
            records = records.filter(pc.greater_equal(records.column("offset"), self.floor))
        shaped = ShapedRows(*self.shape.decoded(records)) if self.is_transformed else self.shape.rows(records)
        if shaped.bad.num_rows and self.dead is None and not self._offered(shaped.bad):
            raise refused(shaped.bad)
        if self.share is not None and not self.shape.has_record_keys:
            bad = shaped.bad if self.share.prefix == 0 else BAD_SCHEMA.empty_table()
            return ShapedRows(self.share.rows_of(shaped.rows, self.shape.names.key), bad)
        return shaped

    def _offered(self, bad: pa.Table) -> tuple[tuple[int, bytes], ...]:
        """The columns that bad records would bring to the table, if nobody has refused them yet."""
        codec = self.shape.value
        if not self.grows or not bad.num_rows or not isinstance(codec, TableArrow):
            return ()
        pairs = zip(*(bad.column(name).to_pylist() for name in ("offset", "value")), strict=True)
        heads: dict[bytes, int] = {}
        for offset, value in pairs:
            head = codec.offered(value)
            if head is not None:
                heads[head] = min(offset, heads.get(head, offset))
        return tuple((offset, head) for head, offset in heads.items())

    def appended(self, tables: list[pa.Table]) -> list[DataFile]:
        """Write files of changes that a table of all changes lacks; none without rows."""
        if not sum(table.num_rows for table in tables):
            return []
        rows = in_schema(pa.concat_tables(tables), self.schema)
        return list(write_files(self.files, self.new_name, rows, self.shape.layout))

    def merged(self, tables: list[pa.Table]) -> tuple[list[DataFile], list[str]]:
        """Merge changes into only those files that hold their keys; returns new files, and the replaced ones."""
        names = self.shape.names
        share = self.share or WHOLE
        changes = in_offset_order(tables, names) if tables else self.shape.changes_schema().empty_table()
        changes = in_schema(changes, changes_schema(self.schema, changes.schema, names))
        if self.is_transformed:
            _refuse_ambiguous(changes, names)
        hashes = key_hashes(changes.column(names.key))
        added: list[DataFile] = []
        removed: list[str] = []
        if not share.mask(hashes).all():
            raise CorruptData(
                "A row has a key of another worker's share. Nothing was committed: report this as a bug of strandline."
            )
        for covered, files in groups(self.old, share):
            mine = changes.filter(pa.array(covered.mask(hashes)))
            if mine.num_rows or not all(share.contains(range_of(path)) for path in files):
                new, gone = self._merged_into(files, covered, mine)
                added += new
                removed += gone
        return added, removed

    def _merged_into(
        self, files: Sequence[str], covered: HashRange, changes: pa.Table
    ) -> tuple[list[DataFile], list[str]]:
        """Write the files of a range again, with its changes. No old row stays in memory while they are written.

        A file of a partition to which no change belongs stays as it is.
        """
        shape = self.shape
        kept, staying = self._kept(files, covered, changes)
        merged = merged_rows(shape.kind, kept, changes, shape.names, self.schema)
        del kept
        if staying:
            grown = partitions(shape.layout, merged["keys"])
            again = [path for path, partition in staying.items() if partition in grown]
            merged["keys"] = pa.concat_tables([merged["keys"], *[self._rows_of(path, covered) for path in again]])
            files = [path for path in files if path not in staying or path in again]
        return [file for role, rows in merged.items() for file in self.split(role, covered, rows)], [*files]

    def _kept(
        self, files: Sequence[str], covered: HashRange, changes: pa.Table
    ) -> tuple[pa.Table, dict[str, PartitionValues]]:
        """The old rows of a range, apart from files of one partition that have no key of the changes: their paths."""
        names, kept, staying = self.shape.names, [self.schema.empty_table()], dict[str, PartitionValues]()
        may_stay = self.rewind is None and self.shape.layout is not None and bool(self.shape.layout.fields)
        changed = pc.unique(changes.column(names.key)) if may_stay else None
        for path in files:
            rows = self._rows_of(path, covered)
            if may_stay and covered.contains(range_of(path)):
                found = partitions(self.shape.layout, rows)
                if len(found) == 1 and not pc.any(pc.is_in(rows.column(names.key), value_set=changed)).as_py():
                    staying[path] = found[0]
                    continue
            kept.append(rows)
        whole = pa.concat_tables(kept)
        return whole if self.rewind is None else self.rewind.history(whole, names, self.schema), staying

    def _rows_of(self, path: str, covered: HashRange) -> pa.Table:
        rows = in_schema(self.files.read(path), self.schema)
        return rows if covered.contains(range_of(path)) else covered.rows_of(rows, self.shape.names.key)

    def split(self, role: str, covered: HashRange, rows: pa.Table) -> Iterator[DataFile]:
        """Write rows of a range of keys: in one file, or in several with a share of the keys each."""
        if not rows.num_rows:
            return
        if (
            (rows.num_rows <= FILE_ROWS and rows.nbytes <= KEYED_BYTES)
            or covered.depth >= MAX_DEPTH
            or rows.num_rows == 1
        ):
            named = partial(file_name, role, covered)
            yield from write_files(self.files, lambda: named(self._unique()), rows, self.shape.layout)
            return
        hashes = key_hashes(rows.column(self.shape.names.key))
        for half in covered.halves():
            yield from self.split(role, half, rows.filter(pa.array(half.mask(hashes))))

    def with_letters(self, read: Written, letters: pa.Table) -> Written:
        """Write records without a row for the dead-letter table, if there is one; the report with them."""
        known, fresh, again = self.known_letters, letters, list[LetterId]()
        if known:
            # By their content: a letter of a history that the log has lost is not that of the record there now.
            ids = letter_ids(letters)
            again = [one for one in ids if one in known]
            fresh = letters.filter(pa.array([one not in known for one in ids], pa.bool_()))
        files: list[DataFile] = []
        if self.dead is not None and fresh.num_rows:
            named = [*fresh.columns, pa.repeat(self.address, fresh.num_rows)]
            files = [write_file(self.dead, self.new_name(), pa.table(named, schema=LETTER_SCHEMA))]
        return replace(
            read,
            bad=tuple(files),
            bad_records=letters.num_rows,
            first_bad=first_bad(letters),
            bad_again=tuple(again),
            offered=self._offered(letters),
        )


@dataclass(slots=True)
class PartReader:
    """Turns records, in the order of their offsets, into rows; its counts show missing and duplicate records."""

    part: TablePart
    first: int = 0
    next: int = 0
    records: int = 0
    taken: int = 0
    decoded: int = 0
    """Bytes of the records in memory."""
    others: int = 0
    """Records that other tables of a route take."""
    _bad: list[pa.Table] = field(default_factory=list)
    _given: int = 0

    def rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
        """The rows of the part's records."""
        part = replace(self.part, shape=self.part.shape.without_condition())
        for records in as_tables(self._counted(batches)):
            given = self._mine(records)
            mine = self.part.shape.selected(given)
            if self._counts_all:
                self.others += given.num_rows - mine.num_rows
            if mine.num_rows:
                yield self._shaped(part, mine)

    def routed(self, records: pa.Table, own: pa.Table | None) -> pa.Table | None:
        """The rows of the table's ``own`` ones among some records; None if none are. All of them count as read."""
        for batch in records.to_batches():
            for _ in self._counted([batch]):
                pass
        count = 0 if own is None else own.num_rows
        if self._counts_all:
            self.others += records.num_rows - count
        if self.part.share is None or self.part.share.prefix == 0:
            self.taken += records.num_rows - count
        mine = None if own is None else self._mine(own)
        return None if mine is None or not mine.num_rows else self._shaped(self.part, mine)

    def _shaped(self, part: TablePart, mine: pa.Table) -> pa.Table:
        shaped = part.shaped(mine)
        self._bad.append(shaped.bad)
        if not part.is_transformed:
            self._given += shaped.rows.num_rows
        return shaped.rows

    @property
    def _counts_all(self) -> bool:
        """Whether no other worker counts these records of the range among other tables', or bad ones."""
        return self.part.share is None or self.part.shape.has_record_keys or self.part.share.prefix == 0

    def _mine(self, records: pa.Table) -> pa.Table:
        """The records of the part; all of them if only a row tells its key."""
        share = self.part.share
        mask = None if share is None else share.mask(key_hashes(records.column("key")))
        self.taken += records.num_rows if mask is None else int(mask.sum())
        is_all = mask is None or mask.all() or not self.part.shape.has_record_keys
        return records if is_all else records.filter(pa.array(mask))

    def _counted(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if not batch.num_rows:
                continue
            offsets = batch.column("offset")
            low, high = offsets[0].as_py(), offsets[-1].as_py()
            if high < low or (self.records and low < self.next):
                raise CorruptData(
                    f"A batch has the offsets {low} to {high} after offset {self.next - 1}: records were duplicated or "
                    "reordered. Nothing was committed."
                )
            if not self.records:
                self.first = low
            self.next = high + 1
            self.records += batch.num_rows
            self.decoded += batch.nbytes
            yield batch

    def passed_on(self) -> Written:
        """The report of a reader whose rows were passed on to other workers. Call it after ``rows`` has ended."""
        return self.report(taken=self._given, role="reader")

    def report(self, **more: Any) -> Written:
        """Write the dead letters, and report what was read, and ``more``."""
        letters = pa.concat_tables(self._bad) if self._bad else BAD_SCHEMA.empty_table()
        read = Written(self.first, self.next, self.records, self.taken, decoded=self.decoded, others=self.others)
        return self.part.with_letters(replace(read, **more), letters)


def complete_rows(
    reader: PartReader, batches: Iterable[pa.RecordBatch], spans: Sequence[OffsetRange]
) -> Iterator[pa.Table]:
    """The rows of all records of the spans; ``CorruptData`` if those were not each of their offsets once."""
    yield from reader.rows(batches)
    found = (reader.first, reader.next, reader.records)
    expected = (spans[0].first, spans[-1].next, spans[-1].next - spans[0].first)
    if found != expected:
        raise CorruptData(
            f"A worker read {found[2]} records between offsets {found[0]} and {found[1]} where each of the offsets "
            f"{expected[0]} to {expected[1] - 1} is expected once. Nothing was committed; start it again."
        )


def _refuse_ambiguous(changes: pa.Table, names: ColumnNames) -> None:
    """``InvalidInput`` for two rows of one key at one offset: rows of a transform have no order among them."""
    pairs = changes.select([names.key, names.offset])
    counts = pairs.group_by([names.key, names.offset], use_threads=False).aggregate([([], "count_all")])
    if counts.num_rows == pairs.num_rows:
        return
    twice = counts.filter(pc.greater(counts.column("count_all"), 1)).column(names.offset)[0].as_py()
    raise InvalidInput(
        f"The transform gives several rows of one key for the record at offset {twice}, and a keyed table cannot know "
        "which comes last: give them different keys, or follow into a table of mode 'append'."
    )
