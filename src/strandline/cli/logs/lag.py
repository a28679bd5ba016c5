"""``strandline lag``: lag of each slot, and what pins the floor."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Final

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

import strandline as sl
from strandline.cli.logs.queue_lag import QueueLag, look_at_queue
from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import AnyLog, LogPlace, on_any_log, open_shared
from strandline.cli.shared.common import QueueFormatOption
from strandline.cli.shared.decoding import named_format
from strandline.cli.shared.text import escaped
from strandline.errors import InvalidInput
from strandline.log.object.head.index import Chunks
from strandline.log.object.maintain.slot_lag import HeadListing
from strandline.log.slots.slot_lag import SlotLag, records_kept, slot_lags
from strandline.log.slots.trimming import floor as lowest
from strandline.log.slots.trimming import pending_positions
from strandline.log.wal.log import WalLog
from strandline.log.wal.slot_lag import WalListing
from strandline.model.cursor import SECOND, Bounds, microseconds
from strandline.model.head import Head
from strandline.model.retention import FOREVER, NO_LIMITS, Retention, SlotLimits, SlotState
from strandline.node.messages import SlotKind
from strandline.tier.read.tiered_log import hot_tier

_AS_WRITTEN: Final = (
    "Positions are as the process that writes the log last stored them: a consumer may be further by now."
)

_CONSUMERS_ONLY: Final = "The node is of an earlier version: slots of its replicas are not shown, and may pin more."
_SILENT: Final = 60.0
"""Seconds without a sign of a replica after which advice is given."""

EVERY: Final = 2.0
"""Default interval of ``--watch``."""


@dataclass(frozen=True, slots=True)
class SlotRow:
    """One slot, measured against the end of its log. None: does not apply, or is not known; times are seconds.

    ``retained_bytes`` is what the next trim would delete if this slot alone were up to date. ``bytes_left``
    and ``idle_left`` are the distance to its invalidation; below zero the next trim invalidates it. A slot that
    is ``pending`` is being moved to that offset, and pins it until that is done.
    """

    slot: str
    position: int
    records_behind: int
    bytes_behind: int | None
    seconds_since_seen: float
    holder: str | None
    epoch: int
    pins_floor: bool
    invalid: str | None
    seconds_behind: float | None = 0.0
    retained_bytes: int | None = 0
    bytes_left: int | None = None
    idle_left: float | None = None
    expires_in: float | None = None
    pending: int | None = None
    invalid_for: float | None = None
    kind: SlotKind = SlotKind.CONSUMER
    """Whose slot it is; slots of replicas and of the tierer are those of a node's primary."""

    @property
    def owner(self) -> str | None:
        """The holder of a consumer's slot, or the kind of another one."""
        return self.holder if self.kind is SlotKind.CONSUMER else f"({self.kind})"

    @classmethod
    def of(cls, lag: SlotLag, now: int, kind: SlotKind = SlotKind.CONSUMER) -> SlotRow:
        """The row of a slot at ``now`` (microseconds)."""
        state, gone = lag.state, lag.state.invalid
        return cls(
            slot=state.name,
            position=state.position,
            records_behind=lag.records_behind,
            bytes_behind=lag.bytes_behind,
            seconds_since_seen=round(lag.seconds_since_seen, 3),
            holder=state.holder,
            epoch=state.epoch,
            pins_floor=lag.pins_floor,
            invalid=None if gone is None else str(gone.reason),
            seconds_behind=round(lag.seconds_behind, 3),
            retained_bytes=lag.retained,
            bytes_left=lag.bytes_left,
            idle_left=None if lag.seconds_left is None else round(lag.seconds_left, 3),
            expires_in=None if lag.expires_in is None else round(lag.expires_in, 3),
            pending=lag.pending,
            invalid_for=None if gone is None else max(0.0, round((now - gone.at) / SECOND, 3)),
            kind=kind,
        )


@dataclass(frozen=True, slots=True)
class Lag:
    """A log and all its slots at one moment.

    ``floor`` is the lowest position that a slot still needs, None without any; ``floor_without`` is where it would be
    without the slots that pin it. ``records_kept`` is what the next trim would delete if those were up to
    date: None if the log keeps everything anyway. ``creating`` are slots without a cell yet, with the
    offset that each pins.
    """

    url: str
    log_id: str
    first: int
    next: int
    floor: int | None
    floor_without: int | None
    slots: tuple[SlotRow, ...]
    records_kept: int | None = None
    retention: Retention | None = FOREVER
    """None if the log does not tell: its writer, or its node, decides."""
    limits: SlotLimits = NO_LIMITS
    creating: Mapping[str, int] = field(default_factory=dict)
    note: str | None = None
    """What a reader of the positions has to know."""
    values: str | None = None
    """The format of the values, if the log names one."""

    def fields(self) -> dict[str, Any]:
        """The fields of ``--json``."""
        fields = {**asdict(self), "retention": None if self.retention is None else str(self.retention)}
        limits = fields.pop("limits")
        return {**fields, "lag_bytes": limits["lag_bytes"] or None, "idle_seconds": limits["idle_seconds"] or None}

    def rendered(self) -> RenderableType:
        """The text output."""
        numbers = (">position", ">records\nbehind", ">bytes\nbehind", ">time\nbehind", ">last seen\nago")
        table = show.table("slot", *numbers, "~holder", ">epoch", "~")
        for slot in self.slots:
            note, style = _note(slot)
            table.add_row(
                show.short(slot.slot),
                f"{slot.position:,}",
                f"{slot.records_behind:,}",
                show.known(show.size, slot.bytes_behind),
                show.known(show.seconds, slot.seconds_behind),
                show.seconds(slot.seconds_since_seen),
                show.short(slot.owner),
                str(slot.epoch),
                Text(note, style),
            )
        head = Text.assemble((self.url, "bold"), f"  offsets {self.first:,} to {self.next:,}")
        if self.values is not None:
            head.append(f"  values {escaped(self.values)}")
        said = [floor_sentence(self), *silent_replicas(self), *([] if self.note is None else [self.note])]
        return Group(head, table if self.slots else Text("no slots"), *map(Text, said))

    def line(self) -> str:
        """The same on one line."""
        slots = [
            f"{slot.slot} " + (f"invalid ({slot.invalid})" if slot.invalid is not None else behind(slot))
            for slot in self.slots
        ]
        return f"offsets {self.first:,} to {self.next:,}; " + ("; ".join(slots) or "no slots")


@on_any_log
def lag(
    place: LogPlace,
    *,
    watch: Annotated[
        float | None,
        typer.Option(metavar="[SECONDS]", min=0.1, help=f"Repeat, by default every {EVERY:.0f} seconds."),
    ] = None,
    format: QueueFormatOption = None,  # noqa: A002
) -> None:
    """Show the lag of each slot, in records, bytes and time, and what pins the floor. Changes nothing.

    Example: strandline lag s3://bucket/orders --watch 5
    """
    with ExitStack() as opened:
        looking: Callable[[], Lag | QueueLag]
        if format is None:
            looking = partial(current_lag, opened.enter_context(place.reading()))
        else:
            looking = partial(look_at_queue, open_shared(place.url, format))
        if watch is None:
            seen = looking()
            show.answer(seen.fields(), seen.rendered)
            return
        with suppress(KeyboardInterrupt):  # Ctrl-C ends watching
            _watch(looking, watch)


def with_default_interval(arguments: list[str]) -> list[str]:
    """The arguments with the default interval after a ``--watch`` without one.

    >>> with_default_interval(["--watch", "log"]), with_default_interval(["log", "--watch", "5"])
    (['--watch', '2.0', 'log'], ['log', '--watch', '5'])
    """
    given: list[str] = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):  # also for no arguments
        given.append(argument)
        if argument == "--watch" and not following.replace(".", "", 1).isdecimal():
            given.append(str(EVERY))
    return given


def _watch(looking: Callable[[], Lag | QueueLag], every: float) -> None:
    if sys.stdout.isatty() and not show.for_programs():
        with Live(looking().rendered(), console=show.out(), auto_refresh=False) as live:
            while True:
                time.sleep(every)
                live.update(looking().rendered(), refresh=True)
    while True:
        seen = looking()
        show.answer(seen.fields(), f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}  {seen.line()}")
        time.sleep(every)


def current_lag(log: AnyLog) -> Lag:
    """The current lag of the log and its slots. Of an object log, as far as its own tier retains it."""
    hot = hot_tier(log)
    if isinstance(hot, sl.log.ObjectLog):
        found = look_at_objects(hot)
    else:
        found = look_at_node(hot) if isinstance(hot, sl.node.RemoteLog) else look_at_wal(log, hot)
    return replace(found, values=named_format(hot))


def look_at_wal(log: AnyLog, hot: WalLog | sl.log.WalReader) -> Lag:
    """The lag of a write-ahead log's slots. Which retention applies is known to the process that trims it."""
    states = list(hot.slots.list())  # before the end: then no slot is ahead of it
    now = microseconds(datetime.now(UTC))
    listing = WalListing(hot, hot.bounds(), now)
    found = slot_lags(listing, states, pins={}, retention=None, limits=NO_LIMITS, now=now)
    rows = tuple(SlotRow.of(each, now) for each in found)
    note = _AS_WRITTEN if rows and isinstance(hot, sl.log.WalReader) else None
    return _with_floor(log.url, str(log.log_id), listing.bounds, states, rows, note=note)


def look_at_node(node: sl.node.RemoteLog) -> Lag:
    """The lag of all slots of a primary, with the retention that it applies."""
    now = microseconds(datetime.now(UTC))
    try:
        found = node.slot_lags()
    except InvalidInput:  # of an earlier version, which tells the positions of consumers
        states = list(node.slots.list())
        bounds = node.bounds()
        rows = tuple(_position_only(state, bounds.next, lowest(states), now) for state in states)
        return _with_floor(node.url, str(node.log_id), bounds, states, rows, note=_CONSUMERS_ONLY)
    states = [each.lag.state for each in found.slots]
    rows = tuple(SlotRow.of(each.lag, now, each.kind) for each in found.slots)
    seen = _with_floor(node.url, str(node.log_id), node.bounds(), states, rows, note=None)
    return replace(seen, retention=found.retention, limits=found.limits, records_kept=found.records_kept)


def _with_floor(
    url: str, log_id: str, bounds: Bounds, states: list[SlotState], rows: tuple[SlotRow, ...], *, note: str | None
) -> Lag:
    floor = lowest(states)
    return Lag(
        url=url,
        log_id=log_id,
        first=bounds.first,
        next=bounds.next,
        floor=floor,
        floor_without=lowest([state for state in states if state.position != floor]),
        slots=rows,
        retention=None,
        note=note,
    )


def _position_only(state: SlotState, end: int, floor: int | None, now: int) -> SlotRow:
    gone = state.invalid
    return SlotRow(
        slot=state.name,
        position=state.position,
        records_behind=max(0, end - state.position),
        bytes_behind=None if state.position < end else 0,
        seconds_since_seen=max(0.0, round((now - state.last_seen) / SECOND, 3)),
        holder=state.holder,
        epoch=state.epoch,
        pins_floor=state.pins and state.position == floor,
        invalid=None if gone is None else str(gone.reason),
        seconds_behind=None if state.position < end else 0.0,
        retained_bytes=None,
        expires_in=None if state.expires is None else round((state.expires - now) / SECOND, 3),
        invalid_for=None if gone is None else max(0.0, round((now - gone.at) / SECOND, 3)),
    )


def look_at_objects(log: sl.log.ObjectLog) -> Lag:
    """The current lag of an object log and its slots."""
    states = list(log.slots.list())  # before the head: then no slot is ahead of the log's end
    retention, limits = log.identity.retention, log.identity.limits
    return measure(log.url, log.head(), states, log.chunks, datetime.now(UTC), retention=retention, limits=limits)


def measure(
    url: str,
    head: Head,
    states: list[SlotState],
    chunks: Chunks,
    moment: datetime,
    *,
    retention: Retention = FOREVER,
    limits: SlotLimits = NO_LIMITS,
) -> Lag:
    """The lag of slots against a head, as a value."""
    now = microseconds(moment)
    pending = pending_positions(head.slots.values())  # slots that are being created or moved
    floor = lowest(states, pending)
    found = slot_lags(
        HeadListing(head, chunks, now), states, pins=head.slots, retention=retention, limits=limits, now=now
    )
    others = [state for state in states if state.position != floor]
    known = {state.name for state in states}
    kept = records_kept(HeadListing(head, chunks, now), found, pins=head.slots, retention=retention)
    return Lag(
        url=url,
        log_id=str(head.log_id),
        first=head.floor,
        next=head.next_offset,
        floor=floor,
        floor_without=lowest(others, [position for position in pending if position != floor]),
        slots=tuple(SlotRow.of(each, now) for each in found),
        records_kept=kept,
        retention=retention,
        limits=limits,
        creating={name: pin.position for name, pin in head.slots.items() if pin is not None and name not in known},
    )


def behind(slot: SlotRow) -> str:
    """The lag of a slot: records, and bytes and time if they are known."""
    if not slot.records_behind:
        return "up to date"
    known = [] if slot.bytes_behind is None else [show.size(slot.bytes_behind)]
    known += [] if slot.seconds_behind is None else [show.seconds(slot.seconds_behind)]
    size = f" ({', '.join(known)})" if known else ""
    return f"{show.counted(slot.records_behind, 'record')}{size} behind"


def _note(slot: SlotRow) -> tuple[str, str]:
    if slot.invalid is not None:
        return f"invalid: {slot.invalid}", "red"
    if slot.pins_floor and slot.records_behind:
        return "pins the floor", "yellow"
    return ("up to date", "green") if not slot.records_behind else ("", "")


def _named(slot: SlotRow) -> str:
    match slot.kind:
        case SlotKind.REPLICA:
            return f"replica {slot.slot!r}"
        case SlotKind.TIER:
            return "the tierer"
        case SlotKind.CONSUMER:
            return repr(slot.slot)


def silent_replicas(seen: Lag) -> list[str]:
    """A sentence for each replica that pins records, and was not seen for a while."""
    return [
        f"Replica {slot.slot!r} was last seen {show.seconds(slot.seconds_since_seen)} ago, and its slot pins "
        f"{show.counted(slot.records_behind, 'record')}: start it; or, if it does not return, 'strandline node "
        f"unregister {seen.url} {slot.slot}'."
        for slot in seen.slots
        if slot.kind is SlotKind.REPLICA
        and slot.invalid is None
        and slot.records_behind
        and slot.seconds_since_seen >= _SILENT
    ]


def floor_sentence(seen: Lag) -> str:
    """The slot that pins the floor, and the bytes that it retains."""
    if seen.floor is None:
        return "No valid slot pins anything: only the retention policy applies."
    pinning = [slot for slot in seen.slots if slot.pins_floor]
    names = ", ".join(_named(slot) for slot in pinning) or "a slot that is being created"
    cost = "the log keeps everything anyway"
    if seen.retention is None:
        cost = "nothing from there on is deleted"
    elif seen.records_kept is not None:
        them = "them" if len(pinning) > 1 else "it"
        what = show.counted(seen.records_kept, "record") if seen.records_kept else "nothing"
        cost = f"{what} would be deleted by the next trim without {them}"
    return f"The floor is {seen.floor:,}, pinned by {names}; {cost}."
