"""The membership of a log on its primary: who may call as a replica, what commits need, and the change in progress."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import final

from strandline.errors import InvalidInput, NotReady
from strandline.model.node import Membership
from strandline.node.lead.policies import CommitPolicy, DurableOffsets, check_possible, watermark
from strandline.node.lead.replicas import ReplicaRegistry
from strandline.node.members.rules import (
    CancelChange,
    Change,
    begun,
    check_member,
    completed,
    is_spread,
    members_of,
    policies,
    policy_of,
    shown,
    urls,
)
from strandline.node.node_folder import NodeFolder
from strandline.node.options import NodeOptions

_LOGGER = logging.getLogger(__name__)


@final
class PrimaryMembership:
    """The members of a log as its primary has them, and the change in progress. Safe in threads.

    A record is durable here before it is in force, and before any replica gets it.
    """

    def __init__(self, node_folder: NodeFolder, options: NodeOptions, term: int, end: Callable[[], int]) -> None:
        """Go on with the recorded members; without any, the settings are in force. ``end`` is that of the log."""
        self._node_folder = node_folder
        self._options = options
        self._term = term
        self._end = end
        self._lock = threading.Lock()
        self._term_start = self._barrier = end()
        """The end of the log when the newest record came into force: what is below may be committed under the former
        policy alone."""
        self._held: dict[str, tuple[int, int]] = {}
        """The newest record that is durable on each replica."""
        self.policy = options.commit_policy if self.known is None else policy_of(self.known)
        """What an append waits for."""

    @property
    def known(self) -> Membership | None:
        """The recorded members; None if they were never changed."""
        return self._node_folder.state.membership

    def check(self, name: str) -> None:
        """``Fenced`` for a replica that is no member."""
        check_member(self.known, name)

    def check_possible(self, policy: CommitPolicy, offsets: DurableOffsets) -> None:
        """Refuse an append whose policy the replicas can never satisfy; ``NotReady`` if that may change soon."""
        try:
            check_possible(policy, offsets)
        except NotReady:
            raise
        except Exception as error:
            if self.known is not None and self.known.former is not None:
                raise NotReady(f"The members of the log are being changed: {error}") from error
            raise

    def strangers(self, registry: ReplicaRegistry) -> list[str]:
        """Replicas that are registered, and no members."""
        known = self.known
        return [] if known is None else [name for name in registry.replicas if name not in urls(known)]

    # --- a change ----------------------------------------------------------------------------------------------

    def begin(
        self, change: Change, registry: ReplicaRegistry, reached: int, *, force: bool
    ) -> tuple[Membership, Membership]:
        """Begin a change; returns the records before and after it, which are the same if there is nothing to change.

        ``NotReady`` unless the replicas that answer satisfy the policy after the change, and the present one, for
        everything below ``reached``: otherwise the change would hold up all commits. Also of an empty log they must
        have acknowledged a copy: if too few have one that counts, no election is ever decided.
        """
        with self._lock:
            before = self.known or self._at_start(registry)
            after = begun(before, change, term=self._term, primary=self._node_folder.state.name, force=force)
            if after is before:
                return before, before
            if not (force or isinstance(change, CancelChange)):
                self._check_caught_up(after, registry, reached)
            _LOGGER.info("The log changes its members: %s.", shown(after))
            self._install(after)
            return before, after

    def _at_start(self, registry: ReplicaRegistry) -> Membership:
        """The settings of the start as a record: number 0."""
        options, name = self._options, self._node_folder.state.name
        nodes = dict.fromkeys(registry.replicas, "") | {**options.nodes, name: options.url or ""}
        return Membership(0, 0, members_of(nodes, options.commit_policy))

    def _check_caught_up(self, after: Membership, registry: ReplicaRegistry, reached: int) -> None:
        answering = {name: each for name, each in registry.replicas.items() if each.healthy and not each.bootstrapping}
        name, end = self._node_folder.state.name, self._end()
        offsets = registry._replace(replicas=answering).durable_offsets(name, end, term_start=self._term_start)
        wanted, *former = policies(after)
        if not former or wanted != former[0]:
            try:
                check_possible(wanted, registry.durable_offsets(name, end))
            except InvalidInput as error:
                raise InvalidInput(
                    f"{error} Nothing was changed: start those replicas first. If they are lost for good, or are to be "
                    "added by this change, --force asks none of them."
                ) from error
        acknowledged = is_spread(after, offsets, answering)
        for policy in (wanted, *former):
            if not acknowledged or watermark(policy, offsets) < reached:
                raise NotReady(
                    f"The replicas that answer now have no copies of everything below offset {reached}, as {policy} "
                    "asks: nothing was changed. Wait until more of them follow ('strandline node topology'). If the "
                    "others are lost for good, --force leaves them out, with what only they have."
                )

    def _install(self, record: Membership) -> None:
        """Store a record, and let it be in force."""
        self._node_folder.remember(membership=record)
        self.policy = policy_of(record)
        # After that: whoever still used the former policy had read the end of the log before.
        self._barrier = self._end()

    def has(self, name: str, version: tuple[int, int]) -> None:
        """A replica has this record, or none of this term: it has just registered."""
        with self._lock:
            self._held[name] = version

    def complete(self, offsets: Callable[[], DurableOffsets]) -> bool:
        """End the change in progress if its record, and all from before it, is where it has to be; says whether.

        The log, too: records of the former policy may be on nodes that the new one does not count.
        """
        with self._lock:
            known = self.known
            if known is None or known.former is None:
                return False
            there = offsets()
            holders = {name for name, version in self._held.items() if version >= known.version}
            if not is_spread(known, there, holders) or watermark(self.policy, there) < self._barrier:
                return False
            done = completed(known, term=self._term)
            self._install(done)
            _LOGGER.info("The log has changed its members: %s.", shown(done))
            return True
