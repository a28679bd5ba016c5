"""``strandline lag``: lag of each slot, and what pins the floor."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Final, Protocol

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

import strandline as sl
from strandline.cli import output as show
from strandline.cli.common import (
    DATA,
    MANIFEST,
    Data,
    Json,
    LogFormat,
    Manifest,
    TargetFormat,
    Url,
    guarded,
    open_log,
    open_shared,
)
from strandline.cli.queue import look_at_queue
from strandline.log.object.head.index import Chunks
from strandline.log.object.maintain.slot_lag import SlotLag, slot_lags, trim_end
from strandline.log.slots import floor as lowest
from strandline.log.slots import pending_positions
from strandline.model.cursor import microseconds
from strandline.model.head import Head
from strandline.model.retention import FOREVER, NO_LIMITS, Retention, SlotState

EVERY: Final = 2.0
"""How often ``--watch`` looks, unless it is told."""


@dataclass(frozen=True, slots=True)
class SlotLagRow:
    """One slot, measured against the end of its log."""

    slot: str
    position: int
    records_behind: int
    bytes_behind: int
    seconds_since_seen: float
    holder: str | None
    epoch: int
    pins_floor: bool
    invalid: str | None
    seconds_behind: float = 0.0

    @classmethod
    def of(cls, measured: SlotLag) -> SlotLagRow:
        """The row of a slot."""
        state = measured.state
        return cls(
            slot=state.name,
            position=state.position,
            records_behind=measured.records_behind,
            bytes_behind=measured.bytes_behind,
            seconds_since_seen=round(measured.seconds_since_seen, 3),
            holder=state.holder,
            epoch=state.epoch,
            pins_floor=measured.pins_floor,
            invalid=None if state.invalid is None else str(state.invalid.reason),
            seconds_behind=round(measured.seconds_behind, 3),
        )


@dataclass(frozen=True, slots=True)
class Lag:
    """A log and all its slots at one moment.

    ``floor`` is the lowest position that a slot still needs, None without any; ``floor_without`` is where it would be
    if the slots that pin it were gone. ``records_kept`` is what the next collection would let go of if those were up to
    date: None if the log keeps everything anyway.
    """

    url: str
    log_id: str
    first: int
    next: int
    floor: int | None
    floor_without: int | None
    slots: tuple[SlotLagRow, ...]
    records_kept: int | None = None

    def fields(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return asdict(self)

    def rendered(self) -> RenderableType:
        """What people see."""
        return rendered(self)

    def line(self) -> str:
        """The same on one line."""
        slots = [
            f"{slot.slot} " + (f"invalid ({slot.invalid})" if slot.invalid is not None else _behind(slot))
            for slot in self.slots
        ]
        return f"offsets {self.first:,} to {self.next:,}; " + ("; ".join(slots) or "no slots")


class LagView(Protocol):
    """Lag of a log or of a queue at one moment."""

    def fields(self) -> dict[str, Any]:
        """For programs."""

    def rendered(self) -> RenderableType:
        """For a terminal."""

    def line(self) -> str:
        """For a file or a pipe."""


@guarded
def lag(
    url: Url,
    *,
    watch: Annotated[
        float | None,
        typer.Option(metavar="[SECONDS]", min=0.1, help=f"Look again and again, every {EVERY:.0f} seconds or as told."),
    ] = None,
    format: LogFormat = TargetFormat.LOG,  # noqa: A002
    manifest: Manifest = MANIFEST,
    data: Data = DATA,
    json: Json = False,
) -> None:
    """Show how far behind each slot is: in records, in bytes and in time, and what pins the floor. Changes nothing."""
    looking: Callable[[], LagView]
    if format is TargetFormat.LOG:
        looking = partial(look, open_log(url))
    else:
        looking = partial(look_at_queue, open_shared(url, manifest=manifest, data=data))
    if watch is None:
        seen = looking()
        show.answer(seen.fields(), seen.rendered(), as_json=json)
        return
    with suppress(KeyboardInterrupt):  # that is how watching ends
        _watch(looking, watch, as_json=json)


def with_default_interval(arguments: list[str]) -> list[str]:
    """The arguments with the usual interval behind a ``--watch`` that was given none.

    >>> with_default_interval(["--watch", "log"]), with_default_interval(["log", "--watch", "5"])
    (['--watch', '2.0', 'log'], ['log', '--watch', '5'])
    """
    given: list[str] = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        given.append(argument)
        if argument == "--watch" and not following.replace(".", "", 1).isdecimal():
            given.append(str(EVERY))
    return given


def _watch(looking: Callable[[], LagView], every: float, *, as_json: bool) -> None:
    if sys.stdout.isatty() and not as_json:
        with Live(looking().rendered(), console=show.out(), auto_refresh=False) as live:
            while True:
                time.sleep(every)
                live.update(looking().rendered(), refresh=True)
    while True:
        seen = looking()
        show.answer(seen.fields(), f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}  {seen.line()}", as_json=as_json)
        time.sleep(every)


def look(log: sl.log.ObjectLog) -> Lag:
    """How the log and its slots stand now."""
    states = log.slots()  # before the head: then no slot is ahead of the log's end
    return measure(log.url, log.head(), states, log.chunks, datetime.now(UTC), retention=log.identity.retention)


def measure(
    url: str,
    head: Head,
    states: list[SlotState],
    chunks: Chunks,
    now: datetime,
    *,
    retention: Retention = FOREVER,
) -> Lag:
    """Slots against a head, as a value."""
    pending = pending_positions(head.slots.values())  # slots that are being created or moved
    floor = lowest(states, pending)
    found = slot_lags(head, states, chunks, retention=retention, limits=NO_LIMITS, now=microseconds(now))
    others = [state for state in states if state.position != floor]
    pinning = frozenset(one.state.name for one in found if one.pins_floor)
    kept: int | None = None
    if retention != FOREVER:
        now_at, then_at = (
            trim_end(head, states, chunks, retention=retention, now=microseconds(now), up_to_date=names)
            for names in (frozenset(), pinning)
        )
        kept = then_at - now_at
    return Lag(
        url=url,
        log_id=str(head.log_id),
        first=head.floor,
        next=head.next_offset,
        floor=floor,
        floor_without=lowest(others, [position for position in pending if position != floor]),
        slots=tuple(map(SlotLagRow.of, found)),
        records_kept=kept,
    )


def rendered(seen: Lag) -> RenderableType:
    """The table that people see."""
    numbers = (">position", ">records\nbehind", ">bytes\nbehind", ">time\nbehind", ">last seen\nago")
    table = show.table("slot", *numbers, "~holder", ">epoch", "")
    for slot in seen.slots:
        note, style = _note(slot)
        table.add_row(
            show.slot(slot.slot),
            f"{slot.position:,}",
            f"{slot.records_behind:,}",
            show.size(slot.bytes_behind),
            show.seconds(slot.seconds_behind),
            show.seconds(slot.seconds_since_seen),
            show.short(slot.holder),
            str(slot.epoch),
            Text(note, style),
        )
    head = Text.assemble((seen.url, "bold"), f"  offsets {seen.first:,} to {seen.next:,}")
    return Group(head, table if seen.slots else Text("no slots"), Text(floor_sentence(seen)))


def _behind(slot: SlotLagRow) -> str:
    if not slot.records_behind:
        return "up to date"
    size, length = show.size(slot.bytes_behind), show.seconds(slot.seconds_behind)
    return f"{slot.records_behind:,} records ({size}, {length}) behind"


def _note(slot: SlotLagRow) -> tuple[str, str]:
    if slot.invalid is not None:
        return f"invalid: {slot.invalid}", "red"
    if slot.pins_floor and slot.records_behind:
        return "pins the floor", "yellow"
    return ("up to date", "green") if not slot.records_behind else ("", "")


def floor_sentence(seen: Lag) -> str:
    """What pins the floor, and what that costs."""
    if seen.floor is None:
        return "No valid slot pins anything: only the retention policy decides what is kept."
    pinning = [slot for slot in seen.slots if slot.pins_floor]
    names = ", ".join(repr(slot.slot) for slot in pinning) or "a slot that is being created"
    cost = "the log keeps everything anyway"
    if seen.records_kept is not None:
        them = "them" if len(pinning) > 1 else "it"
        what = show.counted(seen.records_kept, "record") if seen.records_kept else "nothing"
        cost = f"{what} would go with the next collection but for {them}"
    return f"The floor is {seen.floor:,}, pinned by {names}; {cost}."
