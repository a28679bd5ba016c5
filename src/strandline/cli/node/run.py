"""``strandline node run``: runs a node until it receives SIGINT or SIGTERM."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import partial
from typing import Annotated, Any, Final, get_args, get_type_hints

from strandline.cli.node.admin import node_at
from strandline.cli.shared import output as show
from strandline.cli.shared.common import Quiet, guarded, retention_policy, stop_on_signal
from strandline.cli.shared.logs import log_to_stderr
from strandline.cli.shared.monitoring import Metrics, listening_place
from strandline.cli.shared.options import argument, option
from strandline.cli.shared.targets import contents_at, is_free
from strandline.errors import InvalidInput, StorageError
from strandline.log.folders import FolderKind, refuse_others
from strandline.model.retention import SlotLimits, limits_of, parse_bytes, parse_retention, parse_seconds
from strandline.node.flight.security import ClientSecurity, ServerSecurity, parse_identities
from strandline.node.lead.policies import FlowLimits
from strandline.node.options import TierSettings
from strandline.node.replicate.replica import Condition
from strandline.node.running import NodeConfig, RunningNode

PORT: Final = 7450
_LOOK: Final = 0.2
_LOOKS_FOR_PRIMARY: Final = 10
"""How often the state is read before the node is reported as connecting."""
_writes: Final = partial(option, rich_help_panel="Commits and retention")
_security: Final = partial(option, "FILE", rich_help_panel="Security")


def other_nodes(given: Sequence[str]) -> dict[str, str]:
    """Parse the names and addresses of other nodes.

    >>> other_nodes(["b=grpc://10.0.0.2:7450"])
    {'b': 'grpc://10.0.0.2:7450'}
    """
    nodes = {}
    for text in given:
        name, url = node_at(text)
        if name in nodes:
            raise InvalidInput(f"--node names {name!r} twice.")
        nodes[name] = url
    return nodes


_PANELS: Final = {
    None: "name listen url region",
    "The primary": "lease lease_seconds nodes upstream lead create take_over automatic",
    "Commits and retention": "policy retention",
    "The cold tier": "cold",
    "Security": "insecure",
}
"""The settings that are options, in the order of the help."""

_GIVEN: Final[dict[str, tuple[str, Any, Any]]] = {
    "name": ("--name", MISSING, None),
    "listen": ("--listen", f"127.0.0.1:{PORT}", listening_place),
    "nodes": ("--node", None, None),
    "retention": ("--retention", "forever", retention_policy),
}
"""The option, the default and the parser of settings that are given in another way than in a program."""


def _settings() -> Iterator[inspect.Parameter]:
    """The settings of :class:`NodeConfig` as options, with the names, types, defaults and descriptions that it has."""
    known, hints = {each.name: each for each in fields(NodeConfig)}, get_type_hints(NodeConfig, include_extras=True)
    for panel, names in _PANELS.items():
        for name in names.split():
            hint, *_, said = get_args(hints[name])
            given, default, parser = _GIVEN.get(name, (f"--{name.replace('_', '-')}", known[name].default, None))
            kind = list[str] if name == "nodes" else hint if hint in (bool, float) else str
            shown = option(said.value, said.help, given, parser=parser, rich_help_panel=panel)
            yield inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if default is MISSING else default,
                annotation=Annotated[kind, shown],
            )


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Add the settings of a node to the options of a command."""
    folder, *own = inspect.signature(command, eval_str=True).parameters.values()
    command.__signature__ = inspect.Signature([folder, *_settings(), *own[:-1]])  # type: ignore[attr-defined]
    return command


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """How far replicas may be behind."""

    max_lag_bytes: Annotated[
        int | None,
        _writes(
            "SIZE",
            "A replica further behind no longer pins records, and has to bootstrap; 0: never.",
            parser=parse_bytes,
            show_default="64 GiB where age or size bounds the log",
        ),
    ] = None
    max_idle: Annotated[
        int | None, _writes("TIME", "The same for a replica that is silent for longer.", parser=parse_seconds)
    ] = None
    slow_at: Annotated[
        int, _writes("RECORDS", "Slow writers down while a replica is this far behind; 0: never.", min=0)
    ] = 0
    refuse_at: Annotated[
        int, _writes("RECORDS", "Refuse writers while a replica is this far behind; 0: never.", min=0)
    ] = 0

    def of_slots(self, retention: str) -> SlotLimits:
        """The default limits of a retention policy, replaced by those that are given; 0 switches one off.

        >>> ReplicaLimits(max_idle=60).of_slots("age:7d"), ReplicaLimits(max_lag_bytes=0).of_slots("age:7d")
        (SlotLimits(lag_bytes=68719476736, idle_seconds=60), SlotLimits(lag_bytes=0, idle_seconds=0))
        """
        return limits_of(parse_retention(retention), self.max_lag_bytes, self.max_idle)


@dataclass(frozen=True, slots=True)
class NodeSecurity:
    """How a node authenticates its callers, and itself."""

    tokens: Annotated[
        str | None, _security("Admit callers with a token of this file, which has lines 'name roles token'.")
    ] = None
    token: Annotated[str | None, _security("The token with which this node authenticates to others.")] = None
    cert: Annotated[str | None, _security("Its certificate, for TLS (PEM).")] = None
    key: Annotated[str | None, _security("Its key (PEM).")] = None
    ca: Annotated[str | None, _security("The authority that signs the other nodes' certificates (PEM).")] = None
    client_ca: Annotated[
        str | None,
        _security("Admit only callers with a certificate of this authority; the node shows its own to others."),
    ] = None
    identity: Annotated[
        list[str] | None,
        option(
            "NAME=ROLE,…",
            "What the certificate of this name may be: replica, client, admin. The log's nodes are replicas, by --node "
            "or 'strandline node add'; any other is a client.",
            rich_help_panel="Security",
        ),
    ] = None

    def load(self) -> dict[str, Any]:
        """The settings of a node, with the files read."""
        known = parse_identities(self.identity or [])
        if known and (self.client_ca is None or self.tokens is not None):
            raise InvalidInput("--identity names certificates: it needs --client-ca, and goes without --tokens.")
        pair: dict[str, Any] = {"certificate": self.cert, "key": self.key}
        server = ServerSecurity.load(**pair, client_roots=self.client_ca, tokens=self.tokens, identities=known)
        shown = {} if self.client_ca is None or self.cert is None else pair
        return {"server": server, "client": ClientSecurity.load(roots=self.ca, token=self.token, **shown)}


@guarded
@_with_settings
def run(
    folder: Annotated[str, argument("FOLDER", "The node's own folder; made if need be.")],
    *,
    limits: ReplicaLimits,
    cold_retention: Annotated[
        str,
        option(
            "POLICY",
            "What the cold tier keeps: forever, consumed, age:90d or bytes:10TiB; slots of consumers pin it.",
            parser=retention_policy,
            rich_help_panel="The cold tier",
        ),
    ] = "forever",
    security: NodeSecurity,
    metrics: Metrics,
    quiet: Quiet = False,
    **settings: Any,
) -> None:
    """Run a node of a replicated log: it leads, or follows the primary, until Ctrl-C or SIGTERM.

    Prints one line when it serves, and logs to standard error. Stopping it releases the lease at once. It ends with
    status 1 if it fails: run it under a supervisor that restarts it.

    Example: strandline node run /var/lib/a --name a --lead --create
    """
    there = contents_at(folder)
    if not is_free(there):
        refuse_others(there, FolderKind.NODE)
    log_to_stderr(logging.WARNING if quiet else logging.INFO)
    config = NodeConfig(
        folder=folder,
        nodes=other_nodes(settings.pop("nodes") or []),
        limits=limits.of_slots(settings["retention"]),
        flow=FlowLimits(limits.slow_at, limits.refuse_at),
        tiering=TierSettings(retention=cold_retention),
        **security.load(),
        **settings,
    )
    metrics = Metrics(metrics.metrics, metrics.metrics_open or config.insecure)
    with stop_on_signal() as stop, metrics.served() as health, RunningNode(config) as running:
        health.failed = lambda: None if running.failure is None else repr(running.failure)
        health.not_ready = running.why_not_ready
        _report_states(running, stop)
    logging.getLogger("strandline.node").info("Node %s has stopped.", config.name)
    if running.failure is not None:
        raise StorageError(f"Node {config.name} failed: {running.failure!r}. Read what it logged, and start it again.")


def _report_states(running: RunningNode, stop: threading.Event) -> None:
    """Print the address and state of the node, and log each further state, until it stops or fails."""
    said = _first_state(running, stop)
    fields = {"name": running.name, "url": running.url, "condition": said}
    show.answer(fields, f"{running.name} serves at {running.url}, and is {said}.")
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
