"""``strandline tier``: give a log a cold tier, look at it, and copy closed ranges, once or as a service."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, Final

import typer
from rich.text import Text

import strandline as sl
from strandline.cli.shared import output as show
from strandline.cli.shared.common import (
    INTERRUPTED,
    Json,
    Place,
    Yes,
    confirm,
    guarded,
    length_of_time,
    log_to_stderr,
    open_to_look,
    open_to_tier,
    size_in_bytes,
    stop_on_signal,
)
from strandline.cli.shared.common import retention as understood
from strandline.errors import StrandlineError
from strandline.log.object.head.index import bytes_from
from strandline.model.cursor import Bounds
from strandline.model.retention import TIER_SLOT, SlotState, parse_retention
from strandline.model.segments import ColdTier, SegmentMetadata, SegmentState
from strandline.tier.attachment import PARTITIONS
from strandline.tier.copy.ledger import TieringStep
from strandline.tier.copy.tierer import Round
from strandline.tier.opening import attach as give
from strandline.tier.opening import cold_cell, cold_tier, follow_events, log_address, tiering
from strandline.tier.verify import HotLog, TierView, look_at

tier = typer.Typer(
    no_args_is_help=True,
    help="Give a log a cold tier, and copy what is old into it: once, or as a service.",
    short_help="Give a log a cold tier, and copy what is old into it.",
    rich_markup_mode="markdown",
)

FENCED: Final = 3
"""The status if another tierer has taken over."""
_guarded = partial(guarded, fenced=FENCED)

_LOGGER = logging.getLogger("strandline.tier")

Target = Annotated[
    int, typer.Option(metavar="SIZE", parser=size_in_bytes, help="About how large a segment is, at most 1GiB.")
]
Linger = Annotated[
    int,
    typer.Option(
        metavar="TIME", parser=length_of_time, help="How long records wait at most for a segment to be filled."
    ),
]
Keeping = Annotated[
    str,
    typer.Option(
        "--retention",
        metavar="POLICY",
        parser=understood,
        help="Retention of the cold tier, oldest first and only segments that no slot needs: forever, consumed, "
        "age:90d or bytes:10TiB.",
    ),
]
Snapshots = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER", help="A folder of this tierer's own, so that the next start need not read all events again."
    ),
]
_TARGET: Any = "256MiB"  # given to the parser
_LINGER: Any = "1h"


# --- attaching -----------------------------------------------------------------------------------------------


@tier.command()
@guarded
def attach(
    log: Place,
    *,
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="Where segments are put; by default 'cold' beside the log.")
    ] = None,
    events: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where their events are: an address, by default 'events' in that store, or kafka://host:port/topic.",
        ),
    ] = None,
    partitions: Annotated[
        int, typer.Option(min=1, help="How many partitions the events have; logs may share them.")
    ] = PARTITIONS,
    json: Json = False,
) -> None:
    """Give a log a cold tier: durably record the addresses of its segments and events. Nothing is copied yet.

    Readers that open the log from now on read both tiers as one. Repeating it changes nothing; a log has one cold tier,
    and another one is refused.
    """
    opened = open_to_look(log)
    known = cold_cell(opened).look()
    cold = give(opened, store, events, partitions=partitions)
    url = log_address(opened)
    show.answer(
        {"url": url, **asdict(cold), "log_id": str(cold.log_id), "attached": known is None},
        f"{url} {'has its cold tier' if known is None else 'had its cold tier already'}.",
        f"  segments  {cold.store}",
        f"  events    {cold.events}  {show.counted(cold.partitions, 'partition')}",
        as_json=json,
    )


# --- once ------------------------------------------------------------------------------------------------------


@tier.command()
@_guarded
def run(
    log: Place,
    *,
    everything: Annotated[
        bool, typer.Option("--all", help="Also copy what fills no segment yet and has not waited long.")
    ] = False,
    target: Target = _TARGET,
    linger: Linger = _LINGER,
    retention: Keeping = "forever",
    snapshots: Snapshots = None,
    json: Json = False,
) -> None:
    """Copy full segments to the cold tier, once; clean up after crashes; delete expired segments.

    The hot tier keeps its records until its own retention deletes them ('strandline gc'), and never deletes a record
    that is in no segment yet. Ctrl-C ends it before the next segment, without a partial copy. A tierer that serves the
    log is fenced by this, and ends; so does this, with status 3, if another one takes over meanwhile.
    """
    settings: dict[str, Any] = {"target": target, "linger": linger, "retention": parse_retention(retention)}
    on_progress = None if json else lambda step: show.line(line(step))
    with open_to_tier(log) as opened, stop_on_signal() as stop:
        began = time.monotonic()
        with tiering(opened, snapshot_dir=snapshots, on_progress=on_progress, **settings) as tierer:
            done = tierer.run_once(everything=everything, stop=stop)
        slot = tiering_slot(opened)
        left = _left_from(opened, opened.bounds().first if slot is None else slot.position)
        seconds = time.monotonic() - began
        fields = {
            **_of(opened),
            **{name: _each(getattr(done, name)) for name in ("copied", "removed", "expired", "retired")},
            "swept": list(done.swept),
            "records_left": left[0],
            "bytes_left": left[1],
            "seconds": round(seconds, 3),
            "stopped": stop.is_set(),
        }
        show.answer(fields, _summary(done, left, seconds, stopped=stop.is_set()), as_json=json)
    if stop.is_set():
        raise typer.Exit(INTERRUPTED)


def tiering_slot(log: HotLog) -> SlotState | None:
    """The tierer's slot; None if no tierer has run."""
    return next((state for state in log.slots.list() if state.name == TIER_SLOT), None)


def _left_from(log: HotLog, position: int) -> tuple[int, int]:
    """Records and bytes from a position on, which are in no segment yet."""
    end = log.bounds().next
    if position >= end:
        return 0, 0
    if not isinstance(log, sl.log.ObjectLog):
        return end - position, log.bytes_behind(position)
    head = log.head()
    return end - position, bytes_from(head, max(position, head.floor), log.chunks)


def _of(log: HotLog) -> dict[str, Any]:
    """The addresses of the log and its segments."""
    return {"url": log_address(log), "store": cold_tier(log).store}


def line(step: TieringStep) -> str:
    """One step of a round.

    >>> line(TieringStep("copied", "x", 0, 9_999, 1_200_000, 0.5))
    ' copied  offsets 0 to 9,999  1.2 MB at 2.4 MB/s'
    """
    if step.what == "swept":
        return f"  swept  {step.path}, which no event knew"
    text = f"{step.what:>7}  offsets {step.first:,} to {step.last:,}  {show.size(step.size)}"
    return text + (f" at {show.size(step.size / step.seconds)}/s" if step.seconds > 0 else "")


def _summary(done: Round, left: tuple[int, int], seconds: float, *, stopped: bool) -> str:
    parts = [("stopped: " if stopped else "") + f"{_counted(done.copied)} copied in {show.seconds(seconds)}"]
    if done.expired:
        parts.append(f"{_counted(done.expired)} expired")
    if done.retired:
        parts.append(f"{show.counted(len(done.retired), 'segment')} of another history than the log's cut or removed")
    if done.removed:
        parts.append(f"{show.counted(len(done.removed), 'segment')} left over and removed")
    if done.swept:
        parts.append(f"{show.counted(len(done.swept), 'object')} swept")
    if left[0]:
        parts.append(f"{show.counted(left[0], 'record')} ({show.size(left[1])}) in no segment yet")
    return "; ".join(parts)


def _counted(segments: Iterable[SegmentMetadata]) -> str:
    held = list(segments)
    records = show.counted(sum(segment.end - segment.start + 1 for segment in held), "record")
    size = show.size(sum(segment.size for segment in held))
    return f"{show.counted(len(held), 'segment')} ({records}, {size})" if held else "nothing"


def _each(segments: Iterable[SegmentMetadata]) -> list[dict[str, Any]]:
    return [
        {"id": str(segment.segment.id), "start": segment.start, "end": segment.end, "size": segment.size}
        for segment in segments
    ]


# --- by hand ---------------------------------------------------------------------------------------------------


@tier.command()
@_guarded
def truncate(
    log: Place,
    *,
    to: Annotated[int, typer.Option(min=0, help="The first offset that is removed from the cold tier.")],
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Remove everything from an offset on from the cold tier, for good: the log itself diverges there.

    For a log that was restored from an older copy, has accepted other records since, and should stay as it is: 'tier
    run' refuses such a log, and names the offset. The next run copies the log's own records. Nothing below the
    offset is removed, and nothing at all if the log itself does not continue from there.
    """
    question = f"Remove everything from offset {to:,} on from the cold tier of {log}, for good?"
    confirm(question, yes=yes)
    with open_to_tier(log) as opened:
        with tiering(opened) as tierer:
            gone = tierer.truncate(to)
        text = f"{_counted(gone)} cut or removed; the cold tier ends at {to:,} or before."
        show.answer({**_of(opened), "to": to, "retired": _each(gone)}, text, as_json=json)


# --- as a service ----------------------------------------------------------------------------------------------


def _interval(text: str) -> int:
    """The text of an option as seconds, at least one."""
    return max(1, length_of_time(text))


@tier.command()
@_guarded
def serve(
    log: Place,
    *,
    interval: Annotated[
        int, typer.Option(metavar="TIME", parser=_interval, help="How long to wait between two rounds.")
    ] = "10s",  # type: ignore[assignment]  # what the parser is given
    target: Target = _TARGET,
    linger: Linger = _LINGER,
    retention: Keeping = "forever",
    snapshots: Snapshots = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Log warnings only.")] = False,
    json: Json = False,
) -> None:
    """Keep the cold tier in step with its log, round after round, until Ctrl-C or SIGTERM.

    Prints one line when it begins, and logs each round that did something to standard error. Transient errors
    are retried. Stopping leaves no partial copy. Of several for one log, the last one to start works. The other
    ends with status 3. A write-ahead log must not be open elsewhere: its own process tiers it (``sl.tier.tiering``).
    """
    log_to_stderr(logging.WARNING if quiet else logging.INFO)
    settings: dict[str, Any] = {"target": target, "linger": linger, "retention": parse_retention(retention)}
    with open_to_tier(log) as opened, stop_on_signal() as stop:
        with tiering(opened, snapshot_dir=snapshots, on_progress=_log_step, **settings) as tierer:
            of = _of(opened)
            text = f"{of['url']} is tiered to {of['store']}, every {show.seconds(interval)}."
            show.answer({**of, "interval": interval}, text, as_json=json)
            tierer.run(stop, pause=interval, on_round=_log_round)
        _LOGGER.info("Stopped: nothing is half-way.")


def _log_step(step: TieringStep) -> None:
    _LOGGER.info("%s", line(step).strip())


def _log_round(done: Round) -> None:
    if done.copied or done.expired or done.removed or done.swept or done.retired:
        taken = sum(segment.size for segment in done.copied)
        _LOGGER.info(
            "Round: %d copied (%s), %d expired, %d left over and removed, %d swept, %d of another history retired.",
            len(done.copied), show.size(taken), len(done.expired), len(done.removed), len(done.swept),
            len(done.retired),
        )  # fmt: skip


# --- its state -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TierStatus:
    """A log and its cold tier at one moment. Without ``seen``, ``why`` says why the segments are unknown."""

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
        """The fields of ``--json``."""
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


@tier.command()
@guarded
def status(log: Place, *, json: Json = False) -> None:
    """Show where a log's cold tier is, which offsets each tier has, and the tierer's lag. Changes nothing.

    Ends with status 1 if the segments are unknown: prints the reason, and everything else.
    """
    seen = look(open_to_look(log))
    show.answer(seen.fields(), *lines(seen), as_json=json)
    if seen.seen is None:
        raise typer.Exit(1)


def look(log: HotLog) -> TierStatus:
    """The current state of the log's cold tier; ``NotFound`` if it has none."""
    cold = cold_tier(log)
    seen, why = None, None
    try:
        with follow_events(cold) as manager:
            seen = look_at(log, cold, manager)
    except StrandlineError as error:
        why = str(error)
    slot = tiering_slot(log)
    hot = log.bounds()
    position = hot.first if slot is None else slot.position
    if seen is not None and seen.tiered is not None:
        position = seen.tiered
    return TierStatus(
        log_address(log), cold, hot, slot, seen, why, *_left_from(log, position), now=time.time_ns() // 1000
    )


def lines(status: TierStatus) -> list[Text]:
    """The text output."""
    cold, hot = status.cold, status.hot
    rows = [Text(status.url, "bold"), _line("segments", cold.store)]
    events = f"{cold.events}  {show.counted(cold.partitions, 'partition')}"
    if status.seen is None:
        rows += [_line("events", events), _line("not known", f"{status.why}", "bold red")]
    else:
        ready = f"; number {status.seen.partition} is ready, with {show.counted(status.seen.events, 'event')}"
        rows += [_line("events", events + ready), _line("cold", _cold(status.seen))]
        rows += [_line("", text, "yellow") for text in _troubles(status.seen)]
    rows.append(_line("hot", _offsets(hot.first, hot.next)))
    rows.append(_line("left", _left(status), "" if status.records_left == 0 else "yellow"))
    rows.append(_line("tierer", _tierer(status), "red" if status.slot and status.slot.invalid else ""))
    if cold.start:
        rows.append(_line("announced", f"nothing below offset {cold.start:,} may be needed any more"))
    return rows


def _line(word: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"  {word:<9}", "cyan"), "  ", (text, style))


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
    parts = []
    states = _states(seen)
    if states[SegmentState.COPY_STARTED]:
        parts.append(f"{show.counted(states[SegmentState.COPY_STARTED], 'copy', 'copies')} under way, or left over")
    if states[SegmentState.DELETE_STARTED]:
        parts.append(f"{show.counted(states[SegmentState.DELETE_STARTED], 'deletion')} under way, or left over")
    if _superseded(seen):
        parts.append(f"{show.counted(_superseded(seen), 'segment')} superseded, which the next round removes")
    if seen.tiered is not None and seen.tiered < seen.hot.first:
        parts.append(f"HOLE: offsets {seen.tiered:,} to {seen.hot.first - 1:,} are in neither tier")
    if seen.deletion is not None:
        parts.append(f"the whole cold tier is being deleted: {seen.deletion.state}")
    return parts


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
