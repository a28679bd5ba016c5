"""Settings of a node process: one value, checked before anything is opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Concatenate, Final, ParamSpec, TypeVar, cast

from strandline.errors import InvalidInput
from strandline.model.addresses import Address, as_folder, check_replica_name, refuse_credentials
from strandline.model.arguments import Duration, checked, whole
from strandline.model.retention import as_retention
from strandline.node.flight.client.channel import TIMEOUT, Channel
from strandline.node.flight.security import ClientSecurity, ServerSecurity, check_listening
from strandline.node.flight.server.limits import ServerLimits
from strandline.node.lead.policies import Quorum
from strandline.node.options import NodeOptions, Option
from strandline.node.tickets import LIFETIME
from strandline.storage.objects.urls import open_store

LEASE: Final = "lease"
"""The object of the lease, below its address."""

_FREE_PORT: Final = ("127.0.0.1", 0)
_ANYWHERE: Final = ("0.0.0.0", "::", "[::]", "")  # noqa: S104 - these are refused, not listened on


P = ParamSpec("P")
N = TypeVar("N")


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig(NodeOptions):
    """All settings of a node process, checked together; ``InvalidInput``, with what to do, if they cannot work.

    >>> NodeConfig(folder="data", name="a", policy="quorum(a,b,c)", lead=True).commit_policy.majority
    2
    """

    folder: Address = field(kw_only=False)
    """The node's own folder; created if it is missing."""
    upstream: Annotated[str | None, Option("Without a lease: the primary to follow.", "URL")] = field(
        default=None, kw_only=False
    )
    name: Annotated[str, Option("Unique among the log's nodes; it never changes.", "NAME")] = ""
    listen: Annotated[tuple[str, int], Option("Where to listen; port 0 takes a free one.", "HOST:PORT")] = _FREE_PORT
    lease: Annotated[
        str | None,
        Option("The folder or bucket of the lease that decides which node leads, the same for all nodes.", "URL"),
    ] = None
    lease_seconds: Annotated[Duration, Option("How long the lease outlives its holder.", "SECONDS")] = 15.0
    create: Annotated[bool, Option("Begin a new log if there has never been one.")] = False
    take_over: Annotated[
        Address | None,
        Option("Begin with a copy of this write-ahead log, if the node has none; stop its writer first.", "FOLDER"),
    ] = None
    lead: Annotated[bool, Option("Without a lease: be the primary.")] = False
    timeout: Duration = TIMEOUT
    """Timeout of a call to another node, in seconds."""
    ticket_seconds: Duration = LIFETIME
    """How long the spans of a plan can be read without credentials."""
    server: ServerSecurity = field(default_factory=ServerSecurity)
    client: ClientSecurity = field(default_factory=ClientSecurity)
    server_limits: ServerLimits = field(default_factory=ServerLimits)
    insecure: Annotated[bool, Option("Admit other machines without authentication, and in plain text.")] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", as_folder(self.folder))
        if self.take_over is not None:
            object.__setattr__(self, "take_over", as_folder(self.take_over))
        self._check_itself()
        self._check_role()
        if self.automatic:
            self._check_automatic()
        for url in (*self.nodes.values(), *([] if self.upstream is None else [self.upstream])):
            Channel(url, security=self.client, timeout=self.timeout).close()  # connects only when it is used
        if self.lease is not None:
            open_store(self.lease)
        if self.cold is not None:
            refuse_credentials(self.cold, "set them in the environment, or by TierSettings(options=…)")
            open_store(self.cold, self.tiering.options)  # no request
        _ = as_retention(self.tiering.retention)

    def check_reaching(self, url: str, nodes: Mapping[str, str]) -> None:
        """``InvalidInput`` if the node would send its token to an address that is none of the log's nodes.

        Whoever can write the object of the lease can name any address there. ``nodes`` are those of the log.
        """
        given = {each.rstrip("/") for each in (*nodes.values(), self.upstream or "") if each}
        if self.client.token is not None and url.rstrip("/") not in given:
            raise InvalidInput(
                f"The lease names {url[:200]} as the primary, which is none of the addresses that node {self.name} "
                "knows: its token was not sent there. If it is a node of this log, add it with 'strandline node add', "
                "or give it as --node NAME=URL, with the address that it has itself (--url)."
            )

    def _check_itself(self) -> None:
        check_replica_name(self.name)
        for name in self.nodes:
            check_replica_name(name)
        _ = self.commit_policy, self.retention_policy  # both raise InvalidInput for an unknown text
        host, port = self.listen
        whole(0, 65535).check(port, "The port to listen on")
        check_listening(host, self.server, insecure=self.insecure)
        if self.url is not None:
            refuse_credentials(
                self.url, "authenticate with tokens or certificates instead (ServerSecurity, ClientSecurity)"
            )
            Channel(self.url).close()
            if " " in self.url:
                raise InvalidInput(f"{self.url!r} is no address of a node: it has a space in it.")
        elif host in _ANYWHERE:
            raise InvalidInput(
                f"Other nodes cannot call {host or 'no host'!r}: give the address at which they reach this one (url)."
            )

    def _check_role(self) -> None:
        if self.lease is not None and (self.lead or self.upstream is not None):
            raise InvalidInput(
                "The lease decides which node leads: leave out the upstream and leading by configuration, or the lease."
            )
        if self.lead and self.upstream is not None:
            raise InvalidInput("A node leads or follows: give it an upstream, or let it lead, not both.")
        if self.lease is None and self.upstream is None and not self.lead:
            raise InvalidInput(
                f"Node {self.name} has no primary to follow: name a lease or an upstream, or let it lead."
            )
        if self.take_over is not None and self.upstream is not None:
            raise InvalidInput(
                "A node that follows an upstream gets its log from there: let the primary take a log over."
            )
        if self.create and self.upstream is not None:
            raise InvalidInput("A node that follows an upstream gets its log from there: do not let it create one.")

    def _check_automatic(self) -> None:
        policy = self.commit_policy
        if self.lease is None or not isinstance(policy, Quorum):
            raise InvalidInput(
                "A node takes over by itself only with a lease and the policy quorum(...): with any other policy "
                "an acknowledged record could be lost. Configure both, or promote by hand."
            )
        missing = sorted(policy.voters - {self.name} - set(self.nodes))
        if missing:
            raise InvalidInput(
                f"A node that takes over by itself asks the other voters, and has no address of {', '.join(missing)}: "
                "add it to nodes."
            )


def with_settings(_: Callable[P, NodeConfig]) -> Callable[[Callable[..., N]], Callable[Concatenate[Any, P], N]]:
    """For type checkers: the class method takes the settings of a node, and passes them on."""
    return lambda call: cast("Callable[Concatenate[Any, P], N]", call)
