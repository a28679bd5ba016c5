"""A node: a copy of the log, and one of two roles at a time, which the lease decides."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self, final

from strandline.log.wal.log import WalLog
from strandline.model.cursor import Cursor
from strandline.model.errors import Fenced, InvalidInput, NotReady, StorageError, StrandlineError
from strandline.model.head import WriterId
from strandline.model.records import RecordSource
from strandline.model.snapshot import Snapshot
from strandline.node.candidacy import Candidacy
from strandline.node.committed import Committed, Current
from strandline.node.contract import (
    Caller,
    Commit,
    Leading,
    Report,
    Status,
    Topology,
    Upstream,
)
from strandline.node.copy import KIND, LogCopy, export_log
from strandline.node.election import own_term
from strandline.node.gate import Gate
from strandline.node.home import Home
from strandline.node.options import NodeOptions
from strandline.node.policies import Quorum, parse_policy
from strandline.node.primary import PrimaryRole
from strandline.node.relay import Relay
from strandline.node.replica import Condition, ReplicaRole
from strandline.storage.ambient import CHANCE, CLOCK, Chance, Clock
from strandline.storage.lease import Lease, LeaseState
from strandline.storage.metrics import TERM

_LOGGER = logging.getLogger(__name__)
_RENEWALS: Final = 3
"""How often per term a lease is renewed."""
_LOOKS: Final = 8
"""How often per term a node that may take over looks at the lease."""


@final
class Node(Relay):
    """One copy of a log that leads or follows. Satisfies :class:`~strandline.node.contract.Served`.

    At no time do two nodes acknowledge writes: who leads holds the lease, and stops before it runs out. Who takes over
    has everything that was committed, or does not take over. One thread calls :meth:`step` again and again, or
    :meth:`run`; everything else may be called from any.
    """

    def __init__(
        self,
        home: Home,
        options: NodeOptions,
        *,
        connect: Callable[[str], Upstream],
        lease: Lease | None = None,
        background: bool = True,
        clock: Clock = CLOCK,
        chance: Chance = CHANCE,
    ) -> None:
        """Use :meth:`open`. ``connect`` reaches a node by its place."""
        if options.automatic and (lease is None or not isinstance(options.primary.policy, Quorum)):
            raise InvalidInput(
                "A node takes over by itself only with a lease and the policy quorum(...): with any other policy "
                "something that was acknowledged could be lost. Promote by hand, or configure both."
            )
        self.options = options
        self._home = home
        self._reach = connect
        self._lease = lease
        self._background = background
        self._clock = clock
        self._chance = chance
        self._turn = threading.RLock()
        """Held while something is done that depends on the role."""
        self._candidacy = Candidacy(home, options, connect)
        self._led: LogCopy | None = None
        """The copy that it leads with."""
        self._role: PrimaryRole | ReplicaRole = self._follower(self._open_copy() if home.state.generation else None)
        self._due = 0.0
        self._ticked = float("-inf")
        self._campaign_at = 0.0
        self._told_term = -1
        self._follow_at = 0.0
        """Until then a primary that could not be followed is left alone, whatever else there is to do."""

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
        lead: bool = False,
        background: bool = True,
        home: Home | None = None,
        clock: Clock = CLOCK,
        chance: Chance = CHANCE,
    ) -> Node:
        """Open the node in this folder. It follows whoever leads, unless nobody else can have led since it did.

        ``create`` begins a new log if this node has none; ``lead`` makes it the primary where there is no lease.
        """
        place = Home.open(folder, name) if home is None else home
        try:
            if create and not place.state.generation:
                _create_log(place, lease, clock=clock, chance=chance)
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
        return self._home.state.name

    @property
    def is_primary(self) -> bool:
        """Whether it leads at this moment."""
        return isinstance(self._role, PrimaryRole) and self._role.gate.is_open

    @property
    def condition(self) -> str:
        """What it is doing, in a word."""
        return "leading" if isinstance(self._role, PrimaryRole) else str(self._role.condition)

    @property
    def primary(self) -> PrimaryRole:
        """This node as the primary; ``NotReady`` if it is none."""
        role = self._role
        if not isinstance(role, PrimaryRole):
            known = self._home.state.primary
            raise NotReady(f"{self.name} is no primary: ask {known or 'another node'}.")
        return role

    @property
    def replica(self) -> ReplicaRole:
        """This node as a replica; ``NotReady`` if it is none."""
        role = self._role
        if not isinstance(role, ReplicaRole):
            raise NotReady(f"{self.name} is the primary, and no replica.")
        return role

    @property
    def home(self) -> Home:
        """Its folder."""
        return self._home

    @property
    def position(self) -> Cursor | None:
        """The cursor behind everything that it has durably; None while it has no copy of the log."""
        role = self._role
        copy = role.copy if isinstance(role, ReplicaRole) else self._copy
        return None if copy is None else copy.end()

    def _open_copy(self) -> LogCopy:
        return LogCopy(self._home, background=self._background, clock=self._clock, chance=self._chance)

    @property
    def _copy(self) -> LogCopy | None:
        """The copy of the log that it has, in either role."""
        role = self._role
        return role.copy if isinstance(role, ReplicaRole) else self._led

    def _follower(self, copy: LogCopy | None) -> ReplicaRole:
        self._follow_at = 0.0
        return ReplicaRole(
            self._home,
            copy,
            self._find_primary,
            region=self.options.region,
            poll_seconds=self.options.primary.poll_seconds,
            background=self._background,
            clock=self._clock,
            chance=self._chance,
        )

    def _find_primary(self) -> Upstream:
        url = self.options.upstream
        if self._lease is not None:
            state = self._lease.look()
            holder = None if state is None else state.holder
            name, _, url = ("", "", None) if holder is None else holder.partition(" ")
            if name == self.name:
                url = None  # an earlier run of this node
        if not url:
            raise NotReady(f"{self.name} knows of no primary now.")
        return self._reach(url)

    # --- one step ----------------------------------------------------------------------------------------------

    def run(self, stop: threading.Event) -> None:
        """Be this node until told to stop."""
        while not stop.is_set():
            pause = self.step()
            if pause > 0:
                self._clock.wait(stop, pause)

    def step(self) -> float:
        """Do the next thing in whichever role; returns how many seconds to leave it alone then."""
        with self._turn:
            if self._told_term != self._home.state.seen:
                self._told_term = self._home.state.seen
                TERM.labels(self.name).set(self._told_term)
            try:
                return self._step()
            except StorageError as error:
                # Its own disk refused something: it tries the same again, and does not end.
                _LOGGER.warning("Node %s could not go on: %s", self.name, error)
                return self.options.primary.poll_seconds

    def _step(self) -> float:
        if isinstance(self._role, PrimaryRole):
            return self._lead_on(self._role)
        if self._clock.monotonic() >= self._follow_at:
            self._follow_at = self._clock.monotonic() + self._role.step()
        pause = self._follow_at - self._clock.monotonic()
        if self._lease is not None and self._role.condition is not Condition.FOLLOWING:
            pause = min(pause, self._take_over())
        return max(0.0, pause)

    def _lead_on(self, primary: PrimaryRole) -> float:
        now = self._clock.boot()
        lease = self._lease
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
        if not primary.gate.is_open:
            self._step_down(primary, "its lease ran out")
            return 0.0
        pause = self.options.primary.poll_seconds
        if now - self._ticked >= pause:
            self._ticked = now
            try:
                primary.tick()
            except StrandlineError as error:
                _LOGGER.warning("Node %s could not keep house: %s", self.name, error)
        return max(0.0, min(pause, self._due - now)) if lease is not None else pause

    def _step_down(self, primary: PrimaryRole, why: str) -> None:
        primary.step_down(why)
        _LOGGER.warning("Node %s leads no more, after term %d.", self.name, primary.term)
        if self._lease is not None:
            self._lease.release()
        if self._led is not None:
            self._led.reopen()  # what was queued is written or refused, and a log that failed can be used again
        self._role = self._follower(self._led)

    # --- becoming the primary ----------------------------------------------------------------------------------

    def _take_over(self) -> float:
        """Become the primary if nobody is, and this node may; returns when to look again."""
        lease, now = self._lease, self._clock.boot()
        if lease is None or now < self._campaign_at:
            return self.options.primary.poll_seconds
        pause = lease.seconds / _LOOKS * (0.5 + self._chance.jitter())
        self._campaign_at = now + pause
        try:
            state = lease.look()
            if self._led_last(state) or (self.options.automatic and not self._is_behind()):
                self._campaign(lease, force=False)
        except StrandlineError as error:
            _LOGGER.info("Node %s does not lead: %s", self.name, error)
        return pause

    def _led_last(self, state: LeaseState | None) -> bool:
        """Whether nobody else can have led since this node did: its own term was the last that there was."""
        home = self._home.state
        if state is None:
            return home.generation > 0 and home.seen == 0  # it has just made the log
        holder = (state.holder or "").partition(" ")[0]
        if home.generation and holder == self.name and state.epoch == home.led + 1:
            # It got the lease, and ended before it led or could note that. Nobody else did in that term.
            home = self._home.remember(led=state.epoch)
        return home.led > 0 and state.epoch == home.led

    def _is_behind(self) -> bool:
        """Whether somebody who can be reached has more: then that one should lead, and the lease is left to it."""
        return self._candidacy.is_behind(self._report())

    def promote(self, *, force: bool = False) -> Topology:
        """Become the primary, if nothing committed can be lost by that; returns the new topology.

        With a lease, waits until the former primary's has run out. ``NotReady``, with the reason, if this node is not
        healthy, or another one has more, or too few can be asked to know; ``force`` leaves out those. Whatever this
        node has is what the log goes on from.
        """
        with self._turn:
            if isinstance(self._role, PrimaryRole):
                return self._role.topology(Caller(self.name, self._role.term))
            self._log()  # without a copy it would only get in the way of one that has it
            lease = self._lease
            if lease is None:
                primary = self._found(own_term(self.name, self.options.nodes, self._home.state.seen), None, force=force)
            else:
                patience = lease.seconds * 1.5
                deadline = self._clock.monotonic() + patience
                while not lease.try_acquire(above=self._home.state.seen):
                    if self._clock.monotonic() >= deadline:
                        state = lease.look()
                        holder = None if state is None else state.holder
                        raise NotReady(f"The lease is held by {holder} and renewed: stop that node first.")
                    self._clock.sleep(lease.seconds / _LOOKS)
                primary = self._found_leased(lease, force=force)
            return primary.topology(Caller(self.name, primary.term))

    def _campaign(self, lease: Lease, *, force: bool) -> None:
        if lease.try_acquire(above=self._home.state.seen):
            self._found_leased(lease, force=force)

    def _found_leased(self, lease: Lease, *, force: bool) -> PrimaryRole:
        term = lease.ensure()
        if self._home.state.generation and self._home.state.led == term - 1:
            # Noted first, or it would not go on from here if something stops it now. Until then it keeps the lease:
            # the holder's name tells the same.
            self._home.remember(led=term)
        try:
            return self._found(term, lease, force=force)
        except BaseException:
            lease.release()
            raise

    def _found(self, term: int, lease: Lease | None, *, force: bool) -> PrimaryRole:
        """Lead in this term, or say why not."""
        # Nobody else can have led since: there was no term in between.
        continues = lease is not None and self._home.state.led == term
        if self._copy is not None:
            self._copy.fence(term)
        mine = self._report()
        if not (continues and mine.unhealthy is None):
            self._candidacy.check(mine, force=force)
        return self._lead(term, lease)

    def _lead(self, term: int, lease: Lease | None) -> PrimaryRole:
        role, copy = self._role, self._copy
        if copy is None:
            raise NotReady(f"{self.name} has no copy of the log yet.")
        committed = 0
        if isinstance(role, ReplicaRole):
            role.close()
            committed = role.highest_committed
        self._home.remember(
            seen=term, adopted=term, led=term, committed=committed, primary=self.name,
            policy=str(self.options.primary.policy),
        )  # fmt: skip
        primary = PrimaryRole(
            self._home,
            copy.lead(),
            Gate(term, lease),
            self.options.primary,
            exports={KIND: self._export},
            clock=self._clock,
        )
        primary.gate.check("it does not lead")
        self._led, self._role = copy, primary
        self._due = self._clock.boot()
        _LOGGER.warning("Node %s leads in term %d from offset %d on.", self.name, term, primary.term_start)
        return primary

    def _lead_unleased(self) -> None:
        """Lead by configuration. Always in the term that it led in: a higher one is somebody else's."""
        home = self._home.state
        if home.seen > home.led:
            raise Fenced(
                f"{self.name} led in term {home.led} and has seen term {home.seen}: another node was promoted. Start "
                "this one as its replica."
            )
        with self._turn:
            self._lead(max(1, home.led), None)

    def _export(self, folder: str) -> Snapshot:
        return export_log(self._log(), folder, home=self._home, clock=self._clock, chance=self._chance)

    def _log(self) -> WalLog:
        if self._copy is None:
            raise NotReady(f"{self.name} has no copy of the log yet.")
        return self._copy.log

    def _report(self) -> Report:
        state, role = self._home.state, self._role
        durable = 0 if self._copy is None else self._copy.bounds().next
        trouble = None if state.trouble is None else state.trouble.state
        committed = role.highest_committed if isinstance(role, ReplicaRole) else role.committed
        adopted = 0 if self._copy is None else state.adopted
        return Report(state.name, state.seen, adopted, durable, max(committed, state.committed), trouble)

    # --- what it serves ----------------------------------------------------------------------------------------

    def _leading(self) -> Leading:
        return self.primary

    def append(
        self,
        records: RecordSource,
        *,
        append: tuple[WriterId, int] | None = None,
        policy: str | None = None,
        timeout: float = 5.0,
    ) -> Commit:
        """As the primary."""
        asked = None if policy is None else parse_policy(policy)
        return self.primary.append(records, append=append, policy=asked, timeout=timeout)

    def reading(self) -> Current:
        """The log as this node may show it, in either role and through changes of it: up to what is committed."""
        self._shown()  # raises if there is nothing to show yet
        return Current(self._shown)

    def _shown(self) -> Committed:
        return self._role.reading()

    def status(self) -> Status:
        """How it is, whatever its role."""
        condition, role, position = self.condition, self._role, self.position
        state = self._home.state  # after the condition, which is set behind its reason
        trouble = None if state.trouble is None else state.trouble.reason
        committed = 0 if position is None else role.committed
        return Status(state.name, condition, trouble, state.seen, state.primary, position, committed)

    def rebootstrap(self) -> None:
        """Build the copy of the log again, from a snapshot of the primary; the old one is read until that is there."""
        with self._turn:
            self.replica.rebootstrap()
            self._follow_at = 0.0

    def report(self, caller: Caller) -> Report:
        """What this node has; when this returns, nothing of a term below the caller's is applied or acknowledged."""
        role = self._role
        if caller.term > self._home.state.seen:
            if self._copy is not None:
                self._copy.fence(caller.term)
            else:
                self._home.remember(seen=caller.term)
            if isinstance(role, PrimaryRole):
                role.step_down(f"{caller.name} becomes the primary of term {caller.term}")
        return self._report()

    def close(self) -> None:
        """Stop leading or following, let others have the lease, and let go of the folder; closing twice is fine."""
        with self._turn:
            if isinstance(self._role, PrimaryRole):
                self._role.step_down("it was closed")
                if self._lease is not None:
                    self._lease.release()
            else:
                self._role.close()
            if self._copy is not None:
                self._copy.close()
            self._home.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _create_log(home: Home, lease: Lease | None, *, clock: Clock, chance: Chance) -> None:
    """Begin a new log on a node that has none; its first term is the next that there is."""
    state = None if lease is None else lease.look()
    if state is not None and state.epoch > home.state.led:
        raise InvalidInput(
            f"There has been a primary of this log before ({state.holder or 'released'}, term {state.epoch}): start "
            "this node without creating a log, and it follows. For another log, use another lease."
        )
    generation = home.next_generation()
    WalLog.open(home.data(generation), background=False, disk=home.disk, clock=clock, chance=chance).close()
    home.remember(generation=generation)
