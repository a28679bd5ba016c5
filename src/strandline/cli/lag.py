"""``strandline lag``: who is behind, by how much, and what pins the floor."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

import strandline as sl
from strandline.cli import show
from strandline.cli.frame import Debug, Json, Url, guarded, open_log
from strandline.log.slots import floor as lowest
from strandline.model.head import Head
from strandline.model.slots import SlotState

_LONG: Final = 12


@dataclass(frozen=True, slots=True)
class SlotLag:
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


@dataclass(frozen=True, slots=True)
class Lag:
    """A log and all its slots at one moment.

    ``floor`` is the lowest position that a slot still needs, None without any; ``floor_without`` is where it would be
    if the slots that pin it were gone.
    """

    url: str
    log_id: str
    first: int
    next: int
    floor: int | None
    floor_without: int | None
    slots: tuple[SlotLag, ...]

    def fields(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return asdict(self)


@guarded
def lag(
    url: Url,
    *,
    watch: Annotated[float | None, typer.Option(metavar="SECONDS", min=0.1, help="Look again and again.")] = None,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - guarded looks at it
) -> None:
    """Show each slot's position, how far it is behind, its holder, and what pins the floor. Changes nothing."""
    log = open_log(url)
    if watch is None:
        _print(look(log), as_json=json)
        return
    with suppress(KeyboardInterrupt):  # that is how watching ends
        _watch(log, watch, as_json=json)


def _watch(log: sl.ObjectLog, every: float, *, as_json: bool) -> None:
    if sys.stdout.isatty() and not as_json:
        with Live(rendered(look(log)), console=show.out(), auto_refresh=False) as live:
            while True:
                time.sleep(every)
                live.update(rendered(look(log)), refresh=True)
    while True:
        _print(look(log), as_json=as_json)
        sys.stdout.flush()
        time.sleep(every)


def _print(seen: Lag, *, as_json: bool) -> None:
    if as_json:
        show.document(seen.fields())
    else:
        show.out().print(rendered(seen))


def look(log: sl.ObjectLog) -> Lag:
    """How the log and its slots stand now."""
    states = log.slots()  # before the head: then no slot is ahead of the log's end
    return measure(log.url, log.head(), states, datetime.now(UTC))


def measure(url: str, head: Head, states: list[SlotState], now: datetime) -> Lag:
    """Slots against a head, as a value. Bytes are estimated from the listing: nothing is read for it."""
    pending = [position for position in head.slots.values() if position is not None]  # slots that are being created
    floor = lowest(states, pending)
    slots = tuple(
        SlotLag(
            slot=state.name,
            position=state.position,
            records_behind=max(0, head.next_offset - state.position),
            bytes_behind=bytes_from(head, state.position),
            seconds_since_seen=max(0.0, round(now.timestamp() - state.last_seen / 1e6, 3)),
            holder=state.holder,
            epoch=state.epoch,
            pins_floor=state.invalid is None and state.position == floor,
            invalid=None if state.invalid is None else str(state.invalid.reason),
        )
        for state in states
    )
    others = [state for state in states if state.position != floor]
    without = lowest(others, [position for position in pending if position != floor])
    return Lag(url, str(head.log_id), head.floor, head.next_offset, floor, without, slots)


def bytes_from(head: Head, position: int) -> int:
    """About how many stored bytes lie from a position to the end; a batch or chunk counts by the part above it."""
    pieces = [(entry.first, entry.next, entry.size) for entry in head.tail]
    pieces += [(chunk.first, chunk.next, chunk.size) for level in head.levels for chunk in level]
    total = 0.0
    for first, end, size in pieces:
        above = end - max(first, position)
        if above > 0:
            total += size * above / (end - first)
    return round(total)


def rendered(seen: Lag) -> RenderableType:
    """The table that people see."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("slot", no_wrap=True)
    for name in ("position", "records\nbehind", "bytes\nbehind", "last seen\nago"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("holder", no_wrap=True)
    table.add_column("epoch", justify="right")
    table.add_column("", no_wrap=True)
    for slot in seen.slots:
        note, style = _note(slot)
        table.add_row(
            slot.slot,
            f"{slot.position:,}",
            f"{slot.records_behind:,}",
            show.size(slot.bytes_behind),
            show.seconds(slot.seconds_since_seen),
            _short(slot.holder),
            str(slot.epoch),
            Text(note, style),
        )
    head = Text.assemble((seen.url, "bold"), f"  offsets {seen.first:,} to {seen.next:,}")
    return Group(head, table if seen.slots else Text("no slots"), Text(floor_sentence(seen)))


def _short(holder: str | None) -> str:
    if holder is None:
        return "-"
    return holder if len(holder) <= _LONG else holder[: _LONG - 1] + "…"


def _note(slot: SlotLag) -> tuple[str, str]:
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
    alone = (seen.next if seen.floor_without is None else seen.floor_without) - seen.floor
    kept = f"; {alone:,} records are kept for {'them' if len(pinning) > 1 else 'it'} alone" if alone else ""
    return f"The floor is {seen.floor:,}, pinned by {names}{kept}."
