"""``strandline lag``: lag of each slot, and what pins the floor."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Final
from uuid import UUID

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

import strandline as sl
from strandline.cli.logs.queue_lag import QueueLag, look_at_queue
from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import AnyLog, AnyLogAt, open_shared
from strandline.cli.shared.common import QueueFormatOption, connecting
from strandline.cli.shared.decoding import named_format
from strandline.cli.shared.options import option
from strandline.cli.shared.text import escaped
from strandline.log.object.head.head_log import HeadListing
from strandline.log.slots.slot_lag import records_kept, slot_lags
from strandline.log.slots.trimming import floor as lowest
from strandline.log.slots.trimming import pending_positions
from strandline.log.wal.read.reading import WalListing
from strandline.model.cursor import SECOND, Bounds
from strandline.model.head import Pin
from strandline.model.retention import FOREVER, NO_LIMITS, Retention, SlotLimits, SlotState
from strandline.node.messages import NodeSlot, SlotKind
from strandline.storage.clock import CLOCK
from strandline.tier.read.tiered_log import hot_tier

_AS_WRITTEN: Final = (
    "Positions are as the process that writes the log last stored them: a consumer may be further by now."
)

_SILENT: Final = 60.0
"""Seconds without a sign of a replica after which advice is given."""

EVERY: Final = 2.0
"""Default interval of ``--watch``."""


@dataclass(frozen=True, slots=True)
class Lag:
    """A log and all its slots at one moment."""

    url: str
    log_id: UUID
    bounds: Bounds
    slots: tuple[NodeSlot, ...]
    now: int
    """The moment, in microseconds."""
    retention: Retention | None = FOREVER
    """None if the log does not tell: its writer, or its node, decides."""
    limits: SlotLimits = NO_LIMITS
    records_kept: int | None = None
    """What the next trim would delete if the slots that pin the floor were up to date; None if it deletes nothing."""
    pins: Mapping[str, Pin | None] = field(default_factory=dict)
    """Slots that are being created or moved, with what each pins meanwhile."""
    note: str | None = None
    """What a reader of the positions has to know."""
    values: str | None = None
    """The format of the values, if the log names one."""

    @property
    def floor(self) -> int | None:
        """The lowest position that a slot still needs; None without any."""
        return lowest([slot.lag.state for slot in self.slots], pending_positions(self.pins.values()))

    @property
    def floor_without(self) -> int | None:
        """Where the floor would be without the slots that pin it."""
        floor, pending = self.floor, pending_positions(self.pins.values())
        others = [slot.lag.state for slot in self.slots if slot.lag.state.position != floor]
        return lowest(others, [position for position in pending if position != floor])

    @property
    def creating(self) -> dict[str, int]:
        """Slots without a cell yet, with the offset that each pins."""
        known = {slot.lag.state.name for slot in self.slots}
        return {name: pin.position for name, pin in self.pins.items() if pin is not None and name not in known}

    def fields(self) -> dict[str, Any]:
        """The fields of ``--json``."""
        return {
            "url": self.url,
            "log_id": str(self.log_id),
            "first": self.bounds.first,
            "next": self.bounds.next,
            "floor": self.floor,
            "floor_without": self.floor_without,
            "slots": [slot_fields(slot, self.now) for slot in self.slots],
            "records_kept": self.records_kept,
            "retention": None if self.retention is None else str(self.retention),
            "lag_bytes": self.limits.lag_bytes or None,
            "idle_seconds": self.limits.idle_seconds or None,
            "creating": self.creating,
            "note": self.note,
            "values": self.values,
        }

    def rendered(self) -> RenderableType:
        """The text output."""
        numbers = (">position", ">records\nbehind", ">bytes\nbehind", ">time\nbehind", ">last seen\nago")
        table = show.table("slot", *numbers, "~holder", ">epoch", "~")
        for slot in self.slots:
            lag, state = slot.lag, slot.lag.state
            table.add_row(
                show.short(state.name),
                f"{state.position:,}",
                f"{lag.records_behind:,}",
                show.size(lag.bytes_behind),
                show.seconds(lag.seconds_behind),
                show.seconds(lag.seconds_since_seen),
                show.short(owner(slot)),
                str(state.epoch),
                Text(*note_on(slot)),
            )
        said = [floor_sentence(self), *silent_replicas(self), *([] if self.note is None else [self.note])]
        return Group(self.title(), table if self.slots else Text("no slots"), *map(Text, said))

    def title(self) -> Text:
        """The log and its offsets."""
        head = Text.assemble((self.url, "bold"), f"  offsets {self.bounds.first:,} to {self.bounds.next:,}")
        return head if self.values is None else head.append(f"  values {escaped(self.values)}")

    def line(self) -> str:
        """The same on one line."""
        slots = "; ".join(f"{slot.lag.state.name} {state_of(slot)}" for slot in self.slots)
        return f"offsets {self.bounds.first:,} to {self.bounds.next:,}; {slots or 'no slots'}"


def slot_fields(slot: NodeSlot, now: int) -> dict[str, Any]:
    """A slot with its lag as fields of ``--json``, wherever one is shown. None: does not apply, or is not known."""
    lag, state, gone = slot.lag, slot.lag.state, slot.lag.state.invalid
    fields = {
        "slot": state.name,
        "kind": slot.kind,
        "position": state.position,
        "holder": state.holder,
        "epoch": state.epoch,
        "invalid": None if gone is None else str(gone.reason),
        "invalid_for": None if gone is None else max(0.0, (now - gone.at) / SECOND),
        "records_behind": lag.records_behind,
        "bytes_behind": lag.bytes_behind,
        "seconds_behind": lag.seconds_behind,
        "seconds_since_seen": lag.seconds_since_seen,
        "pins_floor": lag.pins_floor,
        "retained_bytes": lag.retained,
        "bytes_left": lag.bytes_left,
        "idle_left": lag.seconds_left,
        "expires_in": lag.expires_in,
        "pending": lag.pending,
    }
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in fields.items()}


@connecting
def lag(
    place: AnyLogAt,
    *,
    watch: Annotated[
        float | None, option("[SECONDS]", f"Repeat, by default every {EVERY:.0f} seconds.", min=0.1)
    ] = None,
    format: QueueFormatOption = None,  # noqa: A002
) -> None:
    """Show how far each slot is behind, and what pins the floor.

    The lag is in records, bytes and time. Changes nothing.

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
    hot, now = hot_tier(log), CLOCK.now()
    values = named_format(hot)
    if isinstance(hot, sl.node.RemoteLog):
        found = hot.slot_lags()
        decided = found.retention, found.limits, found.records_kept
        return Lag(hot.url, hot.log_id, hot.bounds(), found.slots, now, *decided, values=values)
    states = list(hot.slots.list())  # before the end: then no slot is ahead of it
    if isinstance(hot, sl.log.ObjectLog):
        head, identity = hot.head(), hot.identity
        retention, limits = identity.retention, identity.limits
        seen = measured(log, HeadListing(head, hot.chunks, now), states, head.slots, retention, limits)
    else:
        seen = measured(log, WalListing(hot, hot.bounds(), now), states, {}, None)  # its writer knows the retention
    note = _AS_WRITTEN if states and isinstance(hot, sl.log.WalReader) else None
    return replace(seen, note=note, values=values)


def measured(
    log: AnyLog,
    listing: HeadListing | WalListing,
    states: Sequence[SlotState],
    pins: Mapping[str, Pin | None],
    retention: Retention | None,
    limits: SlotLimits = NO_LIMITS,
) -> Lag:
    """The lag of slots against the batches of a log."""
    now = listing.now
    found = slot_lags(listing, states, pins=pins, retention=retention, limits=limits, now=now)
    kept = None if retention is None else records_kept(listing, found, pins=pins, retention=retention)
    slots = tuple(NodeSlot(SlotKind.CONSUMER, each) for each in found)
    return Lag(log.url, log.log_id, listing.bounds, slots, now, retention, limits, kept, pins)


def owner(slot: NodeSlot) -> str | None:
    """The holder of a consumer's slot, or the kind of another one."""
    return slot.lag.state.holder if slot.kind is SlotKind.CONSUMER else f"({slot.kind})"


def state_of(slot: NodeSlot) -> str:
    """That a slot is invalid, or its lag: records, bytes and time."""
    lag = slot.lag
    if lag.state.invalid is not None:
        return f"invalid: {lag.state.invalid.reason}"
    if not lag.records_behind:
        return "up to date"
    return (
        f"{show.counted(lag.records_behind, 'record')} ({show.size(lag.bytes_behind)}, "
        f"{show.seconds(lag.seconds_behind)}) behind"
    )


def note_on(slot: NodeSlot) -> tuple[str, str]:
    """A remark on a slot, and its style."""
    lag = slot.lag
    if lag.state.invalid is not None:
        return f"invalid: {lag.state.invalid.reason}", "red"
    if lag.pending is not None:
        return f"is being moved to {lag.pending:,}", "yellow"
    if min(lag.bytes_left or 0, lag.seconds_left or 0) < 0:
        return "the next trim invalidates it", "bold red"
    if lag.expires_in is not None:
        return (f"held for {show.seconds(lag.expires_in)}", "") if lag.expires_in > 0 else ("expired", "yellow")
    if not lag.records_behind:
        return "up to date", "green"
    return ("pins the floor", "yellow") if lag.pins_floor else ("", "")


def _named(slot: NodeSlot) -> str:
    name = "the tierer" if slot.kind is SlotKind.TIER else repr(slot.lag.state.name)
    return f"replica {name}" if slot.kind is SlotKind.REPLICA else name


def silent_replicas(seen: Lag) -> list[str]:
    """A sentence for each replica that pins records, and was not seen for a while."""
    return [
        f"Replica {lag.state.name!r} was last seen {show.seconds(lag.seconds_since_seen)} ago, and its slot pins "
        f"{show.counted(lag.records_behind, 'record')}: start it; or, if it does not return, 'strandline node "
        f"unregister {seen.url} {lag.state.name}'."
        for kind, lag in seen.slots
        if kind is SlotKind.REPLICA
        and lag.state.invalid is None
        and lag.records_behind
        and lag.seconds_since_seen >= _SILENT
    ]


def floor_sentence(seen: Lag) -> str:
    """The slot that pins the floor, and the bytes that it retains."""
    if seen.floor is None:
        return "No valid slot pins anything: only the retention policy applies."
    pinning = [slot for slot in seen.slots if slot.lag.pins_floor]
    names = ", ".join(_named(slot) for slot in pinning) or "a slot that is being created"
    cost = "the log keeps everything anyway"
    if seen.retention is None:
        cost = "nothing from there on is deleted"
    elif seen.records_kept is not None:
        them = "them" if len(pinning) > 1 else "it"
        what = show.counted(seen.records_kept, "record") if seen.records_kept else "nothing"
        cost = f"{what} would be deleted by the next trim without {them}"
    return f"The floor is {seen.floor:,}, pinned by {names}; {cost}."
