"""``strandline tier status``: which offsets each tier has, and the tierer's lag."""

from __future__ import annotations

from typing import Any

import typer
from rich.text import Text

from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import tierable_log
from strandline.cli.shared.common import Place, guarded
from strandline.model.segments import SegmentState
from strandline.tier.verify import TierStatus, TierView, segment_states, superseded, tier_status


@guarded
def status(log: Place) -> None:
    """Show where a log's cold tier is, which offsets each tier has, and the tierer's lag. Changes nothing.

    Ends with status 1 if the segments are unknown: prints the reason, and everything else.

    Example: strandline tier status s3://bucket/orders
    """
    found = tier_status(tierable_log(log))
    show.answer(_fields(found), *_lines(found))
    if found.seen is None:
        raise typer.Exit(1)


def _fields(status: TierStatus) -> dict[str, Any]:
    """The fields of ``--json``."""
    slot, seen = status.slot, status.seen
    return {
        "url": status.url,
        "log_id": str(status.cold.log_id),
        "store": status.cold.store,
        "events": {
            "url": status.cold.events,
            "partitions": status.cold.partitions,
            "partition": None if seen is None else seen.partition,
            "ready": seen is not None,
            "applied": None if seen is None else seen.events,
            "why": status.why,
        },
        "hot": {"first": status.hot.first, "next": status.hot.next},
        "cold": None if seen is None else _cold_fields(seen),
        "announced": status.cold.start,
        "slot": None
        if slot is None
        else {
            "slot": slot.name,
            "position": slot.position,
            "holder": slot.holder,
            "epoch": slot.epoch,
            "seconds_since_seen": round(max(0, status.now - slot.last_seen) / 1e6, 3),
            "invalid": None if slot.invalid is None else str(slot.invalid.reason),
        },
        "records_left": status.left.records,
        "bytes_left": status.left.size,
    }


def _cold_fields(seen: TierView) -> dict[str, Any]:
    finished = seen.known.answering
    return {
        "first": min((segment.start for segment in finished), default=None),
        "next": seen.tiered,
        "segments": len(finished),
        "bytes": sum(segment.size for segment in finished),
        "states": {state.name.lower(): count for state, count in segment_states(seen).items()},
        "superseded": superseded(seen),
        "deletion": None if seen.known.deletion is None else str(seen.known.deletion.state),
    }


def _lines(status: TierStatus) -> list[Text]:
    """The text output."""
    cold, hot = status.cold, status.hot
    rows = [Text(status.url, "bold"), show.fact("segments", cold.store)]
    events = f"{cold.events}  {show.counted(cold.partitions, 'partition')}"
    if status.seen is None:
        rows += [show.fact("events", events), show.fact("not known", f"{status.why}", "bold red")]
    else:
        ready = f"; number {status.seen.partition} is ready, with {show.counted(status.seen.events, 'event')}"
        rows += [show.fact("events", events + ready), show.fact("cold", _cold(status.seen))]
        rows += [show.fact("", text, "yellow") for text in _troubles(status.seen)]
    rows.append(show.fact("hot", show.offsets(hot.first, hot.next)))
    rows.append(show.fact("left", _left(status), "" if status.left.records == 0 else "yellow"))
    rows.append(show.fact("tierer", _tierer(status), "red" if status.slot and status.slot.invalid else ""))
    if cold.start:
        rows.append(show.fact("announced", f"nothing below offset {cold.start:,} may be needed any more"))
    return rows


def _cold(seen: TierView) -> str:
    finished = seen.known.answering
    if not finished or seen.tiered is None:
        return "nothing yet"
    size = show.size(sum(segment.size for segment in finished))
    return f"{show.offsets(finished[0].start, seen.tiered)}, in {show.counted(len(finished), 'segment')} ({size})"


def _troubles(seen: TierView) -> list[str]:
    parts = []
    states = segment_states(seen)
    if states[SegmentState.COPY_STARTED]:
        parts.append(f"{show.counted(states[SegmentState.COPY_STARTED], 'copy', 'copies')} under way, or left over")
    if states[SegmentState.DELETE_STARTED]:
        withdrawn = show.counted(states[SegmentState.DELETE_STARTED], "segment")
        parts.append(f"{withdrawn} replaced or being deleted: a tierer deletes replaced ones after its grace period")
    if superseded(seen):
        parts.append(f"{show.counted(superseded(seen), 'segment')} superseded, which the next round removes")
    if seen.tiered is not None and seen.tiered < seen.hot.first:
        parts.append(f"HOLE: offsets {seen.tiered:,} to {seen.hot.first - 1:,} are in neither tier")
    if seen.known.deletion is not None:
        parts.append(f"the whole cold tier is being deleted: {seen.known.deletion.state}")
    return parts


def _left(status: TierStatus) -> str:
    if not status.left.records:
        return "nothing: everything is in segments"
    return f"{show.counted(status.left.records, 'record')} ({show.size(status.left.size)}) in no segment yet"


def _tierer(status: TierStatus) -> str:
    slot = status.slot
    if slot is None:
        return "none has run yet: strandline tier run, or tier serve"
    if slot.invalid is not None:
        return f"its slot {slot.name!r} was invalidated ({slot.invalid.reason}) at {slot.position:,}: run it again"
    ago = show.seconds(max(0, status.now - slot.last_seen) / 1e6)
    holder = "nobody" if slot.holder is None else show.short(slot.holder)
    return f"slot {slot.name!r} at {slot.position:,}, held by {holder} (epoch {slot.epoch}), last seen {ago} ago"
