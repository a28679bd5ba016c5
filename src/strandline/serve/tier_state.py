"""The cold tier of a log as fields of JSON: its segments, by their events."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from strandline.formats.json.records import time_text
from strandline.model.segments import SegmentId, SegmentMetadata, SegmentState
from strandline.tier.copy.ledger import known_segments
from strandline.tier.read.tiered_log import TieredLog


def tier_fields(log: TieredLog) -> dict[str, Any]:
    """The segments of a log by first offset, and the offsets of its hot tier; ``NotReady`` if they are not known."""
    hot = log.hot.bounds()  # first: the segments of its trimmed records were published before
    cold, reader = log.unchecked_cold_tier()
    known = known_segments(reader.registry, reader.partition)
    return {
        "store": cold.store,
        "hot": {"first": hot.first, "next": hot.next},
        "segments": [segment_fields(segment, known.spare) for segment in known.segments],
    }


def segment_fields(segment: SegmentMetadata, spare: Collection[SegmentId]) -> dict[str, Any]:
    """One segment. ``end`` is its last offset; ``terms`` has the start of each of its terms."""
    return {
        "start": segment.start,
        "end": segment.end,
        "records": segment.end - segment.start + 1,
        "size": segment.size,
        "state": segment.state.name.lower().replace("_", "-"),
        "superseded": segment.state is SegmentState.COPY_FINISHED and segment.segment in spare,
        "terms": segment.terms,
        "max_timestamp": newest(segment.max_timestamp),
        "id": str(segment.segment.id),
    }


def newest(milliseconds: int) -> str | None:
    """The time of the newest record, UTC; None if there is none.

    >>> newest(1_700_000_000_123), newest(-1)
    ('2023-11-14T22:13:20.123Z', None)
    """
    if milliseconds == -1:
        return None
    found = time_text(milliseconds * 1000)  # records may have any time
    return f"{found[:-4]}Z" if isinstance(found, str) else f"{milliseconds} ms"
