"""A node: a copy of the log in one of two roles, primary or replica."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self, final

from strandline.errors import Fenced, InvalidInput, NotReady, StorageError, StrandlineError
from strandline.model.cursor import Cursor
from strandline.node.elect.election import own_term
from strandline.node.lead.committed_log import CommittedLog, ReadableLog
from strandline.node.lead.policies import Quorum
from strandline.node.lead.primary import PrimaryRole
from strandline.node.messages import Caller, ElectionReport, NodeStatus, Topology, Upstream
from strandline.node.node_folder import NodeFolder
from strandline.node.options import NodeOptions
from strandline.node.replicate.replica import Condition, ReplicaRole
from strandline.node.roles import Roles, create_log, take_over_log
from strandline.storage.clock import CHANCE, CLOCK, Chance, Clock
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.storage.lease import Lease, LeaseState
from strandline.storage.metrics import TERM

_LOGGER = logging.getLogger(__name__)
_RENEWALS: Final = 3
"""Renewals per lease period."""
_LOOKS: Final = 8
"""Checks of the lease per lease period by a node that may take over."""


@bound_to_process()
@final
class Node:
    """One copy of a log that leads or follows. Satisfies :class:`~strandline.node.messages.NodeService`.

    Two nodes never acknowledge writes at the same time: the primary holds the lease, and stops before it expires. A
    node takes over only if it has everything that was committed. One thread calls :meth:`step` in a loop, or
    :meth:`run`; any thread may call the rest.
    """

    def __init__(
        self,
        node_folder: NodeFolder,
        options: NodeOptions,
        *,
        connect: Callable[[str], Upstream],
        lease: Lease | None = None,
        background: bool = True,
        clock: Clock = CLOCK,
        chance: Chance = CHANCE,
    ) -> None:
        """Use :meth:`open`. ``connect`` reaches a node by its URL."""
        if options.automatic and (lease is None or not isinstance(options.commit_policy, Quorum)):
            raise InvalidInput(
                "A node takes over by itself only with a lease and the policy quorum(...): with any other policy "
                "something that was acknowledged could be lost. Promote by hand, or configure both."
            )
        self.options = options
        self._node_folder = node_folder
        self._clock = clock
        self._chance = chance
        self._turn = threading.RLock()
        """Held while a call depends on the role."""
        self._roles = Roles(
            node_folder, options, connect=connect, lease=lease, background=background, clock=clock, chance=chance
        )
        self._due = 0.0
        self._ticked = float("-inf")
        self._campaign_at = 0.0
        self._told_term = -1
        self.hindrance: str | None = None
        """Why its last attempt to lead failed; None if it succeeded, or there was none."""
        self._closed = False
        self._follow_at = 0.0
        """End of the back-off after a failed attempt to follow."""
        self._origin = Origin(f"The node in {node_folder.folder}", self)

    @classmethod
    def open(
        cls,
        folder: str,
        name: str,
        options: NodeOptions,
        *,
        connect: Callable[[str], Upstream],
        lease: Lease | None = None,
        create: bool = False,
        take_over: str | None = None,
        lead: bool = False,
        background: bool = True,
        node_folder: NodeFolder | None = None,
        clock: Clock = CLOCK,
        chance: Chance = CHANCE,
    ) -> Node:
        """Open the node in this folder. It follows the primary, unless nobody else can have led since it did.

        ``create`` begins a new log if this node has none, ``take_over`` one with the content of a write-ahead log;
        ``lead`` makes it the primary where there is no lease.
        """
        place = NodeFolder.open(folder, name) if node_folder is None else node_folder
        try:
            if take_over is not None and not place.state.generation:
                take_over_log(place, take_over, lease, clock=clock, chance=chance)
            if create and not place.state.generation:
                create_log(place, lease, clock=clock, chance=chance)
            node = cls(place, options, connect=connect, lease=lease, background=background, clock=clock, chance=chance)
            if lead and lease is None:
                node._lead_unleased()
        except BaseException:
            place.close()
            raise
        return node

    # --- the two roles -----------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The node's name."""
        return self._node_folder.state.name

    @property
    def is_primary(self) -> bool:
        """Whether it leads now."""
        return isinstance(self._roles.now, PrimaryRole) and self._roles.now.leadership.is_held

    @property
    def condition(self) -> str:
        """Its state in a word, such as leading or following."""
        role = self._roles.now
        if isinstance(role, PrimaryRole):
            return "leading" if role.leadership.is_held else str(Condition.CONNECTING)
        return str(role.condition)

    @property
    def primary(self) -> PrimaryRole:
        """This node as the primary; ``NotReady`` if it does not lead."""
        role = self._roles.now
        if not isinstance(role, PrimaryRole):
            known = self._node_folder.state.primary
            raise NotReady(f"{self.name} is no primary: ask {known or 'another node'}.")
        return role

    @property
    def replica(self) -> ReplicaRole:
        """This node as a replica; ``NotReady`` if it leads."""
        role = self._roles.now
        if not isinstance(role, ReplicaRole):
            raise NotReady(f"{self.name} is the primary, and no replica.")
        return role

    @property
    def knows_committed(self) -> bool:
        """Whether the commit watermark covers all that readers were ever shown; until then they get ``NotReady``."""
        return self._roles.now.knows_committed

    @property
    def node_folder(self) -> NodeFolder:
        """Its folder."""
        return self._node_folder

    @property
    def position(self) -> Cursor | None:
        """The cursor behind everything durable here; None while it has no copy of the log."""
        copy = self._roles.copy
        return None if copy is None else copy.end()

    # --- one step ----------------------------------------------------------------------------------------------

    def run(self, stop: threading.Event) -> None:
        """Step until ``stop`` is set."""
        while not stop.is_set():
            pause = self.step()
            if pause > 0:
                self._clock.wait(stop, pause)

    def step(self) -> float:
        """Do the next step of the current role; returns the pause before the one after, in seconds."""
        with self._turn:
            if self._told_term != self._node_folder.state.seen:
                self._told_term = self._node_folder.state.seen
                TERM.labels(self.name).set(self._told_term)
            try:
                return self._step()
            except StorageError as error:
                # A local disk error: the next step retries.
                _LOGGER.warning("Node %s could not go on: %s", self.name, error)
                return self.options.poll_seconds

    def _step(self) -> float:
        if isinstance(self._roles.now, PrimaryRole):
            return self._lead_on(self._roles.now)
        if self._clock.monotonic() >= self._follow_at:
            self._follow_at = self._clock.monotonic() + self._roles.now.step()
        pause = self._follow_at - self._clock.monotonic()
        if self._roles.lease is not None and self._roles.now.condition is not Condition.FOLLOWING:
            pause = min(pause, self._take_over())
        return max(0.0, pause)

    def _lead_on(self, primary: PrimaryRole) -> float:
        now = self._clock.boot()
        lease = self._roles.lease
        if lease is not None and now >= self._due:
            self._due = now + lease.seconds / _RENEWALS
            try:
                lease.renew()
            except Fenced as error:
                primary.step_down(str(error))
            except StorageError as error:
                self._due = now + lease.seconds / _LOOKS  # what is held runs out if this goes on
                _LOGGER.warning("Node %s could not renew its lease: %s", self.name, error)
        if primary.log.failed:
            primary.step_down("its log could not write")
        if not primary.leadership.is_held:
            self._roles.step_down(primary, "its lease ran out")
            self._follow_at = 0.0
            return 0.0
        pause = self.options.poll_seconds
        if now - self._ticked >= pause:
            self._ticked = now
            try:
                primary.tick()
            except StrandlineError as error:
                _LOGGER.warning("Node %s failed in maintenance: %s", self.name, error)
        return max(0.0, min(pause, self._due - now)) if lease is not None else pause

    # --- becoming the primary ----------------------------------------------------------------------------------

    def _take_over(self) -> float:
        """Lead if there is no primary and this node may; returns the pause before the next check."""
        lease, now = self._roles.lease, self._clock.boot()
        if lease is None or now < self._campaign_at:
            return self.options.poll_seconds
        pause = lease.seconds / _LOOKS * (0.5 + self._chance.jitter())
        self._campaign_at = now + pause
        try:
            state = lease.look()
            may_lead = self._led_last(state)
            if may_lead:
                self._roles.check_newest()
            elif self.options.automatic:
                may_lead = not self._roles.is_behind()
            if may_lead and lease.try_acquire(above=self._node_folder.state.seen):
                self._leads(self._roles.lead_leased(lease, force=False))
        except StrandlineError as error:
            self.hindrance = str(error)
            _LOGGER.info("Node %s does not lead: %s", self.name, error)
        return pause

    def _led_last(self, state: LeaseState | None) -> bool:
        """Whether no other node can have led since this one did: its term was the last."""
        own = self._node_folder.state
        if state is None:
            # It has just created the log, or taken it over.
            return own.generation > 0 and own.seen == own.led and not own.primary
        holder = (state.holder or "").partition(" ")[0]
        if own.generation and holder == self.name and state.epoch == own.led + 1:
            # It acquired the lease, and crashed before it stored that. Nobody else led in that term.
            own = self._node_folder.remember(led=state.epoch)
        return own.led > 0 and state.epoch == own.led

    def promote(self, *, force: bool = False) -> Topology:
        """Become the primary if that loses nothing committed; returns the new topology.

        With a lease, waits until the former primary's has expired. ``NotReady``, with the reason, if this node is not
        healthy, another one has more, or too few can be reached to know; ``force`` ignores nodes that cannot be
        reached. The log continues from what this node has.
        """
        with self._turn:
            role = self._roles.now
            if isinstance(role, PrimaryRole) and role.leadership.is_held:
                return role.topology(Caller(self.name, role.term))
            if isinstance(role, PrimaryRole):
                self._roles.step_down(role, "it leads no more")
            self._roles.log()  # without a copy it must not take the lease from a node that has one
            lease = self._roles.lease
            if lease is None:
                term = own_term(self.name, self.options.nodes, self._node_folder.state.seen)
                primary = self._roles.lead_checked(term, None, force=force)
            else:
                patience = lease.seconds * 1.5
                deadline = self._clock.monotonic() + patience
                while not lease.try_acquire(above=self._node_folder.state.seen):
                    if self._clock.monotonic() >= deadline:
                        state = lease.look()
                        holder = None if state is None else state.holder
                        raise NotReady(f"The lease is held by {holder} and renewed: stop that node first.")
                    self._clock.sleep(lease.seconds / _LOOKS)
                primary = self._roles.lead_leased(lease, force=force)
            self._leads(primary)
            return primary.topology(Caller(self.name, primary.term))

    def _lead_unleased(self) -> None:
        """Lead by configuration, always in the term that it led in: a higher one is another node's."""
        own = self._node_folder.state
        if own.seen > own.led:
            raise Fenced(
                f"{self.name} led in term {own.led} and has seen term {own.seen}: another node was promoted. Start "
                "this one as its replica; or, if no other node leads, let it forget that term first ('strandline node "
                "reset-term')."
            )
        with self._turn:
            self._roles.check_newest()
            self._leads(self._roles.lead(max(1, own.led), None, continues=True))

    def _leads(self, primary: PrimaryRole) -> None:
        self._due, self.hindrance = self._clock.boot(), None
        _LOGGER.warning("Node %s leads in term %d from offset %d on.", self.name, primary.term, primary.term_start)

    # --- service -----------------------------------------------------------------------------------------------

    def reading(self) -> CommittedLog:
        """The log up to the commit watermark, in either role and through changes of it."""
        self._readable()  # raises if there is nothing to show yet
        return CommittedLog(self._readable)

    def _readable(self) -> ReadableLog:
        return self._roles.now.readable()

    def status(self) -> NodeStatus:
        """State, in either role."""
        condition, role, position = self.condition, self._roles.now, self.position
        state = self._node_folder.state  # read after the condition, which is set after its reason
        trouble = None if state.trouble is None else state.trouble.reason
        committed = role.committed if role.knows_committed and position is not None else None
        divergences = state.divergences
        if isinstance(role, PrimaryRole):
            divergences = sum(each.divergences for each in role.registry.replicas.values())
        return NodeStatus(state.name, condition, trouble, state.seen, state.primary, position, committed, divergences)

    def rebootstrap(self) -> None:
        """Rebuild the copy from a snapshot of the primary; the old one serves reads until then."""
        with self._turn:
            self.replica.rebootstrap()
            self._follow_at = 0.0

    def report(self, caller: Caller) -> ElectionReport:
        """What this node has; once this returns, it applies and acknowledges nothing below the caller's term."""
        role = self._roles.now
        if caller.term > self._node_folder.state.seen:
            if self._roles.copy is not None:
                self._roles.copy.fence(caller.term, caller.name)
            else:
                self._node_folder.hear_term(caller.term, caller.name)
            if isinstance(role, PrimaryRole):
                role.step_down(f"{caller.name} becomes the primary of term {caller.term}")
        return self._roles.report()

    def close(self) -> None:
        """Stop leading or following, release the lease and the folder. Idempotent."""
        with self._turn:
            if self._closed:
                return
            self._closed = True
            if isinstance(self._roles.now, PrimaryRole):
                self._roles.now.step_down("it was closed")
                if self._roles.lease is not None:
                    self._roles.lease.release()
            else:
                self._roles.now.close()
            self._roles.settle()
            if self._roles.copy is not None:
                self._roles.copy.close()
            self._node_folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
