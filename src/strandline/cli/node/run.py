"""``strandline node run``: runs a node until it receives SIGINT or SIGTERM."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final

import typer

from strandline.cli.shared import output as show
from strandline.cli.shared.common import (
    Json,
    guarded,
    length_of_time,
    retention_policy,
    size_in_bytes,
    stop_on_signal,
)
from strandline.cli.shared.logs import log_to_stderr
from strandline.cli.shared.monitoring import Metrics, MetricsOpen, listening_place, monitored
from strandline.cli.shared.targets import contents_at, is_free, meant, spool_at
from strandline.errors import InvalidInput, StorageError
from strandline.log.folders import Contents, FolderKind, refuse_others
from strandline.model.retention import SlotLimits, default_limits, parse_retention
from strandline.node.flight.security import ClientSecurity, ServerSecurity, parse_identities
from strandline.node.lead.policies import FlowLimits
from strandline.node.options import TierSettings
from strandline.node.replicate.replica import Condition
from strandline.node.running import NodeConfig, RunningNode

PORT: Final = 7450
_SEGMENT: Any = "256MiB"  # given to the parser
_LINGER: Any = "1h"
_LOOK: Final = 0.2
_LOOKS_FOR_PRIMARY: Final = 10
"""How often the state is read before the node is reported as connecting."""
_role: Final = partial(typer.Option, rich_help_panel="The primary")
_writes: Final = partial(typer.Option, rich_help_panel="Commits and retention")
_cold: Final = partial(typer.Option, rich_help_panel="The cold tier")
_security: Final = partial(typer.Option, rich_help_panel="Security")


def other_nodes(given: Sequence[str]) -> dict[str, str]:
    """Parse the names and addresses of other nodes.

    >>> other_nodes(["b=grpc://10.0.0.2:7450"])
    {'b': 'grpc://10.0.0.2:7450'}
    """
    nodes = {}
    for text in given:
        name, found, url = text.partition("=")
        if not (name and found and url):
            raise InvalidInput(f"{text!r} names no node: write --node NAME=grpc://host:port.")
        if name in nodes:
            raise InvalidInput(f"--node names {name!r} twice.")
        nodes[name] = url
    return nodes


def _taken_over(there: Contents) -> dict[FolderKind, str]:
    """What to do about other content in a node's folder: a node in a folder of its own takes a log over."""
    path = there.path.rstrip("/") or there.path
    run_it = "'strandline node run FOLDER --take-over {}' in a folder of the node's own"
    spool = spool_at(there) or f"{path}.logical.wal"
    return meant(there) | {
        FolderKind.WAL: f"a node leads with a copy of it by {run_it.format(path)}.",
        FolderKind.SPOOL: f"move it into a write-ahead log with 'strandline wal migrate {spool}'; a node leads with a "
        f"copy of that by {run_it.format(spool.removesuffix('.logical.wal'))}.",
    }


def _limits(retention: str, lag_bytes: int | None, idle_seconds: int | None) -> SlotLimits:
    """The default limits of a retention policy, replaced by those that are given; 0 switches one off.

    >>> _limits("age:7d", None, 60), _limits("age:7d", 0, None)
    (SlotLimits(lag_bytes=68719476736, idle_seconds=60), SlotLimits(lag_bytes=0, idle_seconds=0))
    """
    usual = default_limits(parse_retention(retention))
    return SlotLimits(
        usual.lag_bytes if lag_bytes is None else lag_bytes,
        usual.idle_seconds if idle_seconds is None else idle_seconds,
    )


@guarded
def run(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="The node's own folder; made if need be.")],
    *,
    name: Annotated[str, typer.Option(metavar="NAME", help="Unique among the log's nodes; it never changes.")],
    listen: Annotated[
        Any, typer.Option(metavar="HOST:PORT", parser=listening_place, help="Where to listen; port 0 takes a free one.")
    ] = f"127.0.0.1:{PORT}",
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Where the other nodes reach it, if not where it listens.")
    ] = None,
    region: Annotated[str | None, typer.Option(metavar="NAME", help="The region it runs in.")] = None,
    lease: Annotated[
        str | None,
        _role(
            metavar="URL",
            help="The folder or bucket of the lease that decides which node leads, the same for all nodes of the log.",
        ),
    ] = None,
    lease_seconds: Annotated[float, _role(metavar="SECONDS", help="How long the lease outlives its holder.")] = 15.0,
    node: Annotated[
        list[str] | None,
        _role(
            "--node",
            metavar="NAME=URL",
            help="Another node of the log, at its own --url. Give all: they are asked before this one takes over, and "
            "only they get its token. 'strandline node add' and 'node remove' change them later.",
        ),
    ] = None,
    upstream: Annotated[str | None, _role(metavar="URL", help="Without a lease: the primary to follow.")] = None,
    lead: Annotated[bool, _role("--lead", help="Without a lease: be the primary.")] = False,
    create: Annotated[bool, _role("--create", help="Begin a new log if there has never been one.")] = False,
    take_over: Annotated[
        str | None,
        _role(
            metavar="FOLDER",
            help="Begin with a copy of this write-ahead log, if the node has no log yet; stop its writer first.",
        ),
    ] = None,
    automatic: Annotated[
        bool, _role("--automatic", help="Take over when the primary is gone; needs a lease and a quorum.")
    ] = False,
    policy: Annotated[
        str,
        _writes(metavar="POLICY", help="When an append counts: local, ack_n(2), quorum(a,b,c) or regions(eu=1,us=1)."),
    ] = "local",
    retention: Annotated[
        str, _writes(metavar="POLICY", parser=retention_policy, help="forever, consumed, age:7d or bytes:100GiB.")
    ] = "forever",
    max_lag_bytes: Annotated[
        int | None,
        _writes(
            metavar="SIZE",
            parser=size_in_bytes,
            help="A replica further behind no longer pins records, and has to bootstrap; 0: never.",
            show_default="64 GiB where age or size bounds the log",
        ),
    ] = None,
    max_idle: Annotated[
        int | None,
        _writes(metavar="TIME", parser=length_of_time, help="The same for a replica that is silent for longer."),
    ] = None,
    slow_at: Annotated[
        int, _writes(metavar="RECORDS", min=0, help="Slow writers down while a replica is this far behind; 0: never.")
    ] = 0,
    refuse_at: Annotated[
        int, _writes(metavar="RECORDS", min=0, help="Refuse writers while a replica is this far behind; 0: never.")
    ] = 0,
    poll_seconds: Annotated[float, _writes(metavar="SECONDS", help="Heartbeat interval.")] = 1.0,
    cold: Annotated[
        str | None,
        _cold(
            metavar="URL",
            help="The store of the log's cold tier, such as s3://bucket/orders: whichever node leads copies the log "
            "there, and all nodes read it. The log keeps it; the other nodes learn it from the primary.",
        ),
    ] = None,
    cold_events: Annotated[
        str | None,
        _cold(
            metavar="URL",
            help="The topic of the cold tier's events: kafka://host:port/topic, or a store.",
            show_default="'events' in the cold tier's store",
        ),
    ] = None,
    cold_retention: Annotated[
        str,
        _cold(
            metavar="POLICY",
            parser=retention_policy,
            help="What the cold tier keeps: forever, consumed, age:90d or bytes:10TiB; slots of consumers pin it.",
        ),
    ] = "forever",
    segment_bytes: Annotated[
        int, _cold(metavar="SIZE", parser=size_in_bytes, help="Target size of a segment.")
    ] = _SEGMENT,
    linger: Annotated[
        int, _cold(metavar="TIME", parser=length_of_time, help="Records are copied at the latest after this time.")
    ] = _LINGER,
    tokens: Annotated[
        str | None,
        _security(metavar="FILE", help="Admit callers with a token of this file, which has lines 'name roles token'."),
    ] = None,
    token: Annotated[
        str | None, _security(metavar="FILE", help="The token with which this node authenticates to others.")
    ] = None,
    cert: Annotated[str | None, _security(metavar="FILE", help="Its certificate, for TLS (PEM).")] = None,
    key: Annotated[str | None, _security(metavar="FILE", help="Its key (PEM).")] = None,
    ca: Annotated[
        str | None, _security(metavar="FILE", help="The authority that signs the other nodes' certificates (PEM).")
    ] = None,
    client_ca: Annotated[
        str | None,
        _security(
            metavar="FILE",
            help="Admit only callers with a certificate of this authority; the node shows its own to others.",
        ),
    ] = None,
    identity: Annotated[
        list[str] | None,
        _security(
            "--identity",
            metavar="NAME=ROLE,…",
            help="What the certificate of this name may be: replica, client, admin. The log's nodes are replicas, by "
            "--node or 'strandline node add'; any other is a client.",
        ),
    ] = None,
    insecure: Annotated[
        bool, _security("--insecure", help="Admit other machines without authentication, and in plain text.")
    ] = False,
    metrics: Metrics = None,
    metrics_open: MetricsOpen = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Log warnings only.")] = False,
    json: Json = False,
) -> None:
    """Run a node of a replicated log: it leads, or follows the primary, until Ctrl-C or SIGTERM.

    Prints one line when it serves, and logs to standard error. Stopping it releases the lease at once. It ends with
    status 1 if it fails: run it under a supervisor that restarts it.

    Example: strandline node run /var/lib/a --name a --lead --create
    """
    there = contents_at(folder)
    if not is_free(there):
        refuse_others(there, FolderKind.NODE, instead=_taken_over(there))
    log_to_stderr(logging.WARNING if quiet else logging.INFO)
    shown = cert if client_ca is not None else None
    nodes = other_nodes(node or [])
    known = parse_identities(identity or [])
    if known and (client_ca is None or tokens is not None):
        raise InvalidInput("--identity names certificates: it needs --client-ca, and goes without --tokens.")
    config = NodeConfig(
        folder=folder,
        name=name,
        listen=listen,
        url=url,
        region=region,
        policy=policy,
        lease=lease,
        lease_seconds=lease_seconds,
        nodes=nodes,
        upstream=upstream,
        automatic=automatic,
        create=create,
        take_over=take_over,
        lead=lead,
        retention=retention,
        limits=_limits(retention, max_lag_bytes, max_idle),
        flow=FlowLimits(slow_at, refuse_at),
        poll_seconds=poll_seconds,
        cold=cold,
        tiering=TierSettings(retention=cold_retention, target=segment_bytes, linger=float(linger), events=cold_events),
        server=ServerSecurity.load(certificate=cert, key=key, client_roots=client_ca, tokens=tokens, identities=known),
        client=ClientSecurity.load(roots=ca, certificate=shown, key=key if shown else None, token=token),
        insecure=insecure,
    )
    is_open = metrics_open or insecure
    with stop_on_signal() as stop, monitored(metrics, is_open=is_open) as health, RunningNode(config) as running:
        health.failed = lambda: None if running.failure is None else repr(running.failure)
        health.not_ready = running.why_not_ready
        _report_states(running, stop, as_json=json)
    logging.getLogger("strandline.node").info("Node %s has stopped.", name)
    if running.failure is not None:
        raise StorageError(f"Node {name} failed: {running.failure!r}. Read what it logged, and start it again.")


def _report_states(running: RunningNode, stop: threading.Event, *, as_json: bool) -> None:
    """Print the address and state of the node, and log each further state, until it stops or fails."""
    said = _first_state(running, stop)
    fields = {"name": running.name, "url": running.url, "condition": said}
    show.answer(fields, f"{running.name} serves at {running.url}, and is {said}.", as_json=as_json)
    logger = logging.getLogger("strandline.node")
    while not stop.wait(_LOOK) and running.failure is None:
        now = running.condition
        if now != said:
            said = now
            primary = running.node.node_folder.state.primary
            of = f" {primary}" if now == "following" else ""
            logger.info("Node %s is %s%s.", running.name, now, of)


def _first_state(running: RunningNode, stop: threading.Event) -> str:
    """The state of a node that has just started: for a moment it looks for a primary, even if it then leads itself."""
    for _ in range(_LOOKS_FOR_PRIMARY):
        said = running.condition
        if said != Condition.CONNECTING or running.failure is not None or stop.wait(_LOOK):
            return said
    return running.condition
