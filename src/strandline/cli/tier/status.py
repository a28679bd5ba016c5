"""``strandline tier status``: address and lag of the cold tier."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import typer
from rich.text import Text

from strandline.cli import output as show
from strandline.cli.common import Debug, Json, guarded
from strandline.cli.tier.shared import AnyLog, Place, TierView, bytes_behind, look_at, open_to_look
from strandline.errors import StrandlineError
from strandline.model.cursor import Bounds
from strandline.model.retention import TIER_SLOT, SlotState
from strandline.model.segments import ColdTier, SegmentState
from strandline.tier.opening import cold_tier, follow_events, log_address


@dataclass(frozen=True, slots=True)
class TierStatus:
    """A log and its cold tier at one moment. Without ``seen``, ``why`` says what keeps the events from being known."""

    url: str
    cold: ColdTier
    hot: Bounds
    slot: SlotState | None
    seen: TierView | None
    why: str | None
    records_left: int
    bytes_left: int
    now: int

    def fields(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        slot, seen = self.slot, self.seen
        return {
            "url": self.url,
            "log_id": str(self.cold.log_id),
            "store": self.cold.store,
            "events": {
                "url": self.cold.events,
                "partitions": self.cold.partitions,
                "partition": None if seen is None else seen.partition,
                "ready": seen is not None,
                "applied": None if seen is None else seen.events,
                "why": self.why,
            },
            "hot": {"first": self.hot.first, "next": self.hot.next},
            "cold": None if seen is None else _cold_fields(seen),
            "announced": self.cold.start,
            "slot": None
            if slot is None
            else {
                "slot": slot.name,
                "position": slot.position,
                "holder": slot.holder,
                "epoch": slot.epoch,
                "seconds_since_seen": round(max(0, self.now - slot.last_seen) / 1e6, 3),
                "invalid": None if slot.invalid is None else str(slot.invalid.reason),
            },
            "records_left": self.records_left,
            "bytes_left": self.bytes_left,
        }


def _cold_fields(seen: TierView) -> dict[str, Any]:
    finished = seen.finished
    return {
        "first": min((segment.start for segment in finished), default=None),
        "next": seen.tiered,
        "segments": len(finished),
        "bytes": sum(segment.size for segment in finished),
        "states": {state.name.lower(): count for state, count in _states(seen).items()},
        "superseded": _superseded(seen),
        "deletion": None if seen.deletion is None else str(seen.deletion.state),
    }


@guarded
def status(log: Place, *, json: Json = False, debug: Debug = False) -> None:  # noqa: ARG001 - guarded looks at it
    """Say where a log's cold tier is, which offsets each tier has, and how far the tierer is behind. Changes nothing.

    Ends with status 1 if it is not known which segments there are: the reason is said, and the rest is.
    """
    seen = look(open_to_look(log))
    if json:
        show.document(seen.fields())
    else:
        out = show.out()
        for said in lines(seen):
            out.print(said, soft_wrap=True)
    if seen.seen is None:
        raise typer.Exit(1)


def look(log: AnyLog) -> TierStatus:
    """How the log's cold tier stands now; ``NotFound`` if it has none."""
    cold = cold_tier(log)
    seen, why = None, None
    try:
        with follow_events(cold) as manager:
            seen = look_at(log, cold, manager)
    except StrandlineError as error:
        why = str(error)
    slot = next((state for state in log.slots() if state.name == TIER_SLOT), None)
    hot = log.bounds()
    position = hot.first if slot is None else slot.position
    if seen is not None and seen.tiered is not None:
        position = seen.tiered
    return TierStatus(
        url=log_address(log),
        cold=cold,
        hot=hot,
        slot=slot,
        seen=seen,
        why=why,
        records_left=max(0, hot.next - position),
        bytes_left=bytes_behind(log, position) if position < hot.next else 0,
        now=_now(),
    )


def _now() -> int:
    return time.time_ns() // 1000


def lines(status: TierStatus) -> list[Text]:
    """What people are told."""
    cold, hot = status.cold, status.hot
    told = [Text(status.url, "bold"), _line("segments", cold.store)]
    events = f"{cold.events}  {show.counted(cold.partitions, 'partition')}"
    if status.seen is None:
        told += [_line("events", events), _line("not known", f"{status.why}", "bold red")]
    else:
        ready = f"; number {status.seen.partition} is ready, with {show.counted(status.seen.events, 'event')}"
        told += [_line("events", events + ready), _line("cold", _cold(status.seen))]
        told += [_line("", said, "yellow") for said in _troubles(status.seen)]
    told.append(_line("hot", _offsets(hot.first, hot.next)))
    told.append(_line("left", _left(status), "" if status.records_left == 0 else "yellow"))
    told.append(_line("tierer", _tierer(status), "red" if status.slot and status.slot.invalid else ""))
    if cold.start:
        told.append(_line("announced", f"nothing below offset {cold.start:,} may be needed any more"))
    return told


def _line(word: str, said: str, style: str = "") -> Text:
    return Text.assemble((f"  {word:<9}", "cyan"), "  ", (said, style))


def _offsets(first: int, end: int) -> str:
    return f"offsets {first:,} to {end - 1:,}, {show.counted(end - first, 'record')}" if first < end else "no records"


def _cold(seen: TierView) -> str:
    finished = seen.finished
    if not finished or seen.tiered is None:
        return "nothing yet"
    size = show.size(sum(segment.size for segment in finished))
    return f"{_offsets(finished[0].start, seen.tiered)}, in {show.counted(len(finished), 'segment')} ({size})"


def _states(seen: TierView) -> Counter[SegmentState]:
    return Counter(segment.state for segment in seen.segments)


def _superseded(seen: TierView) -> int:
    return _states(seen)[SegmentState.COPY_FINISHED] - len(seen.finished)


def _troubles(seen: TierView) -> list[str]:
    said = []
    states = _states(seen)
    if states[SegmentState.COPY_STARTED]:
        said.append(f"{show.counted(states[SegmentState.COPY_STARTED], 'copy', 'copies')} under way, or left over")
    if states[SegmentState.DELETE_STARTED]:
        said.append(f"{show.counted(states[SegmentState.DELETE_STARTED], 'deletion')} under way, or left over")
    if _superseded(seen):
        said.append(f"{show.counted(_superseded(seen), 'segment')} superseded, which the next round removes")
    if seen.tiered is not None and seen.tiered < seen.hot.first:
        said.append(f"HOLE: offsets {seen.tiered:,} to {seen.hot.first - 1:,} are in neither tier")
    if seen.deletion is not None:
        said.append(f"the whole cold tier is being deleted: {seen.deletion.state}")
    return said


def _left(status: TierStatus) -> str:
    if not status.records_left:
        return "nothing: everything is in segments"
    return f"{show.counted(status.records_left, 'record')} ({show.size(status.bytes_left)}) in no segment yet"


def _tierer(status: TierStatus) -> str:
    slot = status.slot
    if slot is None:
        return "none has run yet: strandline tier run, or tier serve"
    if slot.invalid is not None:
        return f"its slot {slot.name!r} was invalidated ({slot.invalid.reason}) at {slot.position:,}: run it again"
    ago = show.seconds(max(0, status.now - slot.last_seen) / 1e6)
    holder = "nobody" if slot.holder is None else show.short(slot.holder)
    return f"slot {slot.name!r} at {slot.position:,}, held by {holder} (epoch {slot.epoch}), last seen {ago} ago"
