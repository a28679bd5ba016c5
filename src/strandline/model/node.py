"""The heartbeat of a primary, and the durable state of a node, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from strandline.model.arguments import Natural
from strandline.model.json_values import PlainName


class Heartbeat(NamedTuple):
    """A primary's heartbeat: with every batch, and about once per heartbeat interval without any."""

    term: int
    term_start: int
    durable: int
    committed: int
    epoch: int
    """The topology's."""
    sealed: bool = False
    """Whether the last that is durable is a seal (:attr:`~strandline.model.cursor.Bounds.extent`)."""


NO_HEARTBEAT: Final = Heartbeat(0, 0, 0, 0, 0)
"""The heartbeat of a node that is no primary."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a replica does not follow until an operator acts."""

    state: str
    """Its name, such as ``diverged``."""
    reason: str
    at: Natural
    """When it occurred, in microseconds."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A replica of the log, as its primary last reported it."""

    name: str
    region: str | None = None
    divergences: Natural = 0
    """Number of its reported divergences."""


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """A node of the log, and where the others reach it."""

    name: PlainName
    url: str
    """Empty while unknown: no election can ask it then."""


@dataclass(frozen=True, slots=True)
class LogMembers:
    """The nodes of a log, and its commit policy."""

    nodes: tuple[NodeAddress, ...]
    policy: str


@dataclass(frozen=True, slots=True)
class Membership:
    """The recorded members of a log. Of two records the one with the higher (term, number) is in force."""

    term: Natural
    """The term of the primary that made it."""
    number: Natural
    """Grows with each record; the settings of the start are number 0."""
    members: LogMembers
    former: LogMembers | None = None
    """Those before, while the change is pending: commits and elections need both."""
    takes_back: tuple[Natural, Natural] | None = None
    """The version of the record whose change this one takes back; None for any other change."""

    @property
    def version(self) -> tuple[int, int]:
        """Orders the records of a log."""
        return self.term, self.number


@dataclass(frozen=True, slots=True)
class NodeState:
    """Durable state of a node: what other nodes rely on, or what must not be forgotten."""

    name: str
    generation: Natural = 0
    """Number of the current data folder; 0 for none yet."""
    seen: Natural = 0
    """The highest term that it has seen: lower ones are refused."""
    adopted: Natural = 0
    """The highest term of which it has everything before its start."""
    led: Natural = 0
    """The last term in which it was the primary; 0 for never."""
    committed: Natural = 0
    """A known watermark; written lazily, so that the highest may be above."""
    primary: str = ""
    """The last known primary."""
    policy: str = "local"
    """The commit policy of the log then."""
    peers: tuple[Peer, ...] = ()
    """The replicas of the log then."""
    trouble: Trouble | None = None
    divergences: Natural = 0
    """Number of divergences between its log and its primary's."""
    led_since: Natural = 0
    """The first term since which no other node has led; 0 for unknown."""
    cold: str = ""
    """The store of the log's cold tier; empty for none."""
    membership: Membership | None = None
    """The newest recorded members of the log; None until they were first changed: the settings are in force."""
    settled: bool = False
    """Whether ``committed`` covers everything that its readers were shown and, as the primary, everything acknowledged.

    True after a role ended cleanly, until more is shown.
    """
