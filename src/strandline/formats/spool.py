"""Legacy single-file spools: the records of ``NAME.logical.wal`` and the slots of ``NAME.logical.slots.json``.

A spool mixes frames of versions 1 to 3. What it holds is its longest valid prefix; what follows the first damage is
not looked at, and damage is never raised: a spool is what is left of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

from strandline.formats.legacy_frame import LegacyScanner, LegacyStop
from strandline.model.errors import CorruptData
from strandline.model.json_values import LARGEST, fingerprint_of, fingerprint_text, has_too_many_values
from strandline.model.slots import Invalidation, InvalidReason, SlotState

T = TypeVar("T")

DEFAULT_TERM: Final = 1
"""The term of a record that tells none."""

_LARGEST: Final = (1 << 64) - 1
_MICROSECONDS: Final = 1000
_BLANK: Final = re.compile(r"[ \t\n\r]*")
_OBJECT: Final = re.compile(rb"[ \t\n\r]*\{")


class SpoolRecord(NamedTuple):
    """One record of a spool. The payload is a view of the spool's bytes unless its term had to be put right."""

    term: int
    lsn: int
    timestamp: int
    """Milliseconds since the epoch; 0 where the frame does not say."""
    payload: memoryview


class Run(NamedTuple):
    """Neighbouring records that one batch can hold: one term, each lsn one above the last."""

    term: int
    first: int
    timestamps: list[int]
    payloads: list[memoryview]


class Spool(NamedTuple):
    """All that a spool holds, how many of its bytes that is, and what stopped the reading."""

    records: list[SpoolRecord]
    valid_bytes: int
    stop: LegacyStop


class SpoolScanner:
    """Reads a spool record by record, in one pass; iterate over it, then :attr:`stop` says where and why it ended.

    It never raises, whatever the bytes are. The lsns are given as found: that they follow each other is not checked.
    """

    def __init__(self, data: memoryview) -> None:
        """Begin at the first byte of the spool."""
        self._frames = LegacyScanner(data)

    @property
    def stop(self) -> LegacyStop:
        """Where the valid prefix ends, and what is there instead of another frame."""
        return self._frames.stop

    def __iter__(self) -> Iterator[SpoolRecord]:
        for frame in self._frames:
            told = _change(frame.payload)
            if told is None:
                term = DEFAULT_TERM if frame.term is None else frame.term
                yield SpoolRecord(term, frame.lsn, frame.timestamp, frame.payload)
                continue
            text, term = told
            payload = frame.payload
            if frame.term is not None and frame.term != term:
                # The frame was fenced by its own term, and the record in it may be older: the frame's counts.
                term = frame.term
                payload = memoryview(_with_term(text, term).encode())
            yield SpoolRecord(term, frame.lsn, frame.timestamp, payload)


def read_spool(data: memoryview) -> Spool:
    """The longest valid prefix of a spool; damage is told, not raised, and nothing is changed.

    >>> frame = bytes.fromhex("52444c570105000000000000000300000000000000616263")
    >>> spool = read_spool(memoryview(frame + b"RDLW"))
    >>> [(record.term, record.lsn, bytes(record.payload)) for record in spool.records]
    [(1, 5, b'abc')]
    >>> spool.valid_bytes, spool.stop.ending.value
    (24, 'torn')
    """
    scanner = SpoolScanner(data)
    records = list(scanner)
    return Spool(records, scanner.stop.at, scanner.stop)


def runs(records: Iterable[SpoolRecord], *, max_count: int, max_bytes: int) -> Iterator[Run]:
    """The same records as columns, each run as long as one term, dense lsns and the two bounds allow.

    A record over ``max_bytes`` is a run by itself. Where lsns leave a gap or go back, a run ends and the next begins
    with what was found: compare ``first`` with what should follow.
    """
    run, size = Run(0, 0, [], []), 0
    for term, lsn, timestamp, payload in records:
        count = len(run.payloads)
        if count and (
            term != run.term or lsn != run.first + count or count >= max_count or size + payload.nbytes > max_bytes
        ):
            yield run
            count = 0
        if not count:
            run, size = Run(term, lsn, [], []), 0
        run.timestamps.append(timestamp)
        run.payloads.append(payload)
        size += payload.nbytes
    if run.payloads:
        yield run


# --- change records --------------------------------------------------------------------------------------------


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_JSON: Final = json.JSONDecoder(parse_constant=_refuse_constant)


def _change(payload: memoryview) -> tuple[str, int] | None:
    """The text and the term of a change record; None if these bytes are none, which most payloads show at once."""
    if _OBJECT.match(payload) is None or has_too_many_values(payload):  # then it is none
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
    """The same object with this term: first if it had none, else in its place. Every other character stays."""
    opening = text.index("{") + 1
    if '"term"' not in text and "\\" not in text:  # no need to look for it; with an escape it may be spelled otherwise
        return f'{text[:opening]}"term":{term},{text[opening:]}'
    spans, at = [], _skip(text, opening)
    while text[at] == '"':  # the text was decoded before: it is an object, and well formed
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
    for start, end in reversed(spans):  # a name that is there twice: readers differ in which they take
        text = f"{text[:start]}{term}{text[end:]}"
    return text


def _skip(text: str, at: int) -> int:
    blank = _BLANK.match(text, at)
    return at if blank is None else blank.end()


# --- slots -----------------------------------------------------------------------------------------------------


def encode_slots(slots: Iterable[SlotState]) -> bytes:
    """``{"slots": […]}``: each slot with the names that the project uses, times in microseconds."""
    return json.dumps({"slots": list(map(slot_fields, slots))}, indent=1, sort_keys=True).encode() + b"\n"


def decode_slots(data: bytes | memoryview, where: str, *, now: int) -> list[SlotState]:
    """The slots in these bytes, in their order; damage is ``CorruptData``, never "no slots".

    Also reads what older writers called ``restart_lsn``, ``last_seen_at_unix_ms``, ``invalidation_reason`` and
    ``invalidated_at_unix_ms``. ``now`` (microseconds) stands for times that are not told: the later one retains more.

    >>> decode_slots(b'{"slots": [{"id": "a", "restart_lsn": 7}]}', "it", now=5)[0].position
    7
    """
    try:
        if len(data) > LARGEST or has_too_many_values(data):
            raise ValueError(f"{len(data):,} bytes are more than slots have")  # noqa: TRY301 - one sentence for all
        return slots_of(_JSON.decode(str(data, "utf-8")), now)
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptData(
            f"{where} is damaged: {str(error)[:200]!r}. Restore the file, or move it away to go on without its slots."
        ) from error


def slots_of(fields: dict[str, Any], now: int) -> list[SlotState]:
    """The slots that a decoded object lists; ``ValueError`` and the like if it does not."""
    slots = [_slot(slot, now) for slot in _of_type(list, fields["slots"])]
    if len({slot.name for slot in slots}) < len(slots):
        raise ValueError("two slots have the same id")
    return slots


def slot_fields(slot: SlotState) -> dict[str, Any]:
    """A slot as an object of a slots file."""
    fields: dict[str, Any] = {
        "id": slot.name,
        "position": slot.position,
        "holder": slot.holder,
        "epoch": slot.epoch,
        "last_seen": slot.last_seen,
        "born": slot.born,
    }
    if slot.invalid is not None:
        fields["invalid"] = {"reason": str(slot.invalid.reason), "at": slot.invalid.at}
    if slot.expires is not None:
        fields["expires"] = slot.expires
    if slot.dropped:
        fields["dropped"] = True
    if slot.fingerprint is not None:
        fields["fingerprint"] = fingerprint_text(slot.fingerprint)
    return fields


def _slot(fields: dict[str, Any], now: int) -> SlotState:
    holder, expires = fields.get("holder"), fields.get("expires")
    return SlotState(
        name=_of_type(str, fields["id"]),
        # An lsn is an offset and one more: the last lsn that a consumer has is the next offset that it needs.
        position=_natural(fields["position"] if "position" in fields else fields["restart_lsn"]),
        holder=None if holder is None else _of_type(str, holder),
        epoch=_natural(fields.get("epoch", 0)),
        last_seen=_time(fields, "last_seen", "last_seen_at_unix_ms", now),
        invalid=_invalid(fields, now),
        expires=None if expires is None else _natural(expires),
        dropped=_of_type(bool, fields.get("dropped", False)),
        born=_natural(fields.get("born", 0)),
        fingerprint=fingerprint_of(fields.get("fingerprint")),
    )


def _invalid(fields: dict[str, Any], now: int) -> Invalidation | None:
    told, reason = fields.get("invalid"), fields.get("invalidation_reason")
    if told is not None:
        return Invalidation(InvalidReason(told["reason"]), _natural(told["at"]))
    if reason is not None:
        return Invalidation(InvalidReason(reason), _time(fields, "invalidated_at", "invalidated_at_unix_ms", now))
    return None


def _time(fields: dict[str, Any], name: str, older: str, now: int) -> int:
    if fields.get(name) is not None:
        return _natural(fields[name])
    milliseconds = fields.get(older)
    return now if milliseconds is None else _natural(milliseconds) * _MICROSECONDS


def _of_type(kind: type[T], value: object) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"a {type(value).__name__} is where a {kind.__name__} belongs")  # noqa: TRY004 - the bytes are wrong
    return value


def _natural(value: object) -> int:
    """A number of 64 bits. Older writers kept all numbers as floats, so that 7.0 is 7."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
        # The value itself is not told: it may be as large as the whole payload.
        raise ValueError(f"a {type(value).__name__} is where a number of 64 bits belongs")
    return value
