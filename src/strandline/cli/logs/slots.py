"""``strandline slots`` and ``strandline retention``: the slots of a log, what each retains, and what limits them."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from rich.console import Group, RenderableType
from rich.text import Text

import strandline as sl
from strandline.cli.logs.lag import Lag, current_lag, note_on, owner, silent_replicas
from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import AnyLog, AnyLogAt, object_log_at
from strandline.cli.shared.common import (
    Url,
    Yes,
    confirm,
    connecting,
    guarded,
    retention_policy,
    size,
    span_of_time,
)
from strandline.cli.shared.groups import ListingGroup, group
from strandline.cli.shared.options import argument, option
from strandline.errors import NotFound
from strandline.model.cursor import SECOND, parse_start
from strandline.model.retention import SlotLimits, SlotState, default_limits, parse_retention
from strandline.node.messages import NodeSlot, SlotKind
from strandline.tier.read.tiered_log import hot_tier

slots = group("List, create, reset and drop slots.\n\n**strandline slots URL** lists them.", cls=ListingGroup)

_OFF = "; 0 switches it off"
Name = Annotated[str, argument("NAME", "The slot's name.")]
At = Annotated[
    Any,
    option(
        "WHERE",
        "The next record that its consumer needs: beginning, retained, now, an offset, or a time, which means "
        "what was listed then or later.",
        "--at",
        parser=parse_start,
    ),
]


# --- the commands ----------------------------------------------------------------------------------------------


@slots.command("list")
@connecting
def list_(place: AnyLogAt) -> None:
    """List the slots: the position of each, what it alone retains, and its distance to invalidation.

    A slot retains what the next trim would delete if that slot alone were up to date. Left are the bytes
    that may still be appended, and how long its holder may still be silent, before the slot is invalidated and pins
    nothing any more.

    Example: strandline slots list s3://bucket/orders
    """
    with place.reading() as log:
        seen = current_lag(log)
    show.answer(seen.fields(), lambda: rendered(seen))


@slots.command()
@connecting
def create(place: AnyLogAt, name: Name, *, at: At) -> None:
    """Create a slot: it pins everything from its offset on, until its consumer has acknowledged it.

    Example: strandline slots create s3://bucket/orders billing --at beginning
    """
    with place.writing() as log:
        state = log.slots.create(name, log.position_of(at))
    _done(state, "is created at")


@slots.command()
@connecting
def reset(place: AnyLogAt, name: Name, *, at: At, yes: Yes = False) -> None:
    """Move a slot, back or ahead, and make it valid again. Its holder is fenced and has to stop.

    Records before the new offset are no longer pinned by this slot. A consumer with a cursor of its own, such as a
    table, resumes from that: reset its slot to that cursor.

    Example: strandline slots reset s3://bucket/orders billing --at 25000
    """
    with place.writing() as log:
        before = _listed(log, name)
        position = log.position_of(at)
        if before is not None:
            held = "" if before.holder is None else f", which fences its holder {before.holder!r}"
            confirm(f"Move slot {name!r} from offset {before.position:,} to {position:,}{held}?", yes=yes)
        state = log.slots.reset(name, position)
    _done(state, "is reset to")


@slots.command()
@connecting
def drop(place: AnyLogAt, name: Name, *, yes: Yes = False) -> None:
    """Remove a slot: the next trim may delete the records that only it pinned.

    Example: strandline slots drop s3://bucket/orders billing
    """
    with place.writing() as log:
        before = _listed(log, name)
        where = "" if before is None else f" at offset {before.position:,}"
        held = "" if before is None or before.holder is None else f", held by {before.holder!r}"
        confirm(f"Drop slot {name!r}{where}{held}?", yes=yes)
        log.slots.drop(name)
    show.answer({"slot": name, "dropped": True}, f"Slot {name!r} is dropped.")


def _listed(log: AnyLog, name: str) -> SlotState | None:
    """The slot's state, None while it is being created; ``NotFound`` if there is no such slot."""
    hot = hot_tier(log)
    known = set(hot.head().slots) if isinstance(hot, sl.log.ObjectLog) else {state.name for state in log.slots.list()}
    if name not in known:
        names = ", ".join(sorted(known)) or "none at all"
        of_nodes = ""
        if isinstance(hot, sl.node.RemoteLog):
            of_nodes = " The slot of a replica is dropped with 'strandline node unregister'."
        raise NotFound(f"There is no slot {name!r} of a consumer in {log.url}; it has {names}.{of_nodes}")
    return next((state for state in log.slots.list() if state.name == name), None)


def _done(state: SlotState, what: str) -> None:
    fields = {"slot": state.name, "position": state.position, "epoch": state.epoch}
    show.answer(fields, f"Slot {state.name!r} {what} offset {state.position:,}.")


# --- looking ---------------------------------------------------------------------------------------------------


def rendered(seen: Lag) -> RenderableType:
    """The text output: a table, and a sentence for each slot that needs action."""
    limited, timed = bool(seen.limits.lag_bytes), bool(seen.limits.idle_seconds)
    numbers = [">last seen\nago", ">retains"] + limited * [">bytes\nleft"] + timed * [">silence\nleft"]
    table = show.table("slot", ">position", "~holder", ">epoch", *numbers, "~")
    for slot in seen.slots:
        lag, state = slot.lag, slot.lag.state
        cells = [show.seconds(lag.seconds_since_seen), show.known(show.size, lag.retained)]
        if limited:
            cells.append("-" if lag.bytes_left is None else show.size(max(0, lag.bytes_left)))
        if timed:
            cells.append("-" if lag.seconds_left is None else show.seconds(max(0.0, lag.seconds_left)))
        where = [show.short(state.name), f"{state.position:,}", show.short(owner(slot)), str(state.epoch)]
        table.add_row(*where, *cells, Text(*note_on(slot)))
    for name, position in seen.creating.items():
        nothing = ["-"] * (len(numbers) + 2)
        table.add_row(name, f"{position:,}", *nothing, Text("is being created", "yellow"))
    empty = not seen.slots and not seen.creating
    return Group(seen.title(), Text("no slots") if empty else table, *map(Text, sentences(seen)))


def sentences(seen: Lag) -> list[str]:
    """The lines below the table: the slot limits, and advice for slots that need action."""
    decides = "is trimmed by the process that writes it"
    rules = [f"This log {decides if seen.retention is None else show.policy(seen.retention)}"]
    if seen.limits.lag_bytes:
        rules.append(f"a slot may be {show.size(seen.limits.lag_bytes)} behind")
    if seen.limits.idle_seconds:
        rules.append(f"its holder may be silent for {show.seconds(seen.limits.idle_seconds)}")
    if len(rules) == 1 and seen.retention is not None:
        rules.append("slots have no limits")
    said = ["; ".join(rules) + "."]
    said += filter(None, (_advice(slot, seen.now) for slot in seen.slots))
    said += [
        f"Slot {name!r} is being created, or its creator died: create it again to finish that, or drop it."
        for name in seen.creating
    ]
    return [*said, *silent_replicas(seen), *([] if seen.note is None else [seen.note])]


def _advice(slot: NodeSlot, now: int) -> str | None:
    """What to do with a slot that is invalid, or whose move was not finished."""
    name, gone = slot.lag.state.name, slot.lag.state.invalid
    if gone is not None and slot.kind is not SlotKind.TIER:
        ago = f"{show.seconds(max(0.0, (now - gone.at) / SECOND))} ago ({gone.reason})"
        if slot.kind is SlotKind.REPLICA:
            return (
                f"The slot of replica {name!r} was invalidated {ago} and pins nothing: the replica builds its copy "
                "again when it connects."
            )
        return (
            f"Slot {name!r} was invalidated {ago} and pins nothing: bootstrap its consumer again, then 'strandline "
            f"slots reset URL {name} --at OFFSET' to its new position, or drop it."
        )
    if slot.lag.pending is not None:
        return (
            f"Slot {name!r} is being moved to {slot.lag.pending:,}, but that was not finished: reset it again, or let "
            "its consumer claim it."
        )
    return None


# --- retention -------------------------------------------------------------------------------------------------


@guarded
def retention(
    url: Url,
    policy: Annotated[
        str | None, argument("POLICY", "forever, consumed, age:7d or bytes:100GiB.", parser=retention_policy)
    ] = None,
    *,
    slot_lag: Annotated[int | None, size(f"Invalidate a slot that is more bytes behind{_OFF}.")] = None,
    slot_idle: Annotated[
        int | None, span_of_time(f"Invalidate a slot whose holder was not seen for longer{_OFF}.")
    ] = None,
) -> None:
    """Show or change the retention policy of a log.

    The next trim applies it. A new policy comes with its default limits for slots, unless you give them: 64 GiB of lag
    where age or size bounds the log, none otherwise.

    Example: strandline retention ./orders age:7d --slot-idle 1d
    """
    log = object_log_at(url)
    if policy is not None or slot_lag is not None or slot_idle is not None:
        wanted = log.identity.retention if policy is None else parse_retention(policy)
        limits = log.identity.limits if policy is None else default_limits(wanted)
        if slot_lag is not None:
            limits = replace(limits, lag_bytes=slot_lag)
        if slot_idle is not None:
            limits = replace(limits, idle_seconds=slot_idle)
        log.set_retention(wanted, limits)
    identity = log.identity
    fields = {
        "url": log.url,
        "retention": str(identity.retention),
        "slot_lag_bytes": identity.limits.lag_bytes,
        "slot_idle_seconds": identity.limits.idle_seconds,
    }
    said = f"{log.url} {show.policy(identity.retention)} ({identity.retention})."
    show.answer(fields, said, _limits(identity.limits))


def _limits(limits: SlotLimits) -> str:
    """When a slot is invalidated.

    >>> _limits(SlotLimits())
    'Slots pin without a limit.'
    """
    ends = []
    if limits.lag_bytes:
        ends.append(f"it is more than {show.size(limits.lag_bytes)} behind")
    if limits.idle_seconds:
        ends.append(f"its holder was not seen for more than {show.seconds(limits.idle_seconds)}")
    return f"A slot is invalidated when {' or when '.join(ends)}." if ends else "Slots pin without a limit."
