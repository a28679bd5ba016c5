"""Segment events, byte for byte as Apache Kafka's serializer of remote log metadata writes them. Big-endian.

Decoding returns a value, or raises :class:`CorruptData`, or :class:`UnsupportedVersion` for a known event in a
newer version: skipping that would lose a segment.
"""

from __future__ import annotations

import struct
from typing import Final, TypeVar
from uuid import UUID

from strandline.errors import CorruptData, InvalidInput, UnsupportedVersion
from strandline.formats.unpacker import Unpacker
from strandline.model.segments import (
    PartitionDelete,
    PartitionDeleteState,
    SegmentEvent,
    SegmentId,
    SegmentMetadata,
    SegmentState,
    SegmentUpdate,
    TopicPartition,
)

S = TypeVar("S", SegmentState, PartitionDeleteState)

_FRAME: Final = 1
_VERSION: Final = 0
_ADD, _UPDATE, _DELETE = range(3)
_LARGEST_VERSION: Final = (1 << 15) - 1
_NO_TRANSACTION_INDEX: Final = 0
"""The only tagged field, in an add."""
_NO_TAGS: Final = b"\x00"

_TOPIC_PARTITION = struct.Struct(">16si")
_RANGE = struct.Struct(">qqiqq")
_TERM = struct.Struct(">iq")
_SMALLEST_TERM: Final = _TERM.size + len(_NO_TAGS)
_SIZE = struct.Struct(">i")
_ORIGIN = struct.Struct(">iq")
_STATE = struct.Struct(">b")


def encode_event(event: SegmentEvent) -> bytes:
    """The bytes of an event; every valid event can be encoded."""
    match event:
        case SegmentMetadata():
            return b"".join(_add(event))
        case SegmentUpdate(segment=segment, custom_metadata=custom):
            return _header(_UPDATE) + _segment(segment) + _origin(event) + _nullable(custom) + _state(event) + _NO_TAGS
        case PartitionDelete(partition=partition):
            return _header(_DELETE) + _partition(partition) + _origin(event) + _state(event) + _NO_TAGS


def decode_event(data: bytes | memoryview, where: str) -> SegmentEvent:
    """The event in these bytes, all of them.

    Unknown tagged fields are skipped, as the format requires. Takes no more memory than
    the bytes themselves. ``where`` names the event in errors.

    Raises:
        UnsupportedVersion: for a known kind of event in an unknown version.
        CorruptData: for anything but an event.
    """
    reader = _EventReader(data, where)
    frame, key, version = reader.uvarint(), reader.uvarint(), reader.uvarint()
    if frame != _FRAME:
        raise reader.corrupt(f"begins with {frame} and not with {_FRAME}")
    if key not in (_ADD, _UPDATE, _DELETE) or version > _LARGEST_VERSION:
        raise reader.corrupt(f"has the unknown key {key} with version {version}")
    if version != _VERSION:
        raise UnsupportedVersion(
            f"{where} is written in version {version}, and this program reads version {_VERSION}: upgrade it."
        )
    try:
        event = (_read_add, _read_update, _read_delete)[key](reader)
    except InvalidInput as error:
        raise reader.corrupt(f"is impossible: {error}") from error
    reader.end()
    return event


def _add(event: SegmentMetadata) -> list[bytes]:
    origin = (event.broker, event.max_timestamp, event.event_timestamp)
    parts = [_header(_ADD), _segment(event.segment), _RANGE.pack(event.start, event.end, *origin)]
    parts.append(_uvarint(len(event.terms) + 1))
    for term in event.terms:
        parts += (_TERM.pack(*term), _NO_TAGS)
    parts += (_SIZE.pack(event.size), _nullable(event.custom_metadata), _state(event))
    # One tagged field: its number, its length, true. False, the default, is omitted.
    parts.append(bytes((1, _NO_TRANSACTION_INDEX, 1, 1)) if event.no_transaction_index else _NO_TAGS)
    return parts


def _origin(event: SegmentUpdate | PartitionDelete) -> bytes:
    return _ORIGIN.pack(event.broker, event.event_timestamp)


def _state(event: SegmentEvent) -> bytes:
    return _STATE.pack(event.state.value)


def _header(key: int) -> bytes:
    return bytes((_FRAME, key, _VERSION))


def _segment(segment: SegmentId) -> bytes:
    return _partition(segment.partition) + segment.id.bytes + _NO_TAGS


def _partition(partition: TopicPartition) -> bytes:
    name = partition.name.encode()
    return (
        _uvarint(len(name) + 1) + name + _TOPIC_PARTITION.pack(partition.topic_id.bytes, partition.partition) + _NO_TAGS
    )


def _nullable(data: bytes | None) -> bytes:
    return b"\x00" if data is None else _uvarint(len(data) + 1) + data


def _uvarint(number: int) -> bytes:
    data = bytearray()
    while number > 0x7F:  # noqa: PLR2004 - seven bits in each byte
        data.append(number & 0x7F | 0x80)
        number >>= 7
    data.append(number)
    return bytes(data)


class _EventReader(Unpacker):
    """Reads Kafka's encoding: numbers of variable length, and tagged fields."""

    def uvarint(self) -> int:
        """At most 32 bits, in the fewest bytes: other encodings are never written."""
        if self._at < len(self._data) and self._data[self._at] < 0x80:  # noqa: PLR2004 - almost all have one byte
            self._at += 1
            return self._data[self._at - 1]
        number = shift = 0
        for at in range(self._at, min(self._at + 5, len(self._data))):
            byte = self._data[at]
            number |= (byte & 0x7F) << shift
            if byte < 0x80:  # noqa: PLR2004 - the last byte has no high bit
                if number >> 32 or (byte == 0 and shift):
                    break
                self._at = at + 1
                return number
            shift += 7
        raise self.corrupt(f"has no whole number at byte {self._at}")

    def nullable(self) -> bytes | None:
        announced = self.uvarint()
        return self.take(announced - 1) if announced else None

    def text(self) -> str:
        at = self._at
        data = self.nullable()
        if data is None:
            raise self.corrupt(f"has no text at byte {at}")
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self.corrupt(f"has broken text at byte {at}") from error

    def count(self, *, item_size: int) -> int:
        """Number of items that follow, each of at least this size."""
        announced = self.uvarint()
        left = len(self._data) - self._at
        if announced == 0:
            raise self.corrupt(f"has no list before byte {self._at}")
        if (announced - 1) * item_size > left:
            raise self.corrupt(f"announces {announced - 1} items before byte {self._at} and has {left} bytes")
        return announced - 1

    def tags(self, known: int = -1) -> bytes | None:
        """The known tagged field, if present; all others are skipped."""
        count = self.uvarint()
        if count == 0:
            return None
        found, before = None, -1
        for _ in range(count):
            tag, length = self.uvarint(), self.uvarint()
            if tag <= before:
                raise self.corrupt(f"has tagged field {tag} after {before} at byte {self._at}")
            before = tag
            data = self.take(length)
            if tag == known:
                found = data
        return found

    def corrupt(self, what: str) -> CorruptData:
        return CorruptData(
            f"{self._where} is no segment event: it {what}. Retrying does not help; check its publisher."
        )


def _read_partition(reader: _EventReader) -> TopicPartition:
    name = reader.text()
    topic_id, partition = reader.fields(_TOPIC_PARTITION)
    reader.tags()
    return TopicPartition(name, UUID(bytes=topic_id), partition)


def _read_segment(reader: _EventReader) -> SegmentId:
    partition = _read_partition(reader)
    segment = reader.uuid()
    reader.tags()
    return SegmentId(partition, segment)


def _read_term(reader: _EventReader) -> tuple[int, int]:
    term, offset = reader.fields(_TERM)
    reader.tags()
    return term, offset


def _read_state(reader: _EventReader, kind: type[S], what: str) -> S:
    (number,) = reader.fields(_STATE)
    try:
        return kind(number)
    except ValueError as error:
        raise reader.corrupt(f"has the unknown {what} {number}") from error


def _read_add(reader: _EventReader) -> SegmentMetadata:
    segment = _read_segment(reader)
    start, end, broker, max_timestamp, event_timestamp = reader.fields(_RANGE)
    terms = tuple(_read_term(reader) for _ in range(reader.count(item_size=_SMALLEST_TERM)))
    (size,) = reader.fields(_SIZE)
    custom, state = reader.nullable(), _read_state(reader, SegmentState, "segment state")
    flag = reader.tags(_NO_TRANSACTION_INDEX)
    if flag not in (None, b"\x00", b"\x01"):
        raise reader.corrupt("has a tagged field 0 that is neither true nor false")
    return SegmentMetadata(
        segment=segment,
        start=start,
        end=end,
        broker=broker,
        max_timestamp=max_timestamp,
        event_timestamp=event_timestamp,
        terms=terms,
        size=size,
        custom_metadata=custom,
        state=state,
        no_transaction_index=flag == b"\x01",
    )


def _read_update(reader: _EventReader) -> SegmentUpdate:
    segment = _read_segment(reader)
    broker, timestamp = reader.fields(_ORIGIN)
    custom, state = reader.nullable(), _read_state(reader, SegmentState, "segment state")
    reader.tags()
    return SegmentUpdate(segment=segment, broker=broker, event_timestamp=timestamp, state=state, custom_metadata=custom)


def _read_delete(reader: _EventReader) -> PartitionDelete:
    partition = _read_partition(reader)
    broker, timestamp = reader.fields(_ORIGIN)
    state = _read_state(reader, PartitionDeleteState, "state of a partition's deletion")
    reader.tags()
    return PartitionDelete(partition=partition, broker=broker, event_timestamp=timestamp, state=state)


# --- which partition of the event topic ------------------------------------------------------------------------

_SEED: Final = 0x9747B28C
_MIX: Final = 0x5BD1E995
_32_BITS: Final = 0xFFFFFFFF


def metadata_partition(topic_id: UUID, partition: int, count: int) -> int:
    """The partition of the event topic, of ``count``, for a topic partition: the same in every program.

    >>> metadata_partition(UUID("12345678-9abc-def0-0011-223344556677"), 7, 50)
    26
    """
    if count < 1:
        raise InvalidInput(f"An event topic cannot have {count} partitions: use at least 1.")
    if not 0 <= partition < 1 << 31:
        raise InvalidInput(f"There is no partition {partition} of topic {topic_id}: use 0 to 2^31 - 1.")
    high, low = topic_id.int >> 64, topic_id.int & (1 << 64) - 1
    mixed = 31 * (31 * (31 + _hash_of_half(low)) + _hash_of_half(high)) + partition
    return (_murmur2((mixed & _32_BITS).to_bytes(4, "big")) & 0x7FFFFFFF) % count


def _hash_of_half(half: int) -> int:
    return (half ^ half >> 32) & _32_BITS


def _murmur2(word: bytes) -> int:
    """MurmurHash2 of four bytes."""
    mixed = int.from_bytes(word, "little") * _MIX & _32_BITS
    mixed = (mixed ^ mixed >> 24) * _MIX & _32_BITS
    found = (_SEED ^ len(word)) * _MIX & _32_BITS ^ mixed
    found = (found ^ found >> 13) * _MIX & _32_BITS
    return found ^ found >> 15
