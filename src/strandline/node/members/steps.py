"""A change of members from outside, step by step: begin it, wait until it is complete, and let a new node vote."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeVar, final

from strandline.errors import NotReady, TransientStorageError
from strandline.model.arguments import Timeout, checked
from strandline.model.node import Membership
from strandline.node.lead.policies import Quorum, parse_policy
from strandline.node.members.rules import AddNode, CancelChange, Change, RemoveNode, SetPolicy, is_in_force, shown
from strandline.node.messages import Topology
from strandline.storage.env import Env

T = TypeVar("T")

CHANGE_SECONDS: Final = 60.0
"""How long a change is waited for."""
_LOOK: Final = 0.1


@checked
class MembersApi(ABC):
    """A primary, in this process or at an address, that changes the members of its log."""

    _env: Env

    @abstractmethod
    def change_members(self, change: Change, *, force: bool = False) -> Membership:
        """Begin a change of the log's members, without waiting; returns the record that is in force then."""

    @abstractmethod
    def topology(self) -> Topology:
        """The replicas of the log with their offsets."""

    def add_node(self, name: str, url: str, *, vote: bool = True, timeout: Timeout = CHANGE_SECONDS) -> Membership:
        """Add a node to the log, and wait; with a quorum it votes once it has followed, unless told otherwise.

        ``NotReady`` after the timeout: the change goes on, and until it is complete commits need both policies.
        """
        return MemberChange(self, self._env, timeout=timeout).add(name, url, vote=vote)

    def remove_node(self, name: str, *, timeout: Timeout = CHANGE_SECONDS) -> Membership:
        """Remove a node from the log, and its vote, and wait until it counts no longer."""
        return MemberChange(self, self._env, timeout=timeout).complete(RemoveNode(name))

    def set_policy(self, policy: str, *, timeout: Timeout = CHANGE_SECONDS) -> Membership:
        """Change the commit policy of the log, and wait until only the new one is in force."""
        return MemberChange(self, self._env, timeout=timeout).complete(SetPolicy(policy))


@final
class MemberChange:
    """Changes of the members of one log, waited for. ``NotReady`` after the timeout: the change goes on by itself."""

    def __init__(
        self,
        primary: MembersApi,
        env: Env,
        *,
        timeout: float = CHANGE_SECONDS,
        force: bool = False,
        progress: Callable[[str], object] = lambda _: None,
    ) -> None:
        """``progress`` is told what is waited for."""
        self._primary = primary
        self._clock = env.clock
        self._deadline = env.clock.monotonic() + timeout
        self._force = force
        self._progress = progress

    def add(self, name: str, url: str, *, vote: bool = True) -> Membership:
        """Add a node; with a quorum it votes once it has followed. Repeating it continues where that has stopped."""
        known = self.complete(AddNode(name, url))
        while vote:
            seen = self._asked(self._primary.topology)
            known = seen.membership or known  # others may change the voters meanwhile
            policy = parse_policy(known.members.policy)
            if not isinstance(policy, Quorum) or name in policy.voters:
                break
            self._progress(f"{name} is a node of the log, and votes when it has caught up")
            follows = any(  # has everything that was committed when the primary was asked
                each.name == name and each.healthy and (each.durable or 0) >= seen.committed for each in seen.members
            )
            if known.former is None and follows:
                return self.complete(SetPolicy(str(Quorum(policy.voters | {name}))))
            self._pause(
                f"{name} does not follow yet, and has no vote: start it, and repeat the command; see "
                "'strandline node topology'."
            )
        return known

    def cancel(self) -> Membership:
        """Take back the pending change; one that is being taken back already is waited for."""
        known = self._asked(self._primary.topology).membership
        return self.complete(CancelChange(*((0, 0) if known is None else known.takes_back or known.version)))

    def complete(self, change: Change) -> Membership:
        """Begin a change, and wait; the record that is in force then, whichever node leads."""
        begun = known = self._asked(lambda: self._primary.change_members(change, force=self._force))
        while _is_pending(begun, known):
            self._progress(f"waits until {shown(known)} is on enough nodes")
            self._pause(
                f"The change to {shown(known)} is not complete, and goes on by itself; until then commits need both. "
                "See 'strandline node topology', or take it back: 'strandline node policy URL --cancel'."
            )
            with contextlib.suppress(NotReady, TransientStorageError):  # another node may lead in a moment
                known = self._primary.topology().membership or Membership(0, 0, begun.former or begun.members)
        if not is_in_force(change, begun, known):
            raise NotReady(
                "The change is not in force: it was lost with the primary that began it, taken back, or followed by "
                f"another one. Now it is {shown(known)}: repeat the command if you still want the change."
            )
        return known

    def _asked(self, ask: Callable[[], T]) -> T:
        while True:
            try:
                return ask()
            except NotReady as error:
                self._pause(str(error))

    def _pause(self, why: str) -> None:
        if self._clock.monotonic() >= self._deadline:
            raise NotReady(why)
        self._clock.sleep(_LOOK)


def _is_pending(begun: Membership, known: Membership) -> bool:
    """Whether the change that a record began goes on; a new primary gives the record its own term and number."""
    return known.former is not None and replace(known, term=begun.term, number=begun.number) == begun
