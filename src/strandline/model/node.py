"""What a primary says of itself, and what a node remembers of itself across restarts, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple


class Heartbeat(NamedTuple):
    """A primary's word on how far it is; comes with every batch, and about once a poll interval without any."""

    term: int
    term_start: int
    durable: int
    committed: int
    epoch: int
    """The topology's."""


NO_HEARTBEAT: Final = Heartbeat(0, 0, 0, 0, 0)
"""Of who is no primary."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a replica does not follow until somebody deals with it."""

    state: str
    """Its name, such as ``diverged``."""
    reason: str
    at: int
    """When it was found, in microseconds."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A replica of the log, as its primary last told."""

    name: str
    region: str | None = None
    divergences: int = 0
    """How many it has reported so far."""


@dataclass(frozen=True, slots=True)
class NodeState:
    """What must survive a restart of a node, since others were told of it or because forgetting it would be wrong."""

    name: str
    generation: int = 0
    """Which of its data folders is the one in use; 0 for none yet."""
    seen: int = 0
    """The highest term that it has heard of: lower ones are refused."""
    adopted: int = 0
    """The highest term whose beginning is all in its log."""
    led: int = 0
    """The last term in which it was the primary; 0 for never."""
    committed: int = 0
    """A watermark that it has heard of; written lazily, so that the highest may be above."""
    primary: str = ""
    """Who the primary was, when it last heard of one."""
    policy: str = "local"
    """The commit policy of the log then."""
    peers: tuple[Peer, ...] = ()
    """The replicas of the log then."""
    trouble: Trouble | None = None
    divergences: int = 0
    """How often it stopped, since its log and its primary's had parted."""
    led_since: int = 0
    """The first term from which on nobody else has led; 0 for unknown."""
    settled: bool = False
    """Whether ``committed`` is all that its readers were shown and, as the primary, all that it acknowledged.

    So after a role ended in order, and until more is shown.
    """
