"""Spools as tests read and write them: whole, and with the slots that are beside them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from strandline.compat.spool.format import LegacyScanner, LegacyStop, SpoolRecord, encode_record_frame, spool_records
from strandline.formats.json.slots import slot_fields
from strandline.model.retention import SlotState

RECORD_OVERHEAD = len(b"".join(encode_record_frame(1, 1, 1, b"")))
"""What a frame of version 3 takes beside its payload."""


class Spool(NamedTuple):
    """All that a spool holds, how many of its bytes that is, and what stopped the reading."""

    records: list[SpoolRecord]
    valid_bytes: int
    stop: LegacyStop


def read_spool(data: memoryview) -> Spool:
    """The longest valid prefix of a spool.

    >>> frame = bytes.fromhex("52444c570105000000000000000300000000000000616263")
    >>> spool = read_spool(memoryview(frame + b"RDLW"))
    >>> [(record.term, record.lsn, bytes(record.payload)) for record in spool.records]
    [(1, 5, b'abc')]
    >>> spool.valid_bytes, spool.stop.ending.value
    (24, 'torn')
    """
    scanner = LegacyScanner(data)
    records = list(spool_records(scanner))
    return Spool(records, scanner.stop.at, scanner.stop)


def encode_slots(slots: Iterable[SlotState]) -> bytes:
    """``{"slots": […]}``: each slot with the names that the project uses, times in microseconds."""
    return json.dumps({"slots": list(map(slot_fields, slots))}, indent=1, sort_keys=True).encode() + b"\n"
