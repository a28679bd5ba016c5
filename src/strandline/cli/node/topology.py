"""``strandline node topology`` and ``status``: who replicates a log and how far each is, and how one node is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from strandline.cli import output as show
from strandline.cli.common import Debug, Json, guarded
from strandline.cli.node.shared import Ca, Cert, Key, NodeUrl, TokenFile, connect
from strandline.model.cursor import SECOND
from strandline.node.lead.policies import Quorum, parse_policy
from strandline.node.messages import Member, NodeStatus, Topology


@guarded
def topology(
    url: NodeUrl,
    *,
    token: TokenFile = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - guarded looks at it
) -> None:
    """Show who replicates a log and how far each is, as its primary sees it. Changes nothing."""
    with connect(url, token=token, ca=ca, cert=cert, key=key) as node:
        seen = node.topology()
    if json:
        show.document(fields(seen))
    else:
        show.out().print(rendered(seen, now=time.time_ns() // 1000))


def fields(seen: Topology) -> dict[str, Any]:
    """What ``--json`` prints."""
    found = {**asdict(seen), "log_id": str(seen.log_id)}
    for member in found["members"]:
        member["lag"] = None if member["applied"] is None else max(0, seen.durable - member["applied"])
    return found


def rendered(seen: Topology, *, now: int) -> RenderableType:
    """What people see; ``now`` is in microseconds."""
    head = Text.assemble(
        (seen.primary, "bold"), f" leads in term {seen.term}, which began at offset {seen.term_start:,}"
    )
    facts = Table(box=None, pad_edge=False, show_header=False)
    facts.add_row("  log", str(seen.log_id))
    facts.add_row("  policy", seen.policy)
    facts.add_row("  durable", f"below offset {seen.durable:,}")
    behind = seen.durable - seen.committed
    waiting = f"; {show.counted(behind, 'record')} not yet" if behind else ""
    facts.add_row("  committed", f"below offset {seen.committed:,}{waiting}")
    facts.add_row("  epoch", f"{seen.epoch:,}")
    if not seen.members:
        return Group(head, facts, Text(""), Text("no replicas"), *map(Text, remarks(seen)))
    table = Table(box=None, pad_edge=False, header_style="bold")
    # On a narrow terminal names are folded: numbers, and how a replica is, are what it is looked at for.
    table.add_column("replica", overflow="fold")
    table.add_column("region", overflow="fold")
    for name in ("sent", "applied", "durable", "lag", "seen\nago"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for member in seen.members:
        table.add_row(
            member.name,
            member.region or "-",
            f"{member.sent:,}",
            _number(member.applied),
            _number(member.durable),
            "-" if member.applied is None else f"{max(0, seen.durable - member.applied):,}",
            show.seconds(max(0.0, (now - member.last_seen) / SECOND)),
            Text(*note_on(member, seen.durable)),
        )
    return Group(head, facts, Text(""), table, *map(Text, remarks(seen)))


def note_on(member: Member, end: int) -> tuple[str, str]:
    """How a replica is, and the style of that."""
    errors = f"; {show.counted(member.apply_errors, 'apply error')}" if member.apply_errors else ""
    errors += f"; {show.counted(member.divergences, 'divergence')}" if member.divergences else ""
    if not member.healthy:
        return f"silent{errors}", "red"
    if member.bootstrapping:
        return f"bootstrapping{errors}", "yellow"
    if member.applied is None:
        return f"not heard of yet{errors}", "yellow"
    return (f"up to date{errors}", "green") if member.applied >= end else (f"behind{errors}", "yellow")


def remarks(seen: Topology) -> Iterator[str]:
    """What somebody has to know who goes by the policy."""
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


@guarded
def status(
    url: NodeUrl,
    *,
    token: TokenFile = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - guarded looks at it
) -> None:
    """Show how one node is: leading or following, how far, and what stopped it. Ends with status 1 if something did."""
    with connect(url, token=token, ca=ca, cert=cert, key=key) as node:
        seen = node.status()
    if json:
        show.document({**asdict(seen), "position": None if seen.position is None else str(seen.position)})
    else:
        for line in lines(seen):
            show.out().print(line, soft_wrap=True)
    if seen.trouble is not None:
        raise typer.Exit(1)


def lines(seen: NodeStatus) -> Iterator[Text]:
    """What people see of a node."""
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
    if seen.trouble is not None:
        yield Text(f"  {seen.trouble}")


_WELL = ("leading", "following")


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
