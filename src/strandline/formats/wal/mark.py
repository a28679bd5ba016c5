"""The durable mark of a write-ahead log: a small file, overwritten in place after each commit."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from strandline.formats.checksum import crc32c

_MAGIC: Final = b"RDLM"
_VERSION: Final = 1
_MARK = struct.Struct("<4sBBBx16sQQQQ16s")
_CHECKSUM = struct.Struct("<I")
MARK_SIZE: Final = _MARK.size + _CHECKSUM.size


NO_BOOT: Final = UUID(int=0)
"""The boot in the mark of a copy, which no running machine has written."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The published state for readers in other processes: everything below ``next`` is durable."""

    log_id: UUID
    start: int
    """The first retained offset."""
    next: int
    active: int
    """The first offset of the active file."""
    term: int
    boot: UUID
    """The boot of the machine in which it was written: in another one the file may be older than the log."""
    clean: bool = False
    """Whether the log was closed with this mark, which was then synced."""
    sealed: bool = False
    """Whether the log was sealed at ``next``."""


def encode_mark(mark: Mark) -> bytes:
    """The bytes of a mark, of constant size."""
    body = _MARK.pack(
        _MAGIC, _VERSION, mark.clean, mark.sealed, mark.log_id.bytes, mark.start, mark.next, mark.active, mark.term,
        mark.boot.bytes,
    )  # fmt: skip
    return body + _CHECKSUM.pack(crc32c(body))


def decode_mark(data: bytes) -> Mark | None:
    """Decode a mark; None if it is torn or missing, which says nothing about the log."""
    if len(data) < MARK_SIZE:
        return None
    body = data[: _MARK.size]
    if crc32c(body) != _CHECKSUM.unpack_from(data, _MARK.size)[0]:
        return None
    magic, version, clean, sealed, log_id, start, after, active, term, boot = _MARK.unpack(body)
    if magic != _MAGIC or version != _VERSION:
        return None
    return Mark(UUID(bytes=log_id), start, after, active, term, UUID(bytes=boot), bool(clean), bool(sealed))
