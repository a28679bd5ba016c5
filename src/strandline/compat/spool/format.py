"""Legacy single-file spools: the records of ``NAME.logical.wal`` and the slots of ``NAME.logical.slots.json``.

A spool mixes frames of versions 1 to 3. Its content is its longest valid prefix; nothing after the first damage is
read, and damage is never raised.
"""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, NamedTuple, NoReturn
from zlib import crc32

import msgspec

from strandline.errors import CorruptData, InvalidInput, NotFound
from strandline.formats.arrow.block import Parts
from strandline.formats.json.checked import damage
from strandline.formats.json.slots import read_slots
from strandline.formats.wal.frame import MAGIC, MAX_PAYLOAD
from strandline.model.json_values import LARGEST, has_too_many_values
from strandline.model.retention import SlotState
from strandline.storage.env import SYSTEM, Env

UNCHECKED_VERSION: Final = 1
TERMLESS_VERSION: Final = 2
RECORD_VERSION: Final = 3
"""The version that an export writes: one record per frame, with its term."""

_LEAD: Final = len(MAGIC) + 1
_BEGINNING: Final = re.compile(re.escape(MAGIC))
_CHECKED_BYTES: Final = 8
"""Bytes that are checked for each byte behind damage, at most: hostile bytes may look like a frame at any place."""
_CHECKSUM = struct.Struct("<I")
_V1 = struct.Struct("<QQ")
_V2 = struct.Struct("<QQI")
_V3 = struct.Struct("<QQQI")
_HEADERS: Final = {UNCHECKED_VERSION: _V1, TERMLESS_VERSION: _V2, RECORD_VERSION: _V3}


class LegacyFrame(NamedTuple):
    """A whole frame: its fields, a view of its payload, and its position in the file."""

    version: int
    term: int | None
    """None for versions 1 and 2, which have no term."""
    lsn: int
    timestamp: int
    """Milliseconds since the epoch; 0 for version 1, which has no time."""
    payload: memoryview
    start: int
    end: int


class LegacyEnding(Enum):
    """Why no further frame was found."""

    CLEAN = "clean"
    """The bytes end with a frame."""
    TORN = "torn"
    """The bytes end within a frame; fewer than four bytes always count as torn."""
    BAD_MAGIC = "bad magic"
    BAD_CHECKSUM = "bad checksum"
    UNKNOWN_VERSION = "unknown version"
    IMPLAUSIBLE_LENGTH = "implausible length"


class LegacyStop(NamedTuple):
    """End of the last whole frame, and what follows it."""

    ending: LegacyEnding
    at: int
    why: str
    needs: int = 0
    """For ``TORN`` and ``BAD_CHECKSUM``: bytes of the frame, as its header says. Never more than a frame can have."""


def encode_record_frame(term: int, lsn: int, timestamp: int, payload: bytes | memoryview) -> Parts:
    """A frame of version 3 as buffers to be written one after another; the payload is not copied.

    ``timestamp`` is in milliseconds. ``InvalidInput`` if the payload is over 256 MiB or a number does not fit 64 bits.

    >>> b"".join(encode_record_frame(2, 7, 11, b"hello")).hex()
    '52444c5703020000000000000007000000000000000b000000000000000500000068656c6c6ff0426d80'
    """
    length = memoryview(payload).nbytes
    if length > MAX_PAYLOAD:
        raise InvalidInput(
            f"A frame may hold {MAX_PAYLOAD:,} bytes and this record has {length:,}: write it as several records."
        )
    try:
        covered = bytes([RECORD_VERSION]) + _V3.pack(term, lsn, timestamp, length)
    except struct.error as error:
        raise InvalidInput(
            f"A frame cannot hold term {term}, lsn {lsn} and timestamp {timestamp}: each is a whole number of 64 bits "
            f"that is not negative."
        ) from error
    return [MAGIC + covered, payload, _CHECKSUM.pack(crc32(payload, crc32(covered)))]


def legacy_frame_at(data: memoryview, at: int) -> LegacyFrame | LegacyStop:
    """The frame that begins at byte ``at`` of these bytes, or why there is none; the cost is that of one frame."""
    if at == len(data):
        return LegacyStop(LegacyEnding.CLEAN, at, "the bytes end")
    header = _header_at(data, at)
    if isinstance(header, LegacyStop):
        return header
    version, numbers, body, rest = header
    end = rest if version == UNCHECKED_VERSION else rest + _CHECKSUM.size
    if end > len(data):
        return LegacyStop(LegacyEnding.TORN, at, "the bytes end within a frame", end - at)
    payload = data[body:rest]
    if version == UNCHECKED_VERSION:
        return LegacyFrame(version, None, numbers[0], 0, payload, at, end)
    if crc32(data[at + len(MAGIC) : rest]) != _CHECKSUM.unpack_from(data, rest)[0]:
        return LegacyStop(LegacyEnding.BAD_CHECKSUM, at, "the checksum of a frame is wrong", end - at)
    term = numbers[0] if version == RECORD_VERSION else None
    return LegacyFrame(version, term, numbers[-2], numbers[-1], payload, at, end)


def _header_at(data: memoryview, at: int) -> tuple[int, list[int], int, int] | LegacyStop:
    """The version, the numbers before the length, and the bounds of the payload if it is complete."""
    lead = bytes(data[at : at + _LEAD])
    # Fewer bytes than a magic are a torn magic, whatever they are: a disk may keep a length and lose
    # the written bytes.
    if len(lead) >= len(MAGIC) and not lead.startswith(MAGIC):
        return LegacyStop(LegacyEnding.BAD_MAGIC, at, f"no frame begins with {lead.hex(' ')}")
    if len(lead) < _LEAD:
        return LegacyStop(LegacyEnding.TORN, at, "the bytes end within a header", _LEAD)
    version = lead[-1]
    header = _HEADERS.get(version)
    if header is None:
        return LegacyStop(LegacyEnding.UNKNOWN_VERSION, at, f"a frame is of version {version}")
    body = at + _LEAD + header.size
    if body > len(data):
        return LegacyStop(LegacyEnding.TORN, at, "the bytes end within a header", body - at)
    *numbers, length = header.unpack_from(data, at + _LEAD)
    if length > MAX_PAYLOAD:
        # Before the number of bytes is compared: an impossible length is damage, not a torn tail.
        return LegacyStop(LegacyEnding.IMPLAUSIBLE_LENGTH, at, f"a frame has a length of {length:,} bytes")
    return version, numbers, body, body + length


class LegacyScanner:
    """Reads frames of versions 1 to 3 one after another, as views of the given bytes; nothing is copied.

    Iterate over it; then :attr:`stop` says where and why it ended. Payloads are returned unchanged.

    >>> frame = b"".join(encode_record_frame(2, 7, 11, b"hello"))
    >>> scanner = LegacyScanner(memoryview(frame + frame[:3]))
    >>> [(found.term, found.lsn, bytes(found.payload)) for found in scanner]
    [(2, 7, b'hello')]
    >>> scanner.stop.ending, scanner.stop.at
    (<LegacyEnding.TORN: 'torn'>, 42)
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.stop = LegacyStop(LegacyEnding.CLEAN, 0, "nothing was read yet")

    def __iter__(self) -> Iterator[LegacyFrame]:
        at = 0
        while True:
            found = legacy_frame_at(self._data, at)
            if isinstance(found, LegacyStop):
                self.stop = found
                return
            at = found.end
            yield found


def frame_behind(data: memoryview, stop: LegacyStop) -> int | None:
    """The byte at which a whole frame begins behind the damage; None for a torn tail, behind which there is none.

    A program that crashed has written nothing behind a frame that it did not finish. A frame without a checksum counts
    only if another frame, or the end, follows it.

    >>> one, two = (b"".join(encode_record_frame(1, lsn, 0, b"a")) for lsn in (1, 2))
    >>> scanner = LegacyScanner(memoryview(b"?" + one[1:] + two))
    >>> list(scanner), frame_behind(memoryview(b"?" + one[1:] + two), scanner.stop)
    ([], 38)
    >>> frame_behind(memoryview(one + two[:9]), LegacyStop(LegacyEnding.TORN, 38, "")) is None
    True
    """
    if stop.ending is LegacyEnding.CLEAN:
        return None
    budget = _CHECKED_BYTES * (len(data) - stop.at)
    for match in _BEGINNING.finditer(data, stop.at + 1):
        found = legacy_frame_at(data, match.start())
        if isinstance(found, LegacyStop):
            budget -= found.needs if found.ending is LegacyEnding.BAD_CHECKSUM else 0
            if budget < 0:
                return match.start()
        elif found.version != UNCHECKED_VERSION or _is_followed(data, found.end):
            return match.start()
    return None


def _is_followed(data: memoryview, at: int) -> bool:
    following = legacy_frame_at(data, at)
    return isinstance(following, LegacyFrame) or following.ending is LegacyEnding.CLEAN


SPOOL: Final = ".logical.wal"
SPOOL_SLOTS: Final = ".logical.slots.json"

DEFAULT_TERM: Final = 1
"""The term of a record without one."""
_LARGEST: Final = (1 << 64) - 1
_MICROSECONDS: Final = 1000
_SLOT_NUMBERS: Final = ("epoch", "expires", "born", "suspected")

_BLANK: Final = re.compile(r"[ \t\n\r]*")
_OBJECT: Final = re.compile(rb"[ \t\n\r]*\{")


class SpoolRecord(NamedTuple):
    """One record of a spool. The payload is a view of the spool's bytes unless its term had to be corrected."""

    term: int
    lsn: int
    timestamp: int
    """Milliseconds since the epoch; 0 if the frame has no time."""
    payload: memoryview


class SpoolRun(NamedTuple):
    """Neighbouring records that one batch can hold: one term, each lsn one above the last."""

    term: int
    first: int
    timestamps: list[int]
    payloads: list[memoryview]


def spool_records(frames: Iterable[LegacyFrame]) -> Iterator[SpoolRecord]:
    """The records in frames, with the term of each. It never raises; the continuity of lsns is not checked."""
    for frame in frames:
        change = _change(frame.payload)
        if change is None:
            term = DEFAULT_TERM if frame.term is None else frame.term
            yield SpoolRecord(term, frame.lsn, frame.timestamp, frame.payload)
            continue
        text, term = change
        payload = frame.payload
        if frame.term is not None and frame.term != term:
            # The frame's own term counts: the record in it may have an older one.
            term = frame.term
            payload = memoryview(_with_term(text, term).encode())
        yield SpoolRecord(term, frame.lsn, frame.timestamp, payload)


def runs(records: Iterable[SpoolRecord], *, max_count: int, max_bytes: int) -> Iterator[SpoolRun]:
    """The records as columns, in runs; a run ends where the term changes, lsns are not dense, or a limit is reached.

    A record over ``max_bytes`` is a run by itself. Where lsns leave a gap or go back, a run ends and the next begins
    with the found lsn: compare ``first`` with the expected one.
    """
    run, size = SpoolRun(0, 0, [], []), 0
    for term, lsn, timestamp, payload in records:
        count = len(run.payloads)
        if count and (
            term != run.term or lsn != run.first + count or count >= max_count or size + payload.nbytes > max_bytes
        ):
            yield run
            count = 0
        if not count:
            run, size = SpoolRun(term, lsn, [], []), 0
        run.timestamps.append(timestamp)
        run.payloads.append(payload)
        size += payload.nbytes
    if run.payloads:
        yield run


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_JSON: Final = json.JSONDecoder(parse_constant=_refuse_constant)


def _change(payload: memoryview) -> tuple[str, int] | None:
    """The text and the term of a change record; None for other payloads, most of which are recognised at once."""
    if _OBJECT.match(payload) is None or has_too_many_values(payload):  # no change record
        return None
    try:
        text = str(payload, "utf-8")
        fields = _JSON.decode(text)
        _natural(fields["lsn"])
        if not isinstance(fields["operation"], str) or not isinstance(fields["collection"], str):
            return None
    except (ValueError, KeyError, RecursionError):
        return None
    try:
        return text, _natural(fields.get("term", DEFAULT_TERM))
    except ValueError:
        return text, DEFAULT_TERM


def _with_term(text: str, term: int) -> str:
    """The object with this term: inserted first if it had none, else replaced. Every other character stays."""
    opening = text.index("{") + 1
    if '"term"' not in text and "\\" not in text:  # fast path; with an escape the name may be spelled differently
        return f'{text[:opening]}"term":{term},{text[opening:]}'
    spans, at = [], _skip(text, opening)
    while text[at] == '"':  # the text is a well-formed object: it was decoded before
        name, at = _JSON.raw_decode(text, at)
        start = _skip(text, _skip(text, at) + 1)
        _, end = _JSON.raw_decode(text, start)
        if name == "term":
            spans.append((start, end))
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    if not spans:
        return f'{text[:opening]}"term":{term},{text[opening:]}'
    for start, end in reversed(spans):  # a duplicate name: readers differ in which value they use
        text = f"{text[:start]}{term}{text[end:]}"
    return text


def _skip(text: str, at: int) -> int:
    blank = _BLANK.match(text, at)
    return at if blank is None else blank.end()


def _slot_fields(fields: Mapping[str, Any], now: int) -> dict[str, Any]:
    """The fields of a slot under their present names; its position is read apart."""
    invalid, reason = fields.get("invalid"), fields.get("invalidation_reason")
    if invalid is not None:
        invalid = {"reason": invalid["reason"], "at": _natural(invalid["at"])}
    elif reason is not None:
        invalid = {"reason": reason, "at": _time(fields, "invalidated_at", now)}
    numbers = {name: _natural(fields[name]) for name in _SLOT_NUMBERS if fields.get(name) is not None}
    times = {"last_seen": _time(fields, "last_seen", now), "invalid": invalid}
    return {"holder": None, "epoch": 0, **fields, **numbers, **times, "position": 0}


def _position(fields: Mapping[str, Any]) -> int:
    # An lsn is an offset plus one: the last lsn that a consumer has is the next offset that it needs.
    return _natural(fields["position"] if "position" in fields else fields["restart_lsn"])


def _time(fields: Mapping[str, Any], name: str, now: int) -> int:
    if fields.get(name) is not None:
        return _natural(fields[name])
    milliseconds = fields.get("last_seen_at_unix_ms" if name == "last_seen" else "invalidated_at_unix_ms")
    return now if milliseconds is None else _natural(milliseconds) * _MICROSECONDS


def _natural(value: object) -> int:
    """A number from 0 on. Older writers stored all numbers as floats, so that 7.0 is 7."""
    found = int(value) if isinstance(value, float) and value.is_integer() else value
    if type(found) is not int or not 0 <= found <= _LARGEST:
        raise ValueError(f"{str(value)[:80]} is no whole number in range")
    return found


def decode_slots(data: bytes | memoryview, where: str, *, now: int) -> list[SlotState]:
    """The slots in these bytes, in their order; damage is ``CorruptData``, never "no slots".

    Also reads the older names ``restart_lsn``, ``last_seen_at_unix_ms``, ``invalidation_reason`` and
    ``invalidated_at_unix_ms``. ``now`` (microseconds) replaces missing times: the later one retains more.

    >>> decode_slots(b'{"slots": [{"id": "a", "restart_lsn": 7}]}', "it", now=5)[0].position
    7
    """
    with damage(where, "Restore the file, or move it away to continue without its slots."):
        if len(data) > LARGEST or has_too_many_values(data):
            raise ValueError(f"{len(data):,} bytes are too large for slots")
        found = msgspec.convert(_JSON.decode(str(data, "utf-8"))["slots"], list[dict[str, Any]])
        slots = read_slots([_slot_fields(fields, now) for fields in found])
        "".join(slot.name + (slot.holder or "") for slot in slots).encode()  # half a surrogate is a ValueError
        return [replace(slot, position=_position(fields)) for slot, fields in zip(slots, found, strict=True)]


@dataclass(frozen=True, slots=True)
class SpoolFile:
    """A spool: its valid bytes, and why it ends there."""

    spool: str
    size: int
    valid_bytes: int
    ending: str
    why: str
    versions: dict[str, int]
    """Number of frames of each version."""
    first_lsn: int | None
    last_lsn: int | None
    slots: int | None
    """Number of its slots; None if the file is missing or unreadable."""
    problems: tuple[str, ...] = ()


def inspect_spool(path: str, each: Callable[[LegacyFrame], object] | None = None, *, env: Env = SYSTEM) -> SpoolFile:
    """Read a spool up to its first damage; ``each`` is called with its frames."""
    data = env.disk.read(path)
    scanner = LegacyScanner(memoryview(data))
    versions: Counter[str] = Counter()
    lsns: list[int] = []
    for frame in scanner:
        versions[str(frame.version)] += 1
        lsns = [lsns[0] if lsns else frame.lsn, frame.lsn]
        if each is not None:
            each(frame)
    slots, problems = None, []
    beside = path.removesuffix(SPOOL) + SPOOL_SLOTS
    try:
        slots = len(decode_slots(env.disk.read(beside), beside, now=env.clock.now()))
    except NotFound:
        pass
    except CorruptData as error:
        problems.append(str(error))
    stop = scanner.stop
    return SpoolFile(
        spool=path,
        size=len(data),
        valid_bytes=stop.at,
        ending=stop.ending.value,
        why=stop.why,
        versions=dict(sorted(versions.items())),
        first_lsn=lsns[0] if lsns else None,
        last_lsn=lsns[-1] if lsns else None,
        slots=slots,
        problems=tuple(problems),
    )
