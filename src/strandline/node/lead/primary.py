"""The primary role: orders records, tracks its replicas, and decides what is committed."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import Final, final

from strandline.errors import CommitTimedOut, ExpectationFailed, Fenced, LogClosed, NotFound, Overloaded, Sealed
from strandline.log.slots.resume import Cause, FullRebootstrap, PartialResync, plan_resume
from strandline.model.cursor import Cursor
from strandline.model.head import WriterId, WriterState
from strandline.model.node import Heartbeat, Membership, Peer
from strandline.model.records import RecordSource
from strandline.node.elect.node_lease import Leadership
from strandline.node.lead.bootstrap_snapshots import BootstrapSnapshots
from strandline.node.lead.commit_watermark import CommitHandle, CommitWatermark
from strandline.node.lead.feed import LogFeed
from strandline.node.lead.membership import PrimaryMembership
from strandline.node.lead.policies import CommitPolicy, flow_delay, nth_highest, strengthened
from strandline.node.lead.replicas import ReplicaRegistry, Replicas
from strandline.node.lead.slots import ConsumerSlots, PrimaryMetrics, node_slots
from strandline.node.members.rules import Change
from strandline.node.messages import (
    Acknowledgement,
    Caller,
    Commit,
    Handover,
    NodeSlots,
    Registration,
    ReplicaProgress,
    Resume,
    SnapshotChunk,
    SnapshotOffer,
    Topology,
)
from strandline.node.node_folder import NodeFolder
from strandline.node.options import NodeOptions
from strandline.node.replicate.divergence import agreement
from strandline.node.replicate.log_copy import LogCopy
from strandline.storage.metrics import PARTIAL_RESYNCS, REBOOTSTRAPS

COMMIT_SECONDS: Final = 5.0
"""Default time that an append waits for its commit policy."""


@final
class PrimaryRole:
    """A log whose appends are committed under a commit policy. Safe in threads.

    An append is acknowledged only if this node led before it was written, and still leads when it is durable here and
    the policy is satisfied. Opened by :class:`~strandline.node.node.Node`.
    """

    def __init__(
        self,
        node_folder: NodeFolder,
        copy: LogCopy,
        leadership: Leadership,
        options: NodeOptions,
        *,
        settled: bool = False,
    ) -> None:
        """Lead the log of this copy from its end on; the caller has checked that no committed record is missing.

        ``settled``: nothing above the stored watermark can have been acknowledged before.
        """
        self.copy = copy
        self.log = log = copy.log
        self.leadership = leadership
        self.options = options
        self.term_start = log.bounds().extent
        self._node_folder = node_folder
        self.membership = PrimaryMembership(node_folder, options, leadership.term, lambda: log.bounds().extent)
        """The members of the log, and its commit policy."""
        self._clock = node_folder.env.clock
        self._bootstrap_snapshots = BootstrapSnapshots(node_folder, log)
        self._metrics = PrimaryMetrics(log)
        peers = [peer for peer in node_folder.state.peers if peer.name != node_folder.state.name]
        self.replicas = Replicas(log, peers, self._remember, env=node_folder.env)
        self.watermark = CommitWatermark(
            log, self.name, self.membership, self.replicas, known=node_folder.state.committed, settled=settled
        )
        self._reached = self.term_start
        """The watermark as of the last heartbeat interval."""

    @property
    def name(self) -> str:
        """The node's name."""
        return self._node_folder.state.name

    @property
    def term(self) -> int:
        """The term of its leadership."""
        return self.leadership.term

    @property
    def slots(self) -> ConsumerSlots:
        """The slots of consumers."""
        return ConsumerSlots(self.log.slots, self.leadership)

    def slot_lags(self) -> NodeSlots:
        """All slots, of consumers, replicas and the tierer: what each pins, in records, bytes and seconds."""
        self.leadership.check("its slots may be others now")
        self.replicas.move_slots()
        return node_slots(self.log, self.options, committed=self.committed, now=self._clock.now())

    def handover(self, caller: Caller, *, membership: tuple[int, int] = (0, 0)) -> Handover:
        """State that a registered replica needs beside its copy of the log, to become the primary.

        ``membership`` is the version of the members' record that is durable there.
        """
        self._check_replica(caller)
        self.replicas.now.replica(caller.name)  # one that was removed must not learn the next key
        if caller.term == self.term:
            self.membership.has(caller.name, membership)
            self._complete_change()
        return Handover(self.slots.copies(), self._node_folder.tickets.keys(), self.membership.known)

    # --- members -----------------------------------------------------------------------------------------------

    def change_members(self, change: Change, *, force: bool = False) -> Membership:
        """Begin a change of the log's nodes or of its policy; returns the record that is in force.

        It is complete once that record, and all that was committed before, is durable under both policies. ``NotReady``
        while another is pending, or too few replicas have caught up. ``force`` gives up what only former members have.
        """
        self.leadership.check("nothing was changed")
        before, after = self.membership.begin(change, self.registry, self._reached, force=force)
        self.leadership.check("the change is not complete")
        if after is not before:
            self._members_changed()
            self._complete_change()
        return self.membership.known or after

    def _complete_change(self) -> None:
        if self.leadership.is_held and self.membership.complete(self.watermark.offsets):
            self._members_changed()

    def _members_changed(self) -> None:
        """New members are in force: those that were removed are no replicas any more, the others are told."""
        self.watermark.commits.moved()
        self.replicas.changed()
        self.drop_strangers()

    def drop_strangers(self) -> None:
        """Unregister the replicas that were removed from the log: their slots pin nothing."""
        for name in self.membership.strangers(self.replicas.now):
            with contextlib.suppress(NotFound):  # another thread has just dropped it
                self.unregister(Caller(name))

    # --- appending ---------------------------------------------------------------------------------------------

    def append(
        self,
        records: RecordSource,
        *,
        append: tuple[WriterId, int] | None = None,
        policy: CommitPolicy | None = None,
        timeout: float = COMMIT_SECONDS,
        expect: int | None = None,
        seal: bool = False,
    ) -> Commit:
        """Append as :meth:`submit`, and wait for the policy; the commit says if that was reached in time."""
        return self.submit(records, append=append, policy=policy, expect=expect, seal=seal).result(timeout)

    def submit(
        self,
        records: RecordSource,
        *,
        append: tuple[WriterId, int] | None = None,
        policy: CommitPolicy | None = None,
        expect: int | None = None,
        seal: bool = False,
    ) -> CommitHandle:
        """Append a batch, whole or not at all, without waiting, except for flow control; ``seal`` ends the log with it.

        A ``policy`` may only ask for more than the node's own; one that the registered replicas can never satisfy is
        ``InvalidInput``, and nothing is written. ``append`` is a writer and its number: repeating it is a no-op.
        ``Fenced`` if this node does not lead, ``Overloaded`` while replicas lag, ``NotReady`` while a seal is pending.
        """
        self.leadership.check("nothing was written")
        if expect and not self.log.bounds().next:  # the log itself would begin there
            raise ExpectationFailed(f"The log ends at 0, not at {expect}: nothing was written.")
        own = self.membership.policy
        extra = None if policy is None or strengthened(own, policy) == own else policy
        self.membership.check_possible(self.watermark.required(extra), self.watermark.offsets())
        self._slow_down()
        writer, number = append or (None, None)
        with self._leading("nothing was written"):
            made = self.log.append_batch(
                records, writer=writer, number=number, term=self.term, expect=expect, seal=seal
            )
        return CommitHandle(made, extra, self.watermark, self.leadership, self._clock, seal)

    def seal(self, *, timeout: float = COMMIT_SECONDS) -> Cursor:
        """Seal the log, and wait for the policy; returns the cursor of its end. Safe to repeat.

        ``CommitTimedOut`` if the policy is not satisfied in time, ``Fenced`` if this node does not lead.
        """
        with self._leading("nothing was sealed"):
            self.membership.check_possible(self.watermark.required(None), self.watermark.offsets())
            self.log.seal()
        if not self.watermark.wait_for_seal(timeout) and self.leadership.is_held:
            raise CommitTimedOut(
                f"The log is sealed on the primary, but {self.membership.policy} was not satisfied within {timeout:g} "
                "s: until it is, the seal may be lost with the primary. Seal the log again to wait for it."
            )
        self.leadership.check("the log was sealed here, but the seal may be lost in a failover: seal it again")
        return Cursor(self.log.log_id, self.log.bounds().next)

    @contextlib.contextmanager
    def _leading(self, undone: str) -> Iterator[None]:
        """Change the log within; ``Fenced`` if this node does not lead any more, ``Sealed`` by a committed seal."""
        self.leadership.check(undone)
        try:
            yield
        except (LogClosed, Sealed):
            self.leadership.check(undone)
            self.watermark.check_seal()
            raise

    def last_number(self, writer: WriterId) -> int | None:
        """The number of a writer's last append; None for an unknown writer. ``Fenced`` if this node does not lead."""
        self.leadership.check("the last number of a writer may be another now")
        return self.log.last_number(writer)

    def last_append(self, writer: WriterId) -> WriterState | None:
        """The last append of a writer or of a source; None if unknown. ``Fenced`` if this node does not lead."""
        self.leadership.check("the last append of a writer may be another now")
        return self.log.last_append(writer)

    def _slow_down(self) -> None:
        limits = self.options.flow
        if not (limits.slow_at or limits.refuse_at):
            return
        lag = self.replicas.now.behind(self.log.bounds().extent)
        delay = flow_delay(lag, limits)
        if delay is None:
            raise Overloaded(
                f"A replica is {lag} records behind, which is the flow limit of this primary: nothing was written. "
                "Try again when it has caught up, or unregister it."
            )
        if delay > 0:
            self._clock.sleep(delay)

    # --- commit watermark --------------------------------------------------------------------------------------

    @property
    def committed(self) -> int:
        """The commit watermark: every record below satisfies the log's policy, and readers see it."""
        return min(self.watermark.now, self.log.bounds().next)

    def commit_watermark(self, count: int) -> int:
        """The offset below which everything is durable on at least ``count`` replicas."""
        durable = (each.durable for each in self.watermark.offsets().replicas)
        return min(self.log.bounds().next, nth_highest([upto for upto in durable if upto is not None], count))

    # --- replicas ----------------------------------------------------------------------------------------------

    def register(self, caller: Caller, *, region: str | None = None) -> Registration:
        """Register a replica; repeating it only refreshes when it was last seen.

        The slot of a new replica pins the log at its end: records behind a later snapshot are retained.
        """
        self._check_replica(caller)
        self.membership.has(caller.name, (0, 0))  # its disk may be another one
        at = self.replicas.register(caller.name, region=region, at=self.log.bounds().next)
        return Registration(self.topology(caller), at)

    def unregister(self, caller: Caller, *, keep_slot: bool = False) -> None:
        """Unregister a replica, drop its slot unless ``keep_slot``, and rotate the keys; or ``NotFound``."""
        self._check_term(caller)
        self.replicas.unregister(caller.name, keep_slot=keep_slot)
        if not keep_slot:
            self._metrics.forget(caller.name)
        self._bootstrap_snapshots.end(caller.name)
        self.watermark.commits.moved()
        self.rotate_keys()  # it knows the former key

    def rotate_keys(self) -> None:
        """Durably make a new key for tickets; the former one verifies for a ticket's lifetime."""
        self.leadership.check("the key was not changed")
        self._node_folder.tickets.rotate()

    def resume(self, caller: Caller, since: Cursor | None) -> Resume:
        """Let a replica resume from its own position, whatever its slot says, as :meth:`plan_resume` decides.

        Registers an unknown replica: its slot begins at the requested position if that is retained.
        """
        self._check_replica(caller)
        bounds = self.log.bounds()
        name = caller.name
        retained = since is not None and since.log_id == self.log.log_id and bounds.first <= since.next <= bounds.next
        at = since.next if retained and since is not None else bounds.next
        self.replicas.register(name, region=None, at=at)
        mode = self.plan_resume(name, since)
        match mode:
            case FullRebootstrap(cause):
                REBOOTSTRAPS.labels(str(cause)).inc()
                self.replicas.bootstraps(name)
            case PartialResync(resumed):
                self.replicas.resume_at(name, resumed.next)
                # An existing snapshot must not be reused: the replica may have acknowledged more since.
                self._bootstrap_snapshots.end(name)
                PARTIAL_RESYNCS.inc()
        return mode

    def plan_resume(self, name: str, since: Cursor | None) -> Resume:
        """How a replica would resume from this position; changes nothing. ``Diverged`` as in :meth:`resume`."""
        slot, bounds = self.replicas.slot(name), self.log.bounds()
        is_mine = since is not None and since.log_id == self.log.log_id
        if since is not None and is_mine and (slot is None or slot.invalid is None) and since.next >= bounds.first:
            # Since ``led_since`` only this node led: replicas have the records of those terms from here.
            parting = agreement(since, self.log, bounds, term=self._node_folder.state.led_since or self.term)
            if parting is not None:
                nothing_left = parting.upto <= bounds.first and bounds.first > 0
                return FullRebootstrap(Cause.WAL_REMOVED) if nothing_left else parting
        return plan_resume(slot, since, self.log.start(), bounds)

    def feed(self, caller: Caller, since: Cursor) -> LogFeed:
        """The batches from a position on, up to the durable end and following it."""
        self._check_replica(caller)
        self.replicas.now.replica(caller.name)

        def heartbeat() -> Heartbeat:
            self.membership.check(caller.name)  # it may be removed meanwhile
            return self.heartbeat()

        return LogFeed(
            self.log,
            since,
            heartbeat,
            lambda upto: self.replicas.sent(caller.name, upto),
            is_awaited=lambda: not self.watermark.is_alone or self.watermark.commits.is_awaited,
        )

    def acknowledge(self, caller: Caller, progress: ReplicaProgress) -> Acknowledgement:
        """Handle a replica's acknowledgement: it counts and advances the slot, unless the slot is invalid."""
        refused = self.acknowledge_nowait(caller, progress)
        if refused is None:
            refused = self.replicas.move_slot(caller.name)
        return Acknowledgement(self.heartbeat(), refused)

    def acknowledge_nowait(self, caller: Caller, progress: ReplicaProgress) -> str | None:
        """Note an acknowledgement; returns the reason if it was rejected. The slot is advanced later."""
        self._check_replica(caller)
        if caller.term != self.term:
            raise Fenced(
                f"Replica {caller.name!r} acknowledges in term {caller.term}, but this primary leads in term "
                f"{self.term}: its records may differ. It has to register again."
            )
        refused = self.replicas.acknowledge(caller.name, progress)
        self.watermark.commits.moved()
        return refused

    # --- bootstrap ---------------------------------------------------------------------------------------------

    def begin_snapshot(self, caller: Caller, kind: str) -> SnapshotOffer:
        """Pin the log at its end, and seal a snapshot behind that; repeating it returns the same while it is kept."""
        self._check_replica(caller)
        self.replicas.bootstraps(caller.name)
        return self._bootstrap_snapshots.begin(caller.name, kind)

    def chunks(self, caller: Caller, snapshot: str, path: str, offset: int) -> Generator[SnapshotChunk, None, None]:
        """A file of a snapshot from a byte on."""
        self._check_replica(caller)
        self._bootstrap_snapshots.touch(caller.name)
        return self._bootstrap_snapshots.chunks(caller.name, snapshot, path, offset)

    def end_snapshot(self, caller: Caller, cursor: Cursor) -> None:
        """The bootstrap is complete and durable at this cursor: reset the replica's slot to it."""
        self._check_replica(caller)
        self.replicas.bootstrapped(caller.name, cursor.next)
        self._bootstrap_snapshots.end(caller.name)

    # --- heartbeat and topology ---------------------------------------------------------------------------------

    def heartbeat(self) -> Heartbeat:
        """Term, durable extent and watermark of this primary. ``Fenced`` when it no longer leads."""
        self.leadership.check("no heartbeat was sent")
        bounds, committed, epoch = self.log.bounds(), self.watermark.now, self.replicas.now.epoch
        return Heartbeat(self.term, self.term_start, bounds.extent, min(committed, bounds.extent), epoch, bounds.sealed)

    def topology(self, caller: Caller) -> Topology:
        """The replicas of the log with their offsets."""
        self._check_term(caller)
        heartbeat = self.heartbeat()
        return Topology(
            self.log.log_id,
            self.name,
            self.term,
            self.term_start,
            heartbeat.epoch,
            str(self.membership.policy),
            heartbeat.durable,
            heartbeat.committed,
            self.replicas.members(),
            self.log.bounds().first,
            self._node_folder.state.cold or None,
            self.membership.known,
            heartbeat.sealed,
        )

    @property
    def registry(self) -> ReplicaRegistry:
        """All replicas, with the offset sent to each."""
        return self.replicas.with_sent()

    # --- maintenance -------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Judge replica health, advance slots, and apply retention; called about once a heartbeat interval."""
        self.replicas.judge(poll_seconds=self.options.poll_seconds)
        self.replicas.move_slots()
        self._bootstrap_snapshots.expire()
        self._complete_change()
        self.drop_strangers()  # again, if a disk error came in between
        self._reached = self.watermark.now
        self.log.trim(self.options.retention_policy, limits=self.options.slot_limits)
        slots = node_slots(self.log, self.options, committed=self.committed, now=self._clock.now()).slots
        self._metrics.measure(self.registry, slots)
        self._node_folder.remember(committed=self.watermark.now)

    def trim(self, upto: int) -> int:
        """Delete records below an offset, but none that a slot needs; returns the new first offset."""
        with self._leading("nothing was deleted"):
            self.replicas.move_slots()
            return self.log.trim(upto, limits=self.options.slot_limits)

    def step_down(self, why: str) -> None:
        """End the leadership: nothing is written or acknowledged from here on."""
        self.leadership.end(why)
        self.watermark.commits.give_up()
        self._metrics.end()

    def _check_replica(self, caller: Caller) -> None:
        self.membership.check(caller.name)
        self._check_term(caller)

    def _check_term(self, caller: Caller) -> None:
        if caller.term > self.term:
            self.membership.check(caller.name)  # the terms of others count for nothing
            self._node_folder.adopt_term(caller.term, caller.name)
            self.step_down(f"{caller.name} has seen term {caller.term}")
        self.leadership.check("nothing was done")

    def _remember(self, registry: ReplicaRegistry) -> None:
        peers = tuple(Peer(each.name, each.region, each.divergences) for each in registry.replicas.values())
        self._node_folder.remember(peers=peers, policy=str(self.membership.policy), primary=self.name)
