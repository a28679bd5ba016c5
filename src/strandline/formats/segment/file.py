"""Segment file, version 1: a Parquet file of records with a block of checksums, so that any part verifies alone.

Any Parquet reader can read it: the columns of :data:`~strandline.model.records.READ_SCHEMA`, sorted by offset, and
``listed``, the time at which a record's batch was listed, for seeking by time. The checksum block is between the last
column and Parquet's footer, where Parquet readers do not look. Block and footer together are the *tail*: it has the
position and the checksum of every column.
"""

from __future__ import annotations

import base64
import json
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Final
from uuid import UUID

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from strandline.errors import CorruptData, UnsupportedVersion
from strandline.formats.arrow.header import check_message
from strandline.formats.checksum import crc32c
from strandline.formats.json.fields import Fields
from strandline.formats.segment.batches import BATCHES_KEY, SegmentBatches
from strandline.formats.segment.thrift import BINARY, LIST, STRUCT, ThriftReader
from strandline.model.arguments import Natural, Signed
from strandline.model.json_values import fingerprint_of, fingerprint_text
from strandline.model.records import READ_SCHEMA, TIMESTAMP

VERSION: Final = 1

LARGEST_SEGMENT: Final = (1 << 31) - 1
"""Events have 32 signed bits for a size."""

LISTED: Final = "listed"

SEGMENT_SCHEMA: Final = pa.schema([*READ_SCHEMA, pa.field(LISTED, TIMESTAMP, nullable=False)])
"""The stored columns: those of a log, and the listing time of each record's batch."""

FACTS_KEY: Final = b"strandline.segment"

PHYSICAL: Final = (
    ("offset", "INT64"),
    ("timestamp", "INT64"),
    ("op", "INT32"),
    ("key", "BYTE_ARRAY"),
    ("value", "BYTE_ARRAY"),
    ("headers.key_value.key", "BYTE_ARRAY"),
    ("headers.key_value.value", "BYTE_ARRAY"),
    ("listed", "INT64"),
)
"""The stored columns: names and Parquet's own types."""
_LEAVES: Final = tuple(path.partition(".")[0] for path, _ in PHYSICAL)
"""The top-level column of each stored column."""
_LARGEST_FOOTER: Final = 2 << 20
_LARGEST_GROUP_FOOTER: Final = 32 << 10
"""Largest footer, and its part per group: statistics have up to 4 KiB each, and keys have four."""
_SHORT_LIST: Final = 64
_PAIRS_FIELD, _PAIR_KEY, _PAIR_VALUE = 5, 1, 2
_ARROW_SCHEMA: Final = b"ARROW:schema"
"""Fields of Parquet's FileMetaData and KeyValue, and the key under which Arrow keeps its schema."""

_MAGIC: Final = b"PAR1"
_END: Final = struct.Struct("<I4s")
"""How Parquet files end: the length of the footer, and the magic."""
_BLOCK_MAGIC: Final = b"SLSC"
_BLOCK_END: Final = struct.Struct("<IIIIB4s")
"""How the block ends: groups, columns, checksum of all before the tail, checksum of the tail, version, magic."""
_SEAL: Final = struct.Struct("<BIIII")


@dataclass(frozen=True, slots=True)
class Seal:
    """Size and checksums of a segment's object, stored in its events: enough to verify and read it."""

    size: int
    checksum: int
    """CRC32C of the whole object."""
    tail: int
    """Size of the tail."""
    tail_checksum: int

    def encode(self) -> bytes:
        """As custom metadata of a segment's events."""
        return _SEAL.pack(VERSION, self.size, self.checksum, self.tail, self.tail_checksum)

    @classmethod
    def decode(cls, data: bytes | None, what: str) -> Seal:
        """The seal in the custom metadata of ``what``."""
        if not data:
            raise CorruptData(f"{what} has no seal in its metadata: another program wrote it; remove it there.")
        if data[0] > VERSION:
            raise UnsupportedVersion(
                f"{what} has a seal of version {data[0]}, and this program reads up to {VERSION}: upgrade strandline."
            )
        if len(data) != _SEAL.size or data[0] != VERSION:
            raise CorruptData(f"The seal of {what} is damaged: {len(data)} bytes that begin with {data[0]}.")
        _, size, checksum, tail, tail_checksum = _SEAL.unpack(data)
        if not _END.size + _BLOCK_END.size < tail < size <= LARGEST_SEGMENT:
            raise CorruptData(f"The seal of {what} is damaged: a tail of {tail} bytes cannot be in {size}.")
        return cls(size, checksum, tail, tail_checksum)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentFacts:
    """Metadata in the file itself; equal to that in the events, and enough to list segments without them."""

    log_id: UUID
    partition: Natural
    segment: UUID
    start: Natural
    end: Natural
    """The last offset, inclusive."""
    terms: tuple[tuple[Natural, Natural], ...]
    max_timestamp: Signed
    """The newest time of a record, in milliseconds."""
    fingerprint: int | None = field(default=None, compare=False)
    """Fingerprint of the batch with the last record, as in the cursor after it; not in events. None: unknown."""

    def encode(self) -> bytes:
        """As JSON."""
        fields = msgspec.to_builtins(self)
        fields = {"version": VERSION, "log": fields.pop("log_id"), **fields}
        if (fingerprint := fields.pop("fingerprint")) is not None:
            fields["fingerprint"] = fingerprint_text(fingerprint)
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes, where: str) -> SegmentFacts:
        """The facts in these bytes."""
        fields = Fields.parse(data, f"The description in {where}", largest=1 << 20, wrong=CorruptData)
        version = fields.natural("version")
        if version > VERSION:
            raise _too_new(where, version)
        facts = fields.record(
            cls,
            log_id=fields.uuid("log"),
            fingerprint=fields.decoded(lambda found: fingerprint_of(found.get("fingerprint"))),
        )
        ascends = all(term < later and at <= start for (term, at), (later, start) in pairwise(facts.terms))
        if facts.start > facts.end or not facts.terms or not ascends or facts.terms[0][1] > facts.start:
            raise fields.refused("its offsets or its terms are out of order")
        return facts


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A byte range with one checksum: a column of a row group."""

    start: int
    size: int
    checksum: int

    @property
    def next(self) -> int:
        """One past the last byte."""
        return self.start + self.size


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group: the unit of reads. All its records have one term."""

    number: int
    first: int
    next: int
    term: int
    listed: int
    """Listing time of its last batch, in microseconds."""
    size: int
    """Its stored bytes."""


@dataclass(frozen=True, eq=False)
class SegmentTail:
    """The tail of a segment: where each row group and column is. Immutable; thread-safe."""

    where: str
    facts: SegmentFacts
    footer: Any
    """Parquet's own metadata."""
    sums: Sequence[Sequence[int]]
    """The checksum of each column of each group."""
    listed: Sequence[int]
    rows: Sequence[int]
    before: int
    """Number of bytes before the tail."""

    def __len__(self) -> int:
        return len(self._firsts)

    def group(self, number: int) -> RowGroup:
        """One row group."""
        first = self._firsts[number]
        last = number + 1 == len(self._firsts)
        terms = self.facts.terms
        return RowGroup(
            number,
            first,
            self.facts.end + 1 if last else self._firsts[number + 1],
            terms[max(0, bisect_right(terms, first, key=lambda entry: entry[1]) - 1)][0],
            self.listed[number],
            sum(chunk.size for chunk in self._chunks[number]),
        )

    def fingerprint_at(self, offset: int) -> int | None:
        """The fingerprint of the batch with the record at an offset, as in the cursor behind it; None if unknown."""
        return self.facts.fingerprint if offset == self.facts.end else self.batches.fingerprint_at(offset)

    def groups(self, first: int, end: int) -> range:
        """The numbers of the groups that hold offsets ``first`` up to ``end``."""
        return range(max(0, bisect_right(self._firsts, first) - 1), bisect_left(self._firsts, end))

    def listed_since(self, time: int) -> int | None:
        """The first group with a batch that was listed at a time (microseconds) or later."""
        number = bisect_left(self.listed, time)
        return None if number == len(self.listed) else number

    def chunks(self, number: int) -> list[ByteRange]:
        """The bytes of each stored column of a group."""
        return self._chunks[number]

    def statistics(self, number: int, column: str) -> tuple[Any, Any] | None:
        """The lowest and highest value of a column in a group; None if they are not stored, or if it has nulls only.

        As stored: times are microseconds, because Python lacks those outside of its calendar.
        """
        found = self.footer.row_group(number).column(_LEAVES.index(column)).statistics
        return (found.min_raw, found.max_raw) if found is not None and found.has_min_max else None

    def ranges(self, number: int, columns: Sequence[str]) -> list[ByteRange]:
        """The bytes of these columns of a group, in file order."""
        return [chunk for chunk, name in zip(self._chunks[number], _LEAVES, strict=True) if name in columns]

    @cached_property
    def batches(self) -> SegmentBatches:
        """The batches of its records, as far as they are known."""
        stored = (self.footer.metadata or {}).get(BATCHES_KEY)
        try:
            return SegmentBatches.decode(stored, self.facts.start, self.facts.end)
        except ValueError as error:
            raise damaged_segment(self.where, str(error)[:200]) from error

    @cached_property
    def _firsts(self) -> list[int]:
        return list(accumulate(self.rows, initial=self.facts.start))[:-1]

    @cached_property
    def _chunks(self) -> list[list[ByteRange]]:
        groups = [chunks_of(self.footer.row_group(number), sums) for number, sums in enumerate(self.sums)]
        if any(
            chunk.start < len(_MAGIC) or chunk.size < 0 or chunk.next > self.before for each in groups for chunk in each
        ):
            raise damaged_segment(self.where, "it has columns outside of itself")
        return groups


def chunks_of(group: Any, sums: Sequence[int]) -> list[ByteRange]:
    """The byte ranges of a row group's columns, from Parquet's metadata."""
    found = []
    for number, checksum in enumerate(sums):
        column = group.column(number)
        start = column.data_page_offset
        if column.has_dictionary_page:
            start = min(start, column.dictionary_page_offset)
        found.append(ByteRange(start, column.total_compressed_size, checksum))
    return found


def encode_block(sums: Sequence[Sequence[int]], listed: Sequence[int], before: int, footer: bytes) -> bytes:
    """The block of checksums: of each column of each group, and of all bytes before the tail; ``footer`` follows."""
    leaves = len(sums[0])
    body = struct.pack(f"<{len(sums) * leaves}I{len(listed)}q", *[sum_ for row in sums for sum_ in row], *listed)
    end = _BLOCK_END.pack(len(sums), leaves, before, 0, VERSION, _BLOCK_MAGIC)
    checksum = crc32c(footer, crc32c(end, crc32c(body)))
    return body + _BLOCK_END.pack(len(sums), leaves, before, checksum, VERSION, _BLOCK_MAGIC)


def footer_size(data: bytes | memoryview, where: str) -> int:
    """Size of Parquet's footer, from the last bytes of a file."""
    if len(data) < _END.size:
        raise damaged_segment(where, f"{len(data)} bytes cannot be a segment")
    length, magic = _END.unpack(data[-_END.size :])
    if magic != _MAGIC:
        raise damaged_segment(where, "it does not end as a Parquet file does")
    return int(length) + _END.size


def decode_tail(data: bytes | memoryview, where: str, *, before: int = LARGEST_SEGMENT) -> tuple[SegmentTail, int]:
    """The tail in these bytes, fully verified, and the checksum of the ``before`` bytes before it."""
    view = memoryview(data).cast("B")
    footer = footer_size(view, where)
    if len(view) < footer + _BLOCK_END.size:
        raise damaged_segment(where, "its footer is longer than the file")
    at = len(view) - footer - _BLOCK_END.size
    groups, leaves, before_checksum, checksum = _block_end(view[: at + _BLOCK_END.size], where)
    if at != 4 * groups * leaves + 8 * groups or leaves != len(_LEAVES) or not groups:
        raise damaged_segment(where, f"the checksums of {groups} groups of {leaves} columns do not fit")
    end = _BLOCK_END.pack(groups, leaves, before_checksum, 0, VERSION, _BLOCK_MAGIC)
    if crc32c(view[-footer:], crc32c(end, crc32c(view[:at]))) != checksum:
        raise damaged_segment(where, "the checksum of its tail is wrong")
    numbers = struct.unpack_from(f"<{groups * leaves}I{groups}q", view)
    sums = [numbers[row * leaves : (row + 1) * leaves] for row in range(groups)]
    listed = numbers[groups * leaves :]
    parquet, facts = _decode_footer(view[-footer:], groups, where)
    rows = [parquet.row_group(number).num_rows for number in range(parquet.num_row_groups)]
    fits = len(rows) == groups and min(rows) > 0 and facts.end + 1 - facts.start == sum(rows) == parquet.num_rows
    if not fits or any(parquet.row_group(number).num_columns != leaves for number in range(groups)):
        raise damaged_segment(
            where, f"it holds {parquet.num_rows} records, but its description says {facts.start} to {facts.end}"
        )
    if any(earlier > later for earlier, later in pairwise(listed)):
        raise damaged_segment(where, "its groups are not in the order of their listing times")
    return SegmentTail(where, facts, parquet, sums, listed, rows, before), before_checksum


def _block_end(view: memoryview, where: str) -> tuple[int, int, int, int]:
    groups, leaves, before, checksum, version, magic = _BLOCK_END.unpack_from(view, len(view) - _BLOCK_END.size)
    if magic != _BLOCK_MAGIC:
        raise damaged_segment(where, "it has no checksums before its footer: another program wrote it, or changed it")
    if version > VERSION:
        raise _too_new(where, version)
    return groups, leaves, before, checksum


def _decode_footer(data: memoryview, groups: int, where: str) -> tuple[Any, SegmentFacts]:
    if len(data) > _LARGEST_FOOTER + groups * _LARGEST_GROUP_FOOTER:
        raise damaged_segment(where, f"its footer has {len(data):,} bytes for {groups:,} groups")
    try:
        _check_footer(data, groups)
        # Parquet accepts the footer alone as a file: it reads the rest only for records.
        with pq.ParquetFile(
            pa.BufferReader(pa.py_buffer(_MAGIC + data)),
            pre_buffer=False,
            thrift_string_size_limit=_LARGEST_FOOTER,
            thrift_container_size_limit=max(groups, _SHORT_LIST),
        ) as file:
            parquet = file.metadata
        schema = parquet.schema.to_arrow_schema().remove_metadata()
        facts = (parquet.metadata or {}).get(FACTS_KEY)
        leaves = [parquet.schema.column(leaf) for leaf in range(len(parquet.schema))]
        physical = tuple((leaf.path, leaf.physical_type) for leaf in leaves)
    except pa.ArrowMemoryError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged_segment(where, f"its footer cannot be read ({str(error)[:200]})") from error
    if facts is None or not schema.equals(SEGMENT_SCHEMA) or physical != PHYSICAL:
        raise damaged_segment(where, f"it has the columns {str(schema.names)[:200]} and is no segment")
    return parquet, SegmentFacts.decode(facts, where)


def _check_footer(footer: memoryview, groups: int) -> None:
    """``ValueError`` for a footer that would take far more memory than its bytes."""
    reader = ThriftReader(footer)
    for number, kind in reader.fields():
        if number != _PAIRS_FIELD:
            reader.skip(kind)
        elif kind == LIST:
            for _ in reader.list_of(STRUCT):
                _check_pair(reader)
        else:
            raise ValueError("its pairs of texts are no list")
    if reader.structs > _SHORT_LIST * (groups + _SHORT_LIST):
        raise ValueError(f"{reader.structs:,} structures are too many")


def _check_pair(reader: ThriftReader) -> None:
    texts: dict[int, memoryview] = {}
    for number, kind in reader.fields():
        if kind == BINARY:
            texts[number] = reader.binary()
        else:
            reader.skip(kind)
    # Parquet passes the Arrow schema to Arrow as soon as a file is opened.
    if bytes(texts.get(_PAIR_KEY, b"")) == _ARROW_SCHEMA:
        check_message(memoryview(base64.b64decode(texts.get(_PAIR_VALUE, b""))))


def _too_new(where: str, version: int) -> UnsupportedVersion:
    return UnsupportedVersion(
        f"{where} is a segment of version {version}, and this program reads up to {VERSION}: upgrade strandline."
    )


def damaged_segment(where: str, what: str) -> CorruptData:
    """The error for a damaged segment."""
    return CorruptData(f"{where} is damaged: {what}. Restore the object; retrying does not help.")
