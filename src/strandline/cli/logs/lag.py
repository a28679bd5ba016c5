"""``strandline lag``: lag of each slot, and what pins the floor."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Final

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from strandline.cli.logs.queue_lag import QueueLag, look_at_queue
from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import AnyLog, AnyLogAt, open_shared
from strandline.cli.shared.common import QueueFormatOption, connecting
from strandline.cli.shared.options import option
from strandline.cli.shared.text import escaped
from strandline.node.messages import NodeSlot, SlotKind
from strandline.serve.log_state import LogState, log_state
from strandline.storage.clock import CLOCK

_SILENT: Final = 60.0
"""Seconds without a sign of a replica after which advice is given."""

EVERY: Final = 2.0
"""Default interval of ``--watch``."""


@dataclass(frozen=True, slots=True)
class Lag(LogState):
    """The same, as the command shows it."""

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
    seen = log_state(log, CLOCK.now())
    return Lag(**{each.name: getattr(seen, each.name) for each in fields(seen)})


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


def silent_replicas(seen: LogState) -> list[str]:
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


def floor_sentence(seen: LogState) -> str:
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
