"""The state of nodes as text and as fields of ``--json``: replicas, their slots, and one node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from strandline.cli.shared import output as show
from strandline.log.slots.slot_lag import SlotLag
from strandline.model.cursor import SECOND
from strandline.model.node import LogMembers, Membership
from strandline.node.lead.policies import Quorum, parse_policy
from strandline.node.messages import Member, NodeSlot, NodeStatus, Topology

_WELL: Final = ("leading", "following")


def what_it_pins(slot: SlotLag) -> str:
    """What the slot of a replica pins, in a sentence."""
    if slot.state.invalid is not None:
        return f"its slot is invalid ({slot.state.invalid.reason}) and pins nothing; it has to build its copy again"
    if not slot.records_behind:
        return "its slot pins nothing"
    size = f"{show.size(slot.bytes_behind)}, up to {show.seconds(slot.seconds_behind)} old"
    pinned = show.counted(slot.records_behind, "record")
    return f"its slot pins {pinned} ({size}) from offset {slot.state.position:,} on"


def rendered(seen: Topology, slots: Mapping[str, NodeSlot], *, now: int) -> RenderableType:
    """The text output; ``now`` is in microseconds."""
    head = Text.assemble(
        (seen.primary, "bold"), f" leads in term {seen.term}, which began at offset {seen.term_start:,}"
    )
    facts = Table(box=None, pad_edge=False, show_header=False)
    facts.add_row("  log", str(seen.log_id))
    facts.add_row("  policy", seen.policy)
    behind, end = seen.durable - seen.committed, seen.durable - bool(seen.sealed)
    facts.add_row("  durable", f"below offset {end:,}{', sealed there' if seen.sealed else ''}")
    waiting = f"; {show.counted(behind, 'record')} not yet{', the seal as one' * bool(seen.sealed)}" if behind else ""
    facts.add_row("  committed", f"below offset {min(seen.committed, end):,}{waiting}")
    facts.add_row("  epoch", f"{seen.epoch:,}")
    for what, said in [] if seen.membership is None else member_facts(seen.membership):
        facts.add_row(f"  {what}", said)
    if not seen.members:
        return Group(head, facts, Text(""), Text("no replicas"), *map(Text, [*pins(seen, slots), *remarks(seen)]))
    table = show.table("~replica", "~region", ">sent", ">applied", ">durable", ">lag", ">seen\nago", "")
    for member in seen.members:
        table.add_row(
            member.name,
            member.region or "-",
            f"{member.sent:,}",
            show.number(member.applied),
            show.number(member.durable),
            "-" if member.applied is None else f"{max(0, seen.durable - member.applied):,}",
            show.seconds(max(0.0, (now - member.last_seen) / SECOND)),
            Text(*note_on(member, seen.durable)),
        )
    return Group(head, facts, Text(""), table, *map(Text, [*pins(seen, slots), *remarks(seen)]))


def member_facts(known: Membership) -> Iterator[tuple[str, str]]:
    """The recorded members, and the change that is pending."""
    yield "members", f"{_named(known.members)} (membership {known.number} of term {known.term})"
    if known.former is not None:
        yield "pending", f"until that is on enough nodes, commits also need {_named(known.former)}"


def _named(part: LogMembers) -> str:
    nodes = ", ".join(f"{each.name}={each.url or 'unknown'}" for each in part.nodes)
    return f"{nodes} under {part.policy}"


def member_lines(known: Membership) -> Iterator[Text]:
    """The same as lines."""
    for what, said in member_facts(known):
        yield Text(f"  {what}  {said}")


def pins(seen: Topology, slots: Mapping[str, NodeSlot]) -> Iterator[str]:
    """What the slots of replicas pin: of those that are not up to date, and of those that are not registered."""
    known = {member.name: member for member in seen.members}
    for name, (_, slot) in slots.items():
        member = known.get(name)
        if member is None:
            yield f"{name} is not registered: {what_it_pins(slot)}."
        elif slot.state.invalid is not None or (slot.records_behind and not member.healthy):
            yield f"{name} was last heard of {show.seconds(slot.seconds_since_seen)} ago: {what_it_pins(slot)}."


def note_on(member: Member, end: int) -> tuple[str, str]:
    """The state of a replica, and the style to print it in."""
    errors = f"; {show.counted(member.apply_errors, 'apply error')}" if member.apply_errors else ""
    errors += f"; {show.counted(member.divergences, 'divergence')}" if member.divergences else ""
    if not member.healthy:
        return f"silent{errors}", "red"
    if member.bootstrapping:
        return f"bootstrapping{errors}", "yellow"
    if member.applied is None:
        return f"no acknowledgement yet{errors}", "yellow"
    return (f"up to date{errors}", "green") if member.applied >= end else (f"behind{errors}", "yellow")


def remarks(seen: Topology) -> Iterator[str]:
    """Warnings about the commit policy."""
    policy = parse_policy(seen.policy)
    if not isinstance(policy, Quorum):
        return
    present = {seen.primary, *(member.name for member in seen.members if member.healthy and not member.bootstrapping)}
    voters = policy.voters & present
    missing = ", ".join(sorted(policy.voters - present))
    if len(voters) < policy.majority:
        yield f"No quorum: {missing} missing. Appends are durable on {seen.primary}, and not committed."
    elif missing:
        left = len(voters) - policy.majority
        may = f"{show.counted(left, 'more voter')} may be lost" if left else "no other voter may be lost"
        yield f"{missing} missing: {may}, or nothing is committed any more."


def lines(seen: NodeStatus) -> Iterator[Text]:
    """The text output for a node."""
    of = f" {seen.primary}" if seen.condition == "following" and seen.primary else ""
    style = "bold red" if seen.trouble is not None else "green" if seen.condition in _WELL else "yellow"
    yield Text.assemble((seen.name, "bold"), " is ", (seen.condition, style), f"{of}, in term {seen.term}")
    if seen.position is None:
        yield Text("  it has no copy of the log yet")
    else:
        shown = "how much of it is committed is not known yet, and readers have to wait"
        if seen.committed is not None:
            shown = f"readers see up to {seen.committed:,}"
        yield Text(f"  durable below offset {seen.position.next:,}, {shown}")
    if seen.divergences:
        whose = "its replicas have reported" if seen.condition == "leading" else "it has found"
        yield Text(f"  {whose} {show.counted(seen.divergences, 'divergence')} so far")
    if seen.tiering is not None:
        yield Text(f"  tiering is repeated: {seen.tiering}")
    if seen.membership is not None:
        yield from member_lines(seen.membership)
    if seen.trouble is not None:
        yield Text(f"  {seen.trouble}")
