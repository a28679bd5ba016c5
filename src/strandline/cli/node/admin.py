"""``strandline promote`` and the commands of ``strandline node`` that query or change a running node."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Annotated, Any

import typer
from rich.text import Text

from strandline.cli.node.node_state import lines, rendered, what_it_pins
from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import client_security, connection_errors
from strandline.cli.shared.common import Yes, confirm, connecting, guarded
from strandline.cli.shared.options import argument, flag, option
from strandline.cli.shared.targets import contents_at
from strandline.errors import Fenced, InvalidInput, NotReady
from strandline.formats.node.state import decode_node
from strandline.log.folders import FolderKind, refuse_others
from strandline.log.wal.log import WalLog
from strandline.node.flight.client.remote_log import RemoteLog
from strandline.node.messages import Topology
from strandline.node.node_folder import STATE, NodeFolder, plausible_term
from strandline.serve.log_state import slot_fields
from strandline.serve.node_state import members_with_slots, replica_slots, status_fields, topology_fields
from strandline.storage.clock import CLOCK
from strandline.storage.disk import DISK

_PROMOTION_SECONDS = 120.0
"""How long a node's answer is waited for: as long as several leases."""

Node = Annotated[RemoteLog, argument("URL", "The node: grpc://host:port or grpc+tls://host:port.", parser=str)]


def asking(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command that calls a :data:`Node`, whose address it is given; ``NotReady`` if nobody answers there."""

    @wraps(command)
    def run(node: str, **options: Any) -> None:
        with connection_errors(node), RemoteLog(node, security=client_security()) as opened:
            command(opened, **options)

    return connecting(run)


def node_at(text: str) -> tuple[str, str]:
    """The name and the address of a node, from NAME=URL."""
    name, found, url = text.partition("=")
    if not (name and found and url):
        raise InvalidInput(f"{text!r} names no node: write NAME=grpc://host:port.")
    return name, url


@asking
def topology(node: Node) -> None:
    """Show the replicas of a log and the offsets of each, as its primary sees them. Changes nothing.

    Example: strandline node topology grpc://10.0.0.1:7450
    """
    seen, slots, now = node.topology(), replica_slots(node), CLOCK.now()
    show.answer(members_with_slots(seen, slots, now), lambda: rendered(seen, slots, now=now))


@asking
def status(node: Node) -> None:
    """Show the state of one node: role, offsets, and what stopped it. Ends with status 1 if something did.

    Example: strandline node status grpc://10.0.0.1:7450
    """
    seen = node.status()
    slots = replica_slots(node) if seen.condition == "leading" else {}
    found = status_fields(seen)
    found["replica_slots"] = {name: slot_fields(slot, CLOCK.now()) for name, slot in slots.items()}
    behind = [
        f"  replica {name}, last heard of {show.seconds(slot.seconds_since_seen)} ago: {what_it_pins(slot)}"
        for name, (_, slot) in slots.items()
    ]
    show.answer(found, *lines(seen), *map(Text, behind))
    if seen.trouble is not None:
        raise typer.Exit(1)


@asking
def promote(
    node: Node,
    *,
    force: Annotated[
        bool,
        flag(
            "Leave out the nodes that do not answer, and lead even from a copy that stopped with a gap or a "
            "divergence. What only the others have is lost to the log.",
            "--force",
        ),
    ] = False,
    yes: Yes = False,
) -> None:
    """Make a node the primary, if that loses nothing committed.

    The node waits until the former primary's lease has expired, and asks the other nodes for their reports. It refuses
    if it is not healthy, if another one has more records, or if too few answer to know: then the status is 1.

    Example: strandline promote grpc://10.0.0.2:7450
    """
    leads = _leading(node)
    if leads is None and force:
        confirm(f"Promote {node.url} without the nodes that do not answer? What only they have will be lost.", yes=yes)
    with _waiting(f"{node.url} waits for the lease, and asks the others", quiet=leads is not None):
        now = leads or node.promote(force=force, timeout=_PROMOTION_SECONDS)
    message = [f"{now.primary} is the primary already, in term {now.term}. Nothing was changed."]
    if leads is None:
        message = [
            f"{now.primary} is the primary of term {now.term} now, and continues at offset {now.term_start:,}.",
            f"It is healthy, no node that answered has more, and it has everything that {now.policy} had committed.",
        ]
        if force:
            message[1:] = [
                "It is healthy, and no node that answered has more. Nodes that did not answer were left out: records",
                "that only they have go into their quarantine when they return.",
            ]
    found = {"promoted": leads is None, "forced": force and leads is None, **topology_fields(now)}
    show.answer(found, *message)


def _leading(node: RemoteLog) -> Topology | None:
    """The topology, if the node leads already."""
    try:
        return node.topology()
    except (NotReady, Fenced):
        return None


@contextmanager
def _waiting(what: str, *, quiet: bool) -> Iterator[None]:
    if quiet or show.for_programs():
        yield
    elif sys.stderr.isatty():
        with show.err().status(Text(what)):
            yield
    else:
        show.line(f"{what} …", file=sys.stderr)
        yield


@asking
def unregister(
    node: Node,
    replica: Annotated[str, argument("NAME", "The replica's name.")],
    *,
    keep_slot: Annotated[bool, flag("Keep its slot, for when it returns.", "--keep-slot")] = False,
    yes: Yes = False,
) -> None:
    """Unregister a replica from the primary at URL, drop its slot, and rotate the key for tickets, which it knows.

    Stop the replica first: a running one registers again by itself.

    Example: strandline node unregister grpc://10.0.0.1:7450 c
    """
    known = replica in {member.name for member in node.topology().members}
    slot = "It counts no longer" + (", and its slot stays." if keep_slot else ", and its slot is dropped.")
    if known:
        confirm(f"Unregister replica {replica!r}? {slot}", yes=yes)
    node.unregister(replica, keep_slot=keep_slot)
    message = f"Replica {replica!r} was not registered any more; its slot is dropped."
    if known:
        message = f"Replica {replica!r} is unregistered. {slot} The key for tickets is rotated."
    show.answer({"replica": replica, "known": known, "kept_slot": keep_slot}, message)


@asking
def rotate_keys(node: Node) -> None:
    """Make the primary at URL sign the tickets of reads with a new key, which its registered replicas get.

    Reads that were planned before go on until their tickets expire, after an hour by default. A replica that was
    removed cannot sign tickets any longer than that. Unregistering a replica and every new primary rotate the key, too.

    Example: strandline node rotate-keys grpc://10.0.0.1:7450
    """
    node.rotate_keys()
    show.answer({"rotated": True}, "The key for tickets is rotated. Planned reads end with their tickets.")


@asking
def rebootstrap(node: Node, *, yes: Yes = False) -> None:
    """Make the replica at URL build its copy again, from a snapshot of the primary.

    This is how a replica that stopped with a gap or a divergence continues. The old copy can be read until the new one
    is complete.

    Example: strandline node rebootstrap grpc://10.0.0.2:7450
    """
    before = node.status()
    confirm(f"Let {before.name} ({before.condition}) build its copy again? Its own is thrown away.", yes=yes)
    node.rebootstrap()
    message = f"{before.name} builds its copy again; 'strandline node status {node.url}' shows its state."
    show.answer({"name": before.name, "was": before.condition, "rebootstrap": True}, message)


@guarded
def reset_term(
    folder: Annotated[str, argument("FOLDER", "The folder of a node that does not run.")],
    *,
    to: Annotated[
        int | None,
        option(
            "TERM", "The highest term that counts; by default the one of its records and of its own leading.", min=0
        ),
    ] = None,
    yes: Yes = False,
) -> None:
    """Make the stopped node in FOLDER forget terms that are higher than those of its records.

    For a node that refuses its primary, or refuses to lead, because it has seen a term in which no node leads. Do it
    only then: this node could no longer tell a primary of that term from an older one.

    Example: strandline node reset-term /var/lib/b
    """
    refuse_others(contents_at(folder), FolderKind.NODE)
    state = decode_node(DISK.read(f"{folder}/{STATE}"), f"{folder}/{STATE}")
    with NodeFolder.open(folder, state.name) as node_folder:
        before = node_folder.state
        in_log = _highest_term(node_folder) if before.generation else 0
        changed_in = 0 if before.membership is None else before.membership.term
        term = plausible_term(in_log, before.adopted, before.led, changed_in) if to is None else to
        if term < changed_in:
            raise InvalidInput(
                f"{folder} has members of term {changed_in}, which a primary of that term has recorded: a lower one "
                "than that cannot count."
            )
        if term < in_log:
            raise InvalidInput(f"{folder} has records of term {in_log}: a lower one than that cannot count.")
        if term < before.seen:
            confirm(
                f"Let {before.name} forget terms {term + 1} to {before.seen}? Only if no node leads in one of them.",
                yes=yes,
            )
            node_folder.reset_term(term)
    changed = term < before.seen
    found = {"name": before.name, "before": before.seen, "term": min(term, before.seen), "changed": changed}
    message = f"{before.name} has seen no term above {before.seen}. Nothing was changed."
    if changed:
        message = f"{before.name} has seen term {term} now, and {before.seen} no more. Start it again."
    show.answer(found, message)


def _highest_term(node_folder: NodeFolder) -> int:
    """The term of the last record; terms never go down along a log."""
    folder = node_folder.data(node_folder.state.generation)
    with WalLog.open(folder, create=False, background=False) as log:
        return log.end().term
