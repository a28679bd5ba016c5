"""The manifest of a version 1 queue, as bytes."""

from __future__ import annotations

import struct
from itertools import chain
from typing import Final

from strandline.compat.v1.batch_format import MAX_INT64, PLAUSIBLE_VERSION, VERSION
from strandline.errors import CorruptData, InvalidInput, UnsupportedVersion
from strandline.model.cursor import MILLISECOND
from strandline.model.head import MetadataRanges, QueueEntry, QueueManifest
from strandline.model.stamp import Stamped

_FOOTER = struct.Struct("<IQQH")
_ENTRY = struct.Struct("<IQH")
_COUNT = struct.Struct("<I")
_RANGE = struct.Struct("<IqI")
_SMALLEST_ENTRY: Final = _ENTRY.size + _COUNT.size


def decode_manifest(data: bytes | memoryview, where: str) -> QueueManifest:
    """The manifest in these bytes; ``CorruptData`` or ``UnsupportedVersion`` naming ``where``.

    Its sequences are dense and end just below the next one: readers may rely on that.
    """
    view = memoryview(data).cast("B")
    if len(view) < _FOOTER.size:
        raise _damaged(where, f"has {len(view)} bytes, too few for a manifest")
    body = view[: -_FOOTER.size]
    count, next_sequence, epoch, version = _FOOTER.unpack_from(view, len(body))
    if VERSION < version <= PLAUSIBLE_VERSION:
        raise UnsupportedVersion(
            f"{where} is a manifest of version {version}, and this program reads version {VERSION}: upgrade strandline."
        )
    if version != VERSION:
        raise CorruptData(f"{where} is damaged: there is no manifest of version {version}. Restore the object.")
    if count * _SMALLEST_ENTRY > len(body) or count > next_sequence:
        raise _damaged(where, f"announces {count:,} entries, more than it can hold")
    if next_sequence > MAX_INT64:
        raise _damaged(where, f"has {next_sequence:,} as its next sequence, which no queue reaches")
    entries, at = [], 0
    for sequence in range(next_sequence - count, next_sequence):
        entry, at = _unpack_entry(body, at, sequence, where)
        entries.append(entry)
    if at != len(body):
        raise _damaged(where, f"has {len(body) - at} bytes too many after its entries")
    return QueueManifest(tuple(entries), next_sequence, epoch)


def may_be_manifest(data: bytes | memoryview) -> bool:
    """Whether these bytes end as a manifest of a known or later version does; other files hardly ever do."""
    view = memoryview(data).cast("B")
    if len(view) < _FOOTER.size:
        return False
    body = len(view) - _FOOTER.size
    count, next_sequence, _, version = _FOOTER.unpack_from(view, body)
    fits: bool = VERSION <= version <= PLAUSIBLE_VERSION and next_sequence <= MAX_INT64
    return fits and count <= min(next_sequence, body // _SMALLEST_ENTRY)


def _damaged(where: str, what: str) -> CorruptData:
    return CorruptData(f"{where} is damaged: it {what}. Restore the object; retrying does not help.")


class ManifestCodec:
    """The manifest as a cell's content. The format has no room for a stamp: the cell remembers no operations.

    Encoded entries are cached: the next manifest has nearly the same ones.
    """

    def __init__(self) -> None:
        self.encoded = 0
        """Number of encoded states: one for each attempted write."""
        self._last: tuple[tuple[QueueEntry, ...], list[bytes]] = ((), [])

    def encode(self, state: Stamped[QueueManifest]) -> bytes:
        """The bytes of a state. Ingestion times are truncated to the millisecond."""
        self.encoded += 1
        entries = state.value.entries
        known, packed = self._last
        skip = entries[0].sequence - known[0].sequence if entries and known else 0
        pairs = zip(entries, known[skip:], packed[skip:], strict=False) if skip >= 0 else ()
        ready = [data if entry is same else _pack_entry(entry) for entry, same, data in pairs]
        ready += map(_pack_entry, entries[len(ready) :])
        self._last = entries, ready
        next_sequence, epoch = state.value.next_sequence, state.value.epoch
        try:
            footer = _FOOTER.pack(len(entries), next_sequence, epoch, VERSION)
        except struct.error as error:
            raise InvalidInput(
                f"A manifest of version {VERSION} has no room for {len(entries):,} entries up to sequence "
                f"{next_sequence:,} in epoch {epoch:,}: {error}."
            ) from error
        return b"".join((*ready, footer))

    def decode(self, data: bytes | memoryview, where: str) -> Stamped[QueueManifest]:
        """The state in these bytes."""
        return Stamped(decode_manifest(data, where))


def _pack_entry(entry: QueueEntry) -> bytes:
    try:
        location, ranges = entry.location.encode(), _pack_ranges(MetadataRanges.of(entry.metadata))
        length = _SMALLEST_ENTRY - 4 + len(location) + len(ranges)
        fixed = _ENTRY.pack(length, entry.sequence, len(location))
        return b"".join((fixed, location, _COUNT.pack(len(entry.metadata)), ranges))
    except struct.error as error:
        raise InvalidInput(f"A manifest of version {VERSION} has no room for {entry!r:.200}: {error}.") from error


def _pack_ranges(ranges: MetadataRanges) -> bytes:
    times = [time // MILLISECOND for time in ranges.times]
    leads = map(_RANGE.pack, ranges.starts, times, map(len, ranges.payloads))
    return b"".join(chain.from_iterable(zip(leads, ranges.payloads, strict=True)))


def _unpack_entry(body: memoryview, at: int, expected: int, where: str) -> tuple[QueueEntry, int]:
    """The entry at a byte, and the position of the next one. Called for every entry of every manifest: kept simple."""
    if at + _SMALLEST_ENTRY > len(body):
        raise _damaged(where, f"ends within an entry at byte {at}")
    length, sequence, name = _ENTRY.unpack_from(body, at)
    end, middle = at + 4 + length, at + _ENTRY.size + name
    if end > len(body) or middle + 4 > end:
        raise _damaged(where, f"has an entry at byte {at} that does not fit into the manifest")
    if sequence != expected:
        raise _damaged(where, f"lists sequence {sequence} where {expected} should be")
    try:
        location = str(body[at + _ENTRY.size : middle], "utf-8")
    except UnicodeDecodeError as error:
        raise _damaged(where, f"holds broken text at byte {at}") from error
    starts, times, payloads = [], [], []
    (count,) = _COUNT.unpack_from(body, middle)
    at = middle + 4
    for _ in range(count):
        start, time, size = _RANGE.unpack_from(body, at) if at + _RANGE.size <= end else (0, 0, end)
        payload = at + _RANGE.size
        at = payload + size
        if at > end:
            raise _damaged(where, f"has metadata before byte {payload} that runs past its entry")
        starts.append(start)
        times.append(time * MILLISECOND)
        payloads.append(bytes(body[payload:at]))
    if at != end:
        raise _damaged(where, f"has {end - at} bytes too many in an entry")
    return QueueEntry(sequence, location, MetadataRanges(tuple(starts), tuple(times), tuple(payloads))), end
