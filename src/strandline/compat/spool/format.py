"""Legacy single-file spools: the records of ``NAME.logical.wal`` and the slots of ``NAME.logical.slots.json``.

A spool mixes frames of versions 1 to 3. What it holds is its longest valid prefix; what follows the first damage is
not looked at, and damage is never raised: a spool is what is left of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, NoReturn

from strandline.compat.spool.legacy_frame import LegacyScanner, LegacyStop
from strandline.errors import CorruptData
from strandline.formats.wal.slots import natural_of, slot_fields, slots_of
from strandline.model.json_values import LARGEST, has_too_many_values
from strandline.model.retention import SlotState

DEFAULT_TERM: Final = 1
"""The term of a record that tells none."""

_BLANK: Final = re.compile(r"[ \t\n\r]*")
_OBJECT: Final = re.compile(rb"[ \t\n\r]*\{")


class SpoolRecord(NamedTuple):
    """One record of a spool. The payload is a view of the spool's bytes unless its term had to be put right."""

    term: int
    lsn: int
    timestamp: int
    """Milliseconds since the epoch; 0 where the frame does not say."""
    payload: memoryview


class SpoolRun(NamedTuple):
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


def runs(records: Iterable[SpoolRecord], *, max_count: int, max_bytes: int) -> Iterator[SpoolRun]:
    """The same records as columns, each run as long as one term, dense lsns and the two bounds allow.

    A record over ``max_bytes`` is a run by itself. Where lsns leave a gap or go back, a run ends and the next begins
    with what was found: compare ``first`` with what should follow.
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
        natural_of(fields["lsn"])
        if not isinstance(fields["operation"], str) or not isinstance(fields["collection"], str):
            return None
    except (ValueError, KeyError, RecursionError):
        return None
    try:
        return text, natural_of(fields.get("term", DEFAULT_TERM))
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
