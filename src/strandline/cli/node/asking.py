"""``strandline promote``, ``node unregister`` and ``node rebootstrap``: having a node do something."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.text import Text

from strandline.cli import output as show
from strandline.cli.common import Debug, Json, confirm, guarded
from strandline.cli.node.shared import Ca, Cert, Key, NodeUrl, TokenFile, Yes, connect
from strandline.cli.node.topology import fields
from strandline.errors import Fenced, NotReady
from strandline.node.flight.remote_log import RemoteLog
from strandline.node.messages import Topology


@guarded
def promote(
    url: NodeUrl,
    *,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Leave out the nodes that cannot be asked, and lead even from a copy that stopped with a gap or a "
            "divergence. What only the others have is lost to the log.",
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="How long to wait for the node's answer.")
    ] = 120.0,
    yes: Yes = False,
    token: TokenFile = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - guarded looks at it
) -> None:
    """Make the node at URL the primary, if nothing that was committed can be lost by that.

    It waits until the former primary's lease has run out, and asks the other nodes what they have. It refuses if it is
    not healthy, if another one has more, or if too few can be asked to be sure: then the status is 1.
    """
    with connect(url, token=token, ca=ca, cert=cert, key=key) as node:
        leads = _leading(node)
        if leads is None:
            if force:
                confirm(f"Promote {url} without those who cannot be asked? What only they have will be lost.", yes=yes)
            with _waiting(f"{url} waits for the lease, and asks the others", quiet=json):
                now = node.promote(force=force, timeout=timeout)
        else:
            now = leads
    if json:
        show.document({"promoted": leads is None, "forced": force and leads is None, **fields(now)})
    elif leads is not None:
        show.line(f"{now.primary} is the primary already, in term {now.term}. Nothing was changed.")
    else:
        _tell(now, forced=force)


def _leading(node: RemoteLog) -> Topology | None:
    """The topology, if the node leads already."""
    try:
        return node.topology()
    except (NotReady, Fenced):
        return None


def _tell(now: Topology, *, forced: bool) -> None:
    show.line(f"{now.primary} is the primary of term {now.term} now, and goes on at offset {now.term_start:,}.")
    if forced:
        show.line("It is healthy, and nobody who answered has more. Who did not answer was left out, as you said: what")
        show.line("only they had goes into their quarantine when they come back.")
    else:
        show.line(f"It is healthy, nobody who answered has more, and all that {now.policy} had committed is there.")


@contextmanager
def _waiting(what: str, *, quiet: bool) -> Iterator[None]:
    if quiet:
        yield
    elif sys.stderr.isatty():
        with show.err().status(Text(what)):
            yield
    else:
        show.line(f"{what} …", file=sys.stderr)
        yield


@guarded
def unregister(
    url: NodeUrl,
    replica: Annotated[str, typer.Argument(metavar="NAME", help="The replica's name.", show_default=False)],
    *,
    keep_slot: Annotated[
        bool, typer.Option("--keep-slot", help="Go on keeping what it still needs, for when it comes back.")
    ] = False,
    yes: Yes = False,
    token: TokenFile = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - guarded looks at it
) -> None:
    """Have the primary at URL count a replica no longer, and let go of what was kept for it.

    Stop the replica first: one that runs registers again by itself.
    """
    with connect(url, token=token, ca=ca, cert=cert, key=key) as node:
        known = replica in {member.name for member in node.topology().members}
        slot = "It counts no longer" + (", and its slot stays." if keep_slot else ", and its slot is dropped.")
        if known:
            confirm(f"Unregister replica {replica!r}? {slot}", yes=yes)
        node.unregister(replica, keep_slot=keep_slot)
    if json:
        show.document({"replica": replica, "known": known, "kept_slot": keep_slot})
    elif known:
        show.line(f"Replica {replica!r} is unregistered. {slot}")
    else:
        show.line(
            f"Replica {replica!r} was not registered{'' if keep_slot else '; if it had a slot, that is dropped'}."
        )


@guarded
def rebootstrap(
    url: NodeUrl,
    *,
    yes: Yes = False,
    token: TokenFile = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - guarded looks at it
) -> None:
    """Have the replica at URL build its copy again, from a snapshot of the primary.

    This is how a replica that stopped with a gap or a divergence goes on. Until the new copy is whole the old one is
    kept, and can be read.
    """
    with connect(url, token=token, ca=ca, cert=cert, key=key) as node:
        before = node.status()
        confirm(f"Let {before.name} ({before.condition}) build its copy again? Its own is thrown away.", yes=yes)
        node.rebootstrap()
    if json:
        show.document({"name": before.name, "was": before.condition, "rebootstrap": True})
    else:
        show.line(f"{before.name} builds its copy again; 'strandline node status {url}' tells how it is.")
