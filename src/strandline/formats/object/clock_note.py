"""What the trimmers of an object log noted about inconsistent clocks, as JSON (``clock/note.json``)."""

from __future__ import annotations

import json
from dataclasses import asdict

from strandline.model.json_values import parse_json, read_record
from strandline.model.times import NO_DOUBT, Doubt


def encode_clock_note(doubt: Doubt) -> bytes:
    """``clock/note.json``."""
    return json.dumps(asdict(doubt), indent=1).encode() + b"\n"


def decode_clock_note(data: bytes | memoryview) -> Doubt:
    """Decode a note. A damaged note counts as none: the doubt is detected again."""
    try:
        return read_record(Doubt, parse_json(data))
    except ValueError:
        return NO_DOUBT
