"""The sparse index beside a write-ahead file: frame positions, and the writers known before each.

Entries are chained: the checksum of each one continues that of the entry before it, and the first one that of the log
and the file. So remains of an older index never count as a part of this one. The index can be
rebuilt from the frames.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final, NamedTuple
from uuid import UUID

from strandline.formats.checksum import crc32c
from strandline.formats.source_proofs import rows_with_proofs, without_proof_rows
from strandline.model.head import WriterId, WriterState

INDEX_LEAD: Final = b"RDLI\x01\x00\x00\x00"
"""The first bytes of an index."""
_ENTRY = struct.Struct("<QQQQI")
_WRITER = struct.Struct("<16sQQQQQ")
_CHECKSUM = struct.Struct("<I")
_MOST_WRITERS: Final = 1 << 16


class IndexEntry(NamedTuple):
    """A frame begins at ``position`` with the record at ``offset``; everything before it is durable."""

    offset: int
    position: int
    term: int
    """The term of the frame before it."""
    timestamp: int
    """When the frame before it was written, in milliseconds."""
    writers: Mapping[WriterId, WriterState]
    """The last append of each writer in the frames since the entry before."""


class Index(NamedTuple):
    """The readable part of an index: the entries up to the first that is not whole."""

    entries: list[IndexEntry]
    size: int
    """End of the last entry in its file."""
    chain: int
    """Checksum that the next entry continues."""


def new_chain(log_id: UUID, first: int) -> int:
    """The checksum that the first entry continues, in the index of the file that begins at ``first``."""
    return crc32c(log_id.bytes + first.to_bytes(8, "little"))


def encode_entry(entry: IndexEntry, chain: int) -> tuple[bytes, int]:
    """The entry's bytes, and the checksum that the next one continues."""
    rows = list(rows_with_proofs(entry.writers.items()))
    body = bytearray(_ENTRY.pack(entry.offset, entry.position, entry.term, entry.timestamp, len(rows)))
    for row in rows:
        body += _WRITER.pack(*row)
    chain = crc32c(bytes(body), chain)
    return bytes(body) + _CHECKSUM.pack(chain), chain


def decode_index(data: bytes, chain: int) -> Index:
    """The entries in these bytes, up to the first that is not whole: every valid prefix of an index is useful."""
    if not data.startswith(INDEX_LEAD):
        return Index([], 0, chain)
    return read_entries(data[len(INDEX_LEAD) :], Index([], len(INDEX_LEAD), chain))


def read_entries(data: bytes, before: Index) -> Index:
    """The index ``before`` with the entries in these bytes, which follow it in its file."""
    entries, at, chain = list(before.entries), 0, before.chain
    while True:
        found = _entry_at(data, at, chain)
        if found is None:
            return Index(entries, before.size + at, chain)
        entry, at, chain = found
        entries.append(entry)


def _entry_at(data: bytes, at: int, chain: int) -> tuple[IndexEntry, int, int] | None:
    if at + _ENTRY.size + _CHECKSUM.size > len(data):
        return None
    offset, position, term, timestamp, count = _ENTRY.unpack_from(data, at)
    end = at + _ENTRY.size + count * _WRITER.size
    if count > _MOST_WRITERS or end + _CHECKSUM.size > len(data):
        return None
    checksum = crc32c(data[at:end], chain)
    if _CHECKSUM.unpack_from(data, end)[0] != checksum:
        return None
    writers = without_proof_rows(_WRITER.iter_unpack(data[at + _ENTRY.size : end]))
    return IndexEntry(offset, position, term, timestamp, writers), end + _CHECKSUM.size, checksum
