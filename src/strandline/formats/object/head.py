"""The head of an object log and its chunks, as bytes (docs/formats.md describes the layout)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import fields
from itertools import chain
from operator import attrgetter
from typing import Final, TypeVar
from uuid import UUID

from strandline.errors import CorruptData, NotALog, UnsupportedVersion
from strandline.formats.checksum import crc32c
from strandline.formats.object.identity import deletion_begun
from strandline.formats.source_proofs import WriterRow, rows_with_proofs, without_proof_rows, writer_id
from strandline.formats.unpacker import U16, U32, Unpacker
from strandline.model.arguments import LARGEST_NUMBER
from strandline.model.head import ChunkRef, Cut, Entry, Head, MetadataRanges, Pin, Trimmed
from strandline.model.stamp import OpId, Stamped

T = TypeVar("T")


def pack_text(text: str) -> bytes:
    """A u16 length and UTF-8."""
    data = text.encode()
    return U16.pack(len(data)) + data


def pack_count(number: int) -> bytes:
    """A u32."""
    return U32.pack(number)


VERSION: Final = 1
FLAGGED_VERSION: Final = 2
"""Version of a head with flags: programs that do not know the seal refuse such a head, instead of appending."""
HEAD_MAGIC: Final = b"SLHD"
_CHUNK_MAGIC: Final = b"SLCH"
_CUT_MAGIC: Final = b"SLCU"
_ABSENT: Final = (1 << 64) - 1

_PREAMBLE = struct.Struct("<4sH")
_CHECKSUM = struct.Struct("<I")
_NUMBERS = struct.Struct("<QQQQqQQQQQQq")
_NUMBER_NAMES: Final = (
    *("next_offset", "next_sequence", "floor", "listed", "generation", "min_generation", "swept_generation"),
    *("tiered_through", "writers_floor", "membership", "trim_began"),
)
"""The numbers of a head, as they are stored behind its revision."""
_numbers_of: Final = attrgetter(*_NUMBER_NAMES)
_entry_numbers: Final = attrgetter("sequence", "first", "count", "size", "oldest", "newest", "listed")
_reference_numbers: Final = attrgetter(*(field.name for field in fields(ChunkRef)))
_ENTRY = struct.Struct("<QQIQqqq16sQI")
_RANGE = struct.Struct("<IqI")
_NO_RANGES: Final = MetadataRanges()
_REFERENCE = struct.Struct("<QQQQQQqq")
_WRITER = struct.Struct("<16sQQQIq")
_SLOT = struct.Struct("<QQ")
_TRIMMED = struct.Struct("<Qq")
_LEVEL = struct.Struct("<B")
_CUT = struct.Struct("<QQ")
_FLAGS = struct.Struct("<B")
_SEALED: Final = 1
_DELETING: Final = 2


def encode_head(state: Stamped[Head], tail: Iterable[bytes] | None = None) -> bytes:
    """The whole head, with its stamp and a checksum over everything before it; ``tail``: its packed entries."""
    head = state.value
    flags = _SEALED * head.sealed | _DELETING * head.deleting
    parts = [
        _PREAMBLE.pack(HEAD_MAGIC, FLAGGED_VERSION if flags else VERSION),
        head.log_id.bytes,
        _NUMBERS.pack(state.revision, *_numbers_of(head)),
        pack_count(len(state.recent)),
        *(op.bytes for op in state.recent),
        pack_count(len(head.tail)),
        *(map(_pack_entry, head.tail) if tail is None else tail),
        pack_count(len(head.levels)),
    ]
    for level in head.levels:
        parts += [pack_count(len(level)), *map(_pack_reference, level)]
    rows = [_WRITER.pack(*row) for row in rows_with_proofs(head.writers.items())]
    parts += [pack_count(len(rows)), *rows]
    parts.append(pack_count(len(head.slots)))
    for name, pin in head.slots.items():
        parts += [pack_text(name), _SLOT.pack(*((_ABSENT, 0) if pin is None else (pin.position, pin.mark)))]
    parts.append(pack_count(len(head.trimmed)))
    for gone in head.trimmed:
        parts += [pack_text(gone.location), _TRIMMED.pack(gone.size, gone.at)]
    if flags:
        parts.append(_FLAGS.pack(flags))
    return _sealed(parts)


def decode_head(data: bytes | memoryview, where: str) -> Stamped[Head]:
    """The head in these bytes; ``CorruptData`` or ``UnsupportedVersion`` naming ``where``."""
    source = _opened(data, where, HEAD_MAGIC, newest=FLAGGED_VERSION)
    version = _PREAMBLE.unpack_from(data)[1]
    log_id = source.uuid()
    numbers = source.fields(_NUMBERS)
    recent = tuple(OpId(source.uuid()) for _ in range(source.count(item_size=16)))
    tail = _each(source, _unpack_entry, _ENTRY.size)
    levels = _each(source, lambda source: _each(source, _unpack_reference, _REFERENCE.size), U32.size)
    rows = _each(source, _unpack_writer, _WRITER.size)
    slots: dict[str, Pin | None] = {}
    for _ in range(source.count(item_size=_SLOT.size)):
        name = source.text()
        position, mark = source.fields(_SLOT)
        slots[name] = None if position == _ABSENT else Pin(position, mark)
    trimmed = _each(source, lambda source: Trimmed(source.text(), *source.fields(_TRIMMED)), _TRIMMED.size)
    (flags,) = (0,) if version == VERSION else source.fields(_FLAGS)
    if flags > _SEALED | _DELETING:
        raise source.corrupt("has flags that no program writes")
    source.end()
    _in_range(source, *numbers)
    head = Head(
        log_id=log_id,
        **dict(zip(_NUMBER_NAMES, numbers[1:], strict=True)),
        tail=tail,
        levels=levels,
        writers=without_proof_rows(rows),
        slots=slots,
        trimmed=trimmed,
        sealed=bool(flags & _SEALED),
        deleting=bool(flags & _DELETING),
    )
    return Stamped(head, numbers[0], recent)


def encode_chunk(items: tuple[Entry, ...] | tuple[ChunkRef, ...], level: int) -> bytes:
    """A chunk: entries at level 0, references to chunks of the level below otherwise."""
    packed = [_pack_entry(item) if isinstance(item, Entry) else _pack_reference(item) for item in items]
    return _sealed([_PREAMBLE.pack(_CHUNK_MAGIC, VERSION), _LEVEL.pack(level), pack_count(len(items)), *packed])


def decode_entries(data: bytes | memoryview, where: str) -> tuple[Entry, ...]:
    """The entries of a chunk of level 0."""
    source = _opened_chunk(data, where, 0)
    entries = _each(source, _unpack_entry, _ENTRY.size)
    source.end()
    return entries


def decode_references(data: bytes | memoryview, where: str, level: int) -> tuple[ChunkRef, ...]:
    """The references in a chunk of a level above 0."""
    source = _opened_chunk(data, where, level)
    references = _each(source, _unpack_reference, _REFERENCE.size)
    source.end()
    return references


def encode_cut(cut: Cut) -> bytes:
    """Encode what a trim removed from the listing."""
    chunks = [_LEVEL.pack(level) + _pack_reference(reference) for level, reference in cut.chunks]
    return _sealed(
        [
            _PREAMBLE.pack(_CUT_MAGIC, VERSION),
            _CUT.pack(cut.since, cut.upto),
            pack_count(len(cut.entries)),
            *map(_pack_entry, cut.entries),
            pack_count(len(chunks)),
            *chunks,
        ]
    )


def decode_cut(data: bytes | memoryview, where: str) -> Cut:
    """Decode a cut."""
    source = _opened(data, where, _CUT_MAGIC)
    since, upto = source.fields(_CUT)
    entries = _each(source, _unpack_entry, _ENTRY.size)
    chunks = _each(
        source, lambda source: (source.fields(_LEVEL)[0], _unpack_reference(source)), _LEVEL.size + _REFERENCE.size
    )
    source.end()
    return Cut(since, upto, entries, chunks)


class OtherLogsHead(CorruptData):
    """The head is that of another log: the log was replaced, or is being restored."""


class HeadCodec:
    """The head as a cell's content.

    The packed entries are cached: the next head has nearly the same ones, each with up to a thousand ranges of
    metadata.
    """

    def __init__(self, log_id: UUID | None = None, *, deleting: bool = False) -> None:
        """Accept only the head of this log; without ``log_id``, the head of any log.

        The head of a log whose deletion has begun is ``NotALog``, unless it is read for the ``deleting``.
        """
        self._log_id = log_id
        self._deleting = deleting
        self._packed: dict[int, tuple[Entry, bytes]] = {}

    def encode(self, state: Stamped[Head]) -> bytes:
        """The bytes of a state."""
        known = self._packed
        packed: dict[int, tuple[Entry, bytes]] = {}
        for entry in state.value.tail:
            found = known.get(entry.sequence)
            packed[entry.sequence] = found if found and found[0] is entry else (entry, _pack_entry(entry))
        self._packed = packed
        return encode_head(state, [data for _, data in packed.values()])

    def decode(self, data: bytes | memoryview, where: str) -> Stamped[Head]:
        """The state in these bytes."""
        state = decode_head(data, where)
        found = state.value.log_id
        if self._log_id not in (None, found):
            raise OtherLogsHead(f"{where} belongs to log {found}, not to {self._log_id}: restore it.")
        if state.value.deleting and not self._deleting:
            raise NotALog(deletion_begun(f"the log of {where}"))
        return state


def _sealed(parts: list[bytes]) -> bytes:
    body = b"".join(parts)
    return body + _CHECKSUM.pack(crc32c(body))


def _opened(data: bytes | memoryview, where: str, magic: bytes, *, newest: int = VERSION) -> Unpacker:
    view = memoryview(data)
    body, checksum = view[: -_CHECKSUM.size], view[-_CHECKSUM.size :]
    if len(view) < _PREAMBLE.size + _CHECKSUM.size or _PREAMBLE.unpack_from(view)[0] != magic:
        raise CorruptData(f"{where} is damaged: it does not begin as {magic.decode()} should. Restore the object.")
    # The version comes before the checksum: a newer format may have another one.
    version = _PREAMBLE.unpack_from(view)[1]
    if version > newest:
        raise UnsupportedVersion(
            f"{where} has format version {version}, and this program reads up to {newest}: upgrade strandline."
        )
    if version < VERSION:
        raise CorruptData(f"{where} is damaged: there is no format version {version}. Restore the object.")
    if _CHECKSUM.unpack(checksum)[0] != crc32c(body):
        raise CorruptData(f"{where} is damaged: its checksum is wrong. Restore the object; retrying does not help.")
    source = Unpacker(body, where)
    source.fields(_PREAMBLE)
    return source


def _opened_chunk(data: bytes | memoryview, where: str, level: int) -> Unpacker:
    source = _opened(data, where, _CHUNK_MAGIC)
    (found,) = source.fields(_LEVEL)
    if found != level:
        raise source.corrupt(f"is a chunk of level {found} where one of level {level} should be")
    return source


def _each(source: Unpacker, unpack: Callable[[Unpacker], T], size: int) -> tuple[T, ...]:
    """A count, and that many items of at least this size."""
    return tuple(unpack(source) for _ in range(source.count(item_size=size)))


def _pack_entry(entry: Entry) -> bytes:
    fixed = _ENTRY.pack(*_entry_numbers(entry), entry.writer.bytes, entry.number, len(entry.metadata))
    ranges = MetadataRanges.of(entry.metadata)
    leads = map(_RANGE.pack, ranges.starts, ranges.times, map(len, ranges.payloads))
    return b"".join((fixed, pack_text(entry.location), *chain.from_iterable(zip(leads, ranges.payloads, strict=True))))


def _unpack_entry(source: Unpacker) -> Entry:
    sequence, first, count, size, oldest, newest, listed, writer, number, ranges = source.fields(_ENTRY)
    _in_range(source, sequence, first + count, size, number)
    location = source.text()
    metadata = _unpack_ranges(source, ranges) if ranges else _NO_RANGES
    return Entry(sequence, location, first, count, size, oldest, newest, listed, writer_id(writer), number, metadata)


def _unpack_ranges(source: Unpacker, count: int) -> MetadataRanges:
    leads, payloads = source.blobs(_RANGE, count)
    starts, times, _ = zip(*leads, strict=True)
    return MetadataRanges(starts, times, tuple(payloads))


def _pack_reference(reference: ChunkRef) -> bytes:
    return _REFERENCE.pack(*_reference_numbers(reference))


def _unpack_writer(source: Unpacker) -> WriterRow:
    writer, *numbers = source.fields(_WRITER)
    _in_range(source, *numbers)
    return (writer, *numbers)


def _unpack_reference(source: Unpacker) -> ChunkRef:
    reference = source.fields(_REFERENCE)
    _in_range(source, *reference)
    return ChunkRef(*reference)


def _in_range(source: Unpacker, *numbers: int) -> None:
    """Refuse numbers that no log reaches: later arithmetic would overflow."""
    if max(numbers) > LARGEST_NUMBER:
        raise source.corrupt("holds numbers that no log reaches")
