"""A change of members from outside, step by step: begin it, wait until it is complete, and let a new node vote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol, final

from strandline.errors import NotReady, TransientStorageError
from strandline.model.node import Membership
from strandline.node.lead.policies import Quorum, parse_policy
from strandline.node.members.rules import AddNode, CancelChange, Change, RemoveNode, SetPolicy, shown
from strandline.node.messages import Topology
from strandline.storage.clock import Clock

CHANGE_SECONDS: Final = 60.0
"""How long a change is waited for."""
_LOOK: Final = 0.1


class MembersApi(Protocol):
    """A primary, in this process or at an address."""

    def change_members(self, change: Change, *, force: bool = False) -> Membership:
        """Begin a change; returns the record that is in force."""

    def topology(self) -> Topology:
        """The log as its primary sees it."""


@final
class MemberChange:
    """Changes of the members of one log, waited for. ``NotReady`` after the timeout: the change goes on by itself."""

    def __init__(
        self,
        primary: MembersApi,
        clock: Clock,
        *,
        timeout: float = CHANGE_SECONDS,
        force: bool = False,
        progress: Callable[[str], object] = lambda _: None,
    ) -> None:
        """``progress`` is told what is waited for."""
        self._primary = primary
        self._clock = clock
        self._deadline = clock.monotonic() + timeout
        self._force = force
        self._progress = progress

    def add(self, name: str, url: str, *, vote: bool = True) -> Membership:
        """Add a node; with a quorum it votes once it has followed. Repeating it continues where that has stopped."""
        known = self._complete(AddNode(name, url))
        policy = parse_policy(known.members.policy)
        if not vote or not isinstance(policy, Quorum) or name in policy.voters:
            return known
        self._progress(f"{name} is a node of the log, and votes when it has caught up")
        while not self._follows(name):
            self._pause(
                f"{name} does not follow yet, and has no vote: start it, and repeat the command; see "
                "'strandline node topology'."
            )
        return self._complete(SetPolicy(str(Quorum(policy.voters | {name}))))

    def remove(self, name: str) -> Membership:
        """Remove a node, and its vote."""
        return self._complete(RemoveNode(name))

    def set_policy(self, policy: str) -> Membership:
        """Commit under another policy."""
        return self._complete(SetPolicy(policy))

    def cancel(self) -> Membership:
        """Take back the pending change."""
        return self._complete(CancelChange())

    def _follows(self, name: str) -> bool:
        """Whether a node has everything that was committed when it was asked."""
        seen = self._primary.topology()
        return any(
            each.name == name and each.healthy and (each.durable or 0) >= seen.committed for each in seen.members
        )

    def _complete(self, change: Change) -> Membership:
        begun = None
        while begun is None:
            try:
                begun = self._primary.change_members(change, force=self._force)
            except NotReady as error:
                self._pause(str(error))
        return self._ended(begun)

    def _ended(self, begun: Membership) -> Membership:
        """The record with which a change has ended, whichever node leads then."""
        known: Membership | None = begun
        while known is not None and known.former is not None:
            self._progress(f"waits until {shown(known)} is on enough nodes")
            self._pause(
                f"The change to {shown(known)} is not complete, and goes on by itself; until then commits need both. "
                "See 'strandline node topology', or take it back: 'strandline node policy URL --cancel'."
            )
            try:
                known = self._primary.topology().membership
            except (NotReady, TransientStorageError):  # another node may lead in a moment
                continue
        if known is None or replace(known, term=0, number=0) != replace(begun, term=0, number=0, former=None):
            raise NotReady("The change was lost with the primary that began it, or taken back: repeat the command.")
        return known

    def _pause(self, why: str) -> None:
        if self._clock.monotonic() >= self._deadline:
            raise NotReady(why)
        self._clock.sleep(_LOOK)
