"""What the trimmers of an object log noted about inconsistent clocks, as JSON (``clock/note.json``)."""

from __future__ import annotations

import json

from strandline.model.times import NO_DOUBT, Doubt


def encode_clock_note(doubt: Doubt) -> bytes:
    """``clock/note.json``."""
    return json.dumps({"ahead_since": doubt.ahead_since, "leap_since": doubt.leap_since}, indent=1).encode() + b"\n"


def decode_clock_note(data: bytes | memoryview) -> Doubt:
    """Decode a note. A damaged note counts as none: the doubt is detected again."""
    try:
        fields = json.loads(bytes(data))
        since = [fields[name] for name in ("ahead_since", "leap_since")]
    except (KeyError, ValueError, TypeError, RecursionError):
        return NO_DOUBT
    if not all(value is None or (type(value) is int and abs(value) < 1 << 63) for value in since):
        return NO_DOUBT
    return Doubt(*since)
