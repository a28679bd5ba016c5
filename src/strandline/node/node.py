"""A node: a copy of the log in one of two roles, primary or replica, and the transitions between them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import final
from uuid import UUID

from strandline.errors import InvalidInput, NotReady, StorageError, StrandlineError
from strandline.log.contract import Slots
from strandline.log.wal.log import WalLog
from strandline.model.cursor import Cursor
from strandline.node.elect.candidacy import Candidacy
from strandline.node.elect.node_lease import Leadership, NodeLease
from strandline.node.lead.begin import begin_leading
from strandline.node.lead.committed_log import CommittedLog
from strandline.node.lead.primary import PrimaryRole
from strandline.node.lead.tiering import NodeColdTier
from strandline.node.members.rules import check_member
from strandline.node.messages import Caller, ElectionReport, NodeStatus, Topology, Upstream
from strandline.node.node_folder import NodeFolder
from strandline.node.options import NodeOptions
from strandline.node.replicate.log_copy import LogCopy, check_settings, create_log, take_over_log
from strandline.node.replicate.replica import Condition, ReplicaRole
from strandline.storage.closing import Closing
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.storage.lease import Lease
from strandline.tier.copy.rounds import Round
from strandline.tier.copy.tierer import Tierer
from strandline.tier.read.tiered_log import TieredLog

_LOGGER = logging.getLogger(__name__)


@bound_to_process()
@final
class Node(Closing):
    """One copy of a log that leads or follows.

    Two nodes never acknowledge writes at the same time: the primary holds the lease, and stops before it expires. A
    node takes over only if it has everything that was committed. One thread calls :meth:`step` in a loop, and all that
    changes the role; any thread may call the rest.
    """

    def __init__(
        self,
        node_folder: NodeFolder,
        options: NodeOptions,
        *,
        connect: Callable[[str], Upstream],
        lease: Lease | None = None,
        upstream: str | None = None,
        create: bool = False,
        take_over: str | None = None,
        lead: bool = False,
        open_cold: Callable[[str, UUID], NodeColdTier] | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        """Open the node in this folder. It follows the primary, unless no other node can have led since it did.

        ``connect`` reaches a node by its URL: without a lease, the ``upstream``. ``open_cold`` opens the cold tier of a
        log at an address. ``create`` begins a new log if this node has none, ``take_over`` one with the content of a
        write-ahead log; ``lead`` makes it the primary without a lease. A promotion waits for a lease until ``stop``.
        """
        with contextlib.ExitStack() as opened:
            opened.callback(node_folder.close)
            if take_over is not None and not node_folder.state.generation:
                take_over_log(node_folder, take_over, lease, options)
            if create and not node_folder.state.generation:
                create_log(node_folder, lease, content_type=options.content_type)
            self._candidacy = Candidacy(node_folder, options, connect)
            check_settings(node_folder, options)
            self.options = options
            self.node_folder = node_folder
            self._lease = None if lease is None else NodeLease(lease, node_folder, stop)
            self._reach, self.upstream, self._open_cold = connect, upstream, open_cold
            self._clock = node_folder.env.clock
            self._ticked = float("-inf")
            self.why_not_leading: str | None = None
            """Why its last attempt to lead failed; None if it succeeded, or there was none."""
            self.failure: BaseException | None = None
            """The error that ended its control thread: it is not stepped any more, and unhealthy."""
            self.tiering_trouble: str | None = None
            """Why its last round of tiering failed; None if it did not."""
            self._closed = False
            self._follow_at = 0.0
            """End of the back-off after a failed attempt to follow."""
            self._cold: NodeColdTier | None = None
            """The cold tier, once it was used."""
            self._opening_cold, self._tiering = threading.Lock(), threading.Lock()
            self._tierer: tuple[PrimaryRole, Tierer] | None = None
            """The tierer of a leadership."""
            state = node_folder.state
            copy = LogCopy(node_folder) if state.generation else None
            # Readers saw no more than the copy: if all of it is committed, the watermark covers that.
            knows = copy is not None and (state.settled or state.committed >= copy.log.bounds().extent)
            self._role: PrimaryRole | ReplicaRole = self._follower(copy, state.committed, knows_committed=knows)
            """The current role. One thread changes it, any thread reads it."""
            self._leadership: Leadership | None = None
            """The latest leadership, also one that is only beginning."""
            opened.callback(self.close)  # its log, too: another process may be waiting for it
            self.hot = CommittedLog(lambda: self._role.watermark.readable(), lambda: self.primary.slots)  # noqa: PLW0108 - of the role by then
            """The copy up to the commit watermark, through changes of role and copy; without the cold tier."""
            self._origin = Origin(f"The node in {node_folder.folder}", self)
            if lead and lease is None:
                self._candidacy.check_unleased(self._report())
                # By configuration, always in the same term: a higher one belongs to another node.
                self._lead(max(1, node_folder.state.led), continues=True)
            opened.pop_all()

    # --- the two roles -----------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The node's name."""
        return self.node_folder.state.name

    @property
    def is_primary(self) -> bool:
        """Whether it leads now."""
        return isinstance(self._role, PrimaryRole) and self._role.leadership.is_held

    @property
    def condition(self) -> str:
        """Its state in one word, such as leading or following."""
        role = self._role
        if self.failure is not None:
            return str(Condition.FAILED)
        if isinstance(role, ReplicaRole):
            return str(role.condition)
        return str(Condition.LEADING if role.leadership.is_held else Condition.CONNECTING)

    @property
    def trouble(self) -> str | None:
        """Why it has stopped until an operator acts, or None."""
        if self.failure is not None:
            return repr(self.failure)
        return None if (known := self.node_folder.state.trouble) is None else known.reason

    @property
    def primary(self) -> PrimaryRole:
        """This node as the primary; ``NotReady`` if it does not lead."""
        role = self._role
        if not isinstance(role, PrimaryRole):
            known = self.node_folder.state.primary
            raise NotReady(f"{self.name} is no primary: ask {known or 'another node'}.")
        return role

    @property
    def replica(self) -> ReplicaRole:
        """This node as a replica; ``NotReady`` if it leads."""
        role = self._role
        if not isinstance(role, ReplicaRole):
            raise NotReady(f"{self.name} is the primary, and no replica.")
        return role

    @property
    def knows_committed(self) -> bool:
        """Whether the commit watermark covers all that readers were ever shown; until then they get ``NotReady``."""
        return self._role.watermark.is_known

    @property
    def copy(self) -> LogCopy | None:
        """The copy of the log, in either role."""
        return self._role.copy

    @property
    def log(self) -> WalLog:
        """The copy's log; ``NotReady`` if there is none."""
        if self.copy is None:
            raise NotReady(f"{self.name} has no copy of the log yet: let it bootstrap from a primary first.")
        return self.copy.log

    @property
    def position(self) -> Cursor | None:
        """The cursor behind everything durable here; None while it has no copy of the log."""
        copy = self.copy
        return None if copy is None else copy.end()

    # --- one step ----------------------------------------------------------------------------------------------

    def step(self) -> float:
        """Do the next step of the current role; returns the pause before the one after, in seconds."""
        try:
            return self._step()
        except StorageError as error:
            # A local disk error: the next step retries.
            _LOGGER.warning("Node %s could not complete a step, and retries: %s", self.name, error)
            return self.options.poll_seconds

    def _step(self) -> float:
        if isinstance(self._role, PrimaryRole):
            return self._lead_on(self._role)
        if self._clock.monotonic() >= self._follow_at:
            self._follow_at = self._clock.monotonic() + self._role.step()
        pause = self._follow_at - self._clock.monotonic()
        if self._lease is not None and self._role.condition is not Condition.FOLLOWING:
            pause = min(pause, self._take_over(self._lease))
        return max(0.0, pause)

    def _lead_on(self, primary: PrimaryRole) -> float:
        now, lease = self._clock.boot(), self._lease
        lost = None if lease is None else lease.renew(now)
        if lost is not None:
            primary.step_down(lost)
        if primary.log.failed:
            primary.step_down("its log could not write")
        if not primary.leadership.is_held:
            self._step_down(primary, "its lease ran out")
            self._follow_at = 0.0
            return 0.0
        pause = self.options.poll_seconds
        if now - self._ticked >= pause:
            self._ticked = now
            try:
                primary.tick()
            except StrandlineError as error:
                _LOGGER.warning("Node %s failed in maintenance: %s", self.name, error)
        return pause if lease is None else max(0.0, min(pause, lease.renewal - now))

    # --- becoming the primary ----------------------------------------------------------------------------------

    def _take_over(self, lease: NodeLease) -> float:
        """Lead if there is no primary and this node may; returns the pause before the next check."""
        pause = lease.begin_check()
        if pause is None:
            return self.options.poll_seconds
        try:
            if lease.led_last():
                self._candidacy.check_newest(self._report())
            elif self.options.automatic:
                self._candidacy.check_able(self._report())
            else:
                return pause
            if lease.try_acquire():
                self._lead_elected(force=False)
        except StrandlineError as error:
            if str(error) != self.why_not_leading:
                _LOGGER.info("Node %s does not lead: %s", self.name, error)
            self.why_not_leading = str(error)
        return pause

    def promote(self, *, force: bool = False) -> Topology:
        """Become the primary if that loses nothing committed; returns the new topology.

        With a lease, waits until the former primary's lease has expired. ``NotReady``, with the reason, if this node is
        not healthy, another one has more records, or too few can be reached to know; ``force`` ignores nodes that
        cannot be reached. The log continues from this node's copy.
        """
        role = self._role
        if isinstance(role, PrimaryRole) and role.leadership.is_held:
            return role.topology(Caller(self.name, role.term))
        if isinstance(role, PrimaryRole):
            self._step_down(role, "it no longer leads")
        _ = self.log  # without a copy it must not take the lease from a node that has one
        # Nor may it take a term: the last primary could then lead only with a quorum, which a new log may lack.
        self._candidacy.check_own(self._report(), force=force)
        if self._lease is not None:
            self._lease.acquire()
        primary = self._lead_elected(force=force)
        return primary.topology(Caller(self.name, primary.term))

    def _follower(self, copy: LogCopy | None, committed: int, *, knows_committed: bool) -> ReplicaRole:
        return ReplicaRole(
            self.node_folder,
            copy,
            self._find_primary,
            self.options,
            committed=committed,
            knows_committed=knows_committed,
        )

    def _find_primary(self) -> Upstream:
        url = self.upstream if self._lease is None else self._lease.primary_url()
        if not url:
            raise NotReady(f"{self.name} knows of no primary now.")
        try:
            return self._reach(url)
        except InvalidInput:  # no address of a node that this one knows
            self._candidacy.learn()
            return self._reach(url)

    def _step_down(self, primary: PrimaryRole, why: str) -> None:
        """Stop leading, and follow."""
        primary.step_down(why)
        _LOGGER.warning("Node %s no longer leads, after term %d.", self.name, primary.term)
        if self._lease is not None:
            self._lease.lease.release()
        self._settle()
        committed, knows = primary.watermark.now, primary.watermark.is_known
        primary.copy.reopen()  # queued appends are written or refused, and a failed log is usable again
        self._role = self._follower(primary.copy, committed, knows_committed=knows)

    def _settle(self) -> None:
        """Store the watermark up to which readers were shown records, at the end of a role.

        If that fails, the node serves no reads after a restart until a primary sends it the watermark.
        """
        role = self._role
        committed = role.watermark.now if isinstance(role, PrimaryRole) else role.watermark.shown
        try:
            self.node_folder.remember(committed=committed, settled=role.watermark.is_known)
        except StorageError as error:
            _LOGGER.warning("Node %s could not store its watermark: %s", self.name, error)

    def _lead_elected(self, *, force: bool) -> PrimaryRole:
        """Lead in the lease's term, or without one in its own next; raises, and releases the lease, if it must not."""
        lease = self._lease
        term = self._candidacy.own_term() if lease is None else lease.ensure_term()
        try:
            # There was no term in between: no other node can have led.
            continues = lease is not None and self.node_folder.state.led == term
            if self.copy is not None:
                self.copy.fence(term, "The lease" if lease is not None else self.name)
            mine = self._report()
            if not (continues and mine.unhealthy is None):
                self._candidacy.check(mine, force=force)
            return self._lead(term, continues=continues)
        except BaseException:
            if lease is not None:
                lease.lease.release()
            raise

    def _lead(self, term: int, *, continues: bool) -> PrimaryRole:
        """Lead in this term; the caller has checked that no committed record is missing here.

        ``continues``: no other node can have led since this node did.
        """
        self._leadership = leadership = Leadership(term, None if self._lease is None else self._lease.lease)
        if (seen := self.node_folder.state.seen) > term:  # reports from here on end it themselves
            leadership.end(f"another node becomes the primary of term {seen}")
        primary = begin_leading(self.node_folder, self.replica, leadership, self.options, continues=continues)
        self._role = primary
        if self._lease is not None:
            self._lease.renewal = self._clock.boot()  # due at once
        self.why_not_leading = None
        _LOGGER.info("Node %s leads in term %d from offset %d on.", self.name, primary.term, primary.term_start)
        return primary

    # --- service -----------------------------------------------------------------------------------------------

    def reading(self) -> CommittedLog | TieredLog:
        """The log up to the commit watermark, over both tiers, in either role and through changes of it."""
        self._role.watermark.readable()  # raises if there is nothing to show yet
        cold = self._cold_tier()
        return self.hot if cold is None else cold.log(self.hot, self._leads)

    def _leads(self) -> PrimaryRole | None:
        return role if isinstance(role := self._role, PrimaryRole) else None

    def _cold_tier(self) -> NodeColdTier | None:
        """The log's cold tier; None if it has none, or this node has no copy of the log yet."""
        url, copy = self.node_folder.state.cold, self.copy
        if not url or copy is None or self._open_cold is None:
            return None
        with self._opening_cold:
            if self._cold is None or self._cold.log_id != copy.log.log_id:
                self._cold = self._open_cold(url, copy.log.log_id)
            return self._cold

    @property
    def slots(self) -> Slots:
        """The slots of consumers, which the primary has; ``NotReady`` on a node that does not lead."""
        primary, cold = self.primary, self._cold_tier()
        return primary.slots if cold is None else cold.slots(primary, cold.log(self.hot, self._leads))

    def tier(
        self, *, everything: bool = False, sweep: bool = True, stop: threading.Event | None = None
    ) -> Round | None:
        """One round of tiering, if this node leads a log with a cold tier; raises as ``Tierer.run_once`` does.

        Any thread may call it; the node is stepped meanwhile.
        """
        with self._tiering:
            primary, cold = self._leads(), self._cold_tier()
            if cold is None or primary is None or not primary.leadership.is_held:
                return None
            if self._tierer is None or self._tierer[0] is not primary:
                self._tierer = primary, cold.tierer(primary)
            return self._tierer[1].run_once(everything=everything, sweep=sweep, stop=stop)

    def status(self) -> NodeStatus:
        """State, in either role."""
        condition, role, position = self.condition, self._role, self.position
        state = self.node_folder.state  # read after the condition: the reason is set first
        committed = role.committed if role.watermark.is_known and position is not None else None
        if isinstance(role, ReplicaRole):
            divergences = state.divergences
        else:
            divergences = sum(each.divergences for each in role.registry.replicas.values())
        return NodeStatus(
            state.name, condition, self.trouble, state.seen, state.primary, position, committed, divergences,
            self.tiering_trouble, state.membership,
        )  # fmt: skip

    def rebootstrap(self) -> None:
        """Rebuild the copy from a snapshot of the primary; the old one serves reads until then."""
        self.replica.rebootstrap()
        self._follow_at = 0.0

    def report(self, caller: Caller) -> ElectionReport:
        """The node's election report. Once this returns, it applies and acknowledges no record of a lower term.

        ``Fenced`` for the term of a node that is no member; without one it is told, and learns that.
        """
        if caller.term and caller.name:
            check_member(self.node_folder.state.membership, caller.name)
        if caller.term > self.node_folder.state.seen:
            adopt = self.node_folder.adopt_term if self.copy is None else self.copy.fence
            adopt(caller.term, caller.name)
            why = f"{caller.name} becomes the primary of term {caller.term}"
            if (leadership := self._leadership) is not None and leadership.term < caller.term:
                leadership.end(why)  # also one whose role is only beginning
                if isinstance(role := self._role, PrimaryRole):
                    role.step_down(why)
        return self._report()

    def _report(self) -> ElectionReport:
        """This node's report for elections."""
        role = self._role
        committed = role.watermark.highest if isinstance(role, ReplicaRole) else role.watermark.now
        state, copy = self.node_folder.state, self.copy
        durable, adopted = (0, 0) if copy is None else (copy.log.bounds().extent, state.adopted)
        failed = None if self.failure is None else str(Condition.FAILED)
        unhealthy = failed if state.trouble is None else state.trouble.state
        # Read last: a record that this node has acknowledged to a primary before it saw the caller's term is in here.
        known = self.node_folder.state.membership
        committed = max(committed, state.committed)
        return ElectionReport(state.name, state.seen, adopted, durable, committed, unhealthy, known)

    def close(self) -> None:
        """Stop leading or following, release the lease and the folder. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if isinstance(self._role, PrimaryRole):
            self._role.step_down("it was closed")
            if self._lease is not None:
                self._lease.lease.release()
        else:
            self._role.disconnect()  # the copy is closed below
        self._settle()
        if self._cold is not None:
            self._cold.close()
        if self.copy is not None:
            self.copy.close()
        self.node_folder.close()
