"""The primary of a replicated log: orders records, knows who has them, and says when they are committed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Final, final

from strandline.errors import Fenced, LogClosed, NotReady, Overloaded
from strandline.log.resume import Cause, FullRebootstrap, PartialResync, plan_resume
from strandline.log.wal.log import WalLog
from strandline.model.cursor import Cursor
from strandline.model.head import WriterId
from strandline.model.node import Beat, Peer
from strandline.model.records import RecordSource
from strandline.node.lead.append_handle import CommitHandle
from strandline.node.lead.bootstrap_snapshots import Export, Offers
from strandline.node.lead.commits import Commits
from strandline.node.lead.committed_log import ReadableLog
from strandline.node.lead.feed import LogFeed
from strandline.node.lead.flow import Refuse, admit
from strandline.node.lead.leadership import Gate
from strandline.node.lead.policies import (
    CommitPolicy,
    Standing,
    check_possible,
    is_met_alone,
    nth_highest,
    strengthened,
    watermark,
)
from strandline.node.lead.replica_registry import Progress, Registry
from strandline.node.lead.replica_slots import Replicas
from strandline.node.messages import (
    Acknowledgement,
    Caller,
    Chunk,
    Commit,
    Member,
    Registration,
    Resume,
    SnapshotOffer,
    Topology,
)
from strandline.node.node_folder import Home
from strandline.node.options import NodeOptions
from strandline.node.replicate.agreement import agreement
from strandline.storage.clock import CLOCK, Clock
from strandline.storage.metrics import DIVERGENCES, PARTIAL_RESYNCS, REBOOTSTRAPS, REPLICATION_LAG, SAFE_REPLAY

COMMIT_SECONDS: Final = 5.0
"""How long an append waits for its policy unless something else is said."""


@final
class PrimaryRole:
    """A log whose appends are committed when its policy says so. Safe in threads.

    Nothing is acknowledged unless this node was the primary before it was written, and still is when it is durable
    here and where the policy wants it. Opened by :class:`~strandline.node.node.Node`.
    """

    def __init__(
        self,
        home: Home,
        log: WalLog,
        gate: Gate,
        options: NodeOptions,
        *,
        exports: Mapping[str, Export],
        settled: bool = False,
        clock: Clock = CLOCK,
    ) -> None:
        """Lead the log from where it ends; the caller has made sure that nothing committed is missing there.

        ``settled`` if nothing above the watermark that the node remembers can have been acknowledged before.
        """
        self.log = log
        self.gate = gate
        self.options = options
        self.policy = options.commit_policy
        """The node's own commit policy."""
        self._is_alone = is_met_alone(self.policy, home.state.name)
        self.term_start = log.bounds().next
        self._home = home
        self._clock = clock
        self._offers = Offers(home, log, exports)
        peers = [peer for peer in home.state.peers if peer.name != home.state.name]
        self.replicas = Replicas(log, peers, self._remember, clock=clock)
        self._stood: tuple[Registry, Standing] = (self.replicas.now, Standing(self.name, -1))
        """The last standing that was asked for, and of which registry: it is asked for several times per append."""
        self._commits = Commits(self._watermark, self._durable)
        self._commits.raise_to(self.policy, min(home.state.committed, self.term_start))
        self._knows = self._is_alone or settled

    @property
    def name(self) -> str:
        """The node's name."""
        return self._home.state.name

    @property
    def term(self) -> int:
        """The term in which it leads."""
        return self.gate.term

    # --- appending ---------------------------------------------------------------------------------------------

    def append(
        self,
        records: RecordSource,
        *,
        append: tuple[WriterId, int] | None = None,
        policy: CommitPolicy | None = None,
        timeout: float = COMMIT_SECONDS,
    ) -> Commit:
        """Append a batch, whole or not at all, and wait for the policy; whether that was in time, the answer says.

        A ``policy`` may only ask for more than the node's own; one that the registered replicas can never satisfy is
        ``InvalidInput``, and nothing is written. ``append`` is a writer and its number: again is a no-op. ``Fenced`` if
        this node is not the primary, or was not any more when it had to be told: the records may be lost then.
        ``Overloaded`` while replicas are too far behind.
        """
        return self.submit(records, append=append, policy=policy).result(timeout)

    def submit(
        self,
        records: RecordSource,
        *,
        append: tuple[WriterId, int] | None = None,
        policy: CommitPolicy | None = None,
    ) -> CommitHandle:
        """The same without waiting for anything but flow control; the handle tells the rest."""
        self.gate.check("nothing was written")
        asked = self.policy if policy is None else strengthened(self.policy, policy)
        check_possible(asked, self._standing())
        self._slow_down()
        writer, number = append or (None, None)
        try:
            handle = self.log.append_batch(records, writer=writer, number=number, term=self.term)
        except LogClosed:
            self.gate.check("nothing was written")  # it stepped down in between
            raise
        return CommitHandle(
            handle,
            asked,
            self._commits,
            self.gate,
            self.log,
            self._clock,
            term_start=self.term_start,
            is_alone=is_met_alone(asked, self.name),
        )

    def _slow_down(self) -> None:
        if not self.options.flow.is_on:
            return
        match admit(self._slowest(), self.options.flow):
            case Refuse(lag):
                raise Overloaded(
                    f"A replica is {lag} records behind, which is as far as this primary lets it come: nothing was "
                    "written. Try again when it has caught up, or unregister it."
                )
            case proceed:
                if proceed.after > 0:
                    self._clock.sleep(proceed.after)

    def _slowest(self) -> int:
        applied = [
            each.applied
            for each in self.replicas.now.replicas.values()
            if each.healthy and not each.bootstrapping and each.applied is not None
        ]
        return self.log.bounds().next - min(applied) if applied else 0

    # --- what is committed -------------------------------------------------------------------------------------

    def _standing(self) -> Standing:
        registry, durable = self.replicas.now, self.log.bounds().next
        of, standing = self._stood
        if of is not registry or standing.durable != durable:
            standing = registry.standing(self.name, durable, term_start=self.term_start)
            self._stood = (registry, standing)
        return standing

    def _watermark(self, policy: CommitPolicy) -> int:
        return watermark(policy, self._standing())

    @property
    def committed(self) -> int:
        """Everything below satisfies the node's policy: what readers see."""
        return self.log.bounds().next if self._is_alone else self._commits.reached(self.policy)

    def commit_watermark(self, count: int) -> int:
        """Everything below is durable on so many replicas."""
        durable = (each.durable for each in self._standing().replicas)
        return nth_highest([position for position in durable if position is not None], count)

    @property
    def knows_committed(self) -> bool:
        """Whether its watermark covers everything that was ever acknowledged or shown, by any primary of the log.

        Before that it would show less than was there already. It has everything that was committed before its term,
        but does not know how far that goes until its policy is satisfied for all of it.
        """
        if not self._knows:
            self._knows = self.committed >= self.term_start
        return self._knows

    def readable(self) -> ReadableLog:
        """The log up to the commit watermark; ``NotReady`` until that is known."""
        if not self.knows_committed:
            raise NotReady(
                f"{self.name} does not know yet whether everything below offset {self.term_start}, which may have been "
                f"read before it was restarted or promoted, is committed: ask again when its replicas have told that "
                f"{self.policy} is satisfied. If they are lost for good, start it with a policy that is."
            )
        if self._is_alone:
            return ReadableLog(self.log, self._durable, self._wait_durable)
        return ReadableLog(self.log, lambda: self.committed, self._wait_committed)

    def _durable(self) -> int:
        return self.log.bounds().next

    def _wait_durable(self, past: int, timeout: float) -> bool:
        return self.log.wait(Cursor(self.log.log_id, past), timeout)

    def _wait_committed(self, past: int, timeout: float) -> bool:
        waiter = self._commits.add(self.policy, past + 1)
        try:
            waiter.wait(timeout)
        finally:
            self._commits.remove(waiter)
        return waiter.done

    # --- replicas ----------------------------------------------------------------------------------------------

    def register(self, caller: Caller, *, region: str | None = None) -> Registration:
        """Be known as a replica; again refreshes when it was last seen, and changes nothing else.

        A new one's slot pins the log where it ends now: what a snapshot taken after this does not hold is kept.
        """
        self._check_term(caller)
        position = self.replicas.register(caller.name, region=region, at=self.log.bounds().next)
        return Registration(self.topology(caller), position)

    def unregister(self, caller: Caller, *, keep_slot: bool = False) -> None:
        """Count a replica no longer, and let go of what its slot pinned unless told to keep it; unknown is fine."""
        self._check_term(caller)
        self.replicas.unregister(caller.name, keep_slot=keep_slot)
        with contextlib.suppress(KeyError):  # it was never looked at
            DIVERGENCES.remove(str(self.log.log_id), caller.name)
        self._offers.end(caller.name)
        self._commits.moved()

    def resume(self, caller: Caller, since: Cursor | None) -> Resume:
        """Let a replica go on from its own position, whatever its slot says; how, :meth:`plan_resume` tells.

        One that was not known is registered: its slot begins at the position asked for if that is retained.
        """
        self._check_term(caller)
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
                self.replicas.goes_on(name, resumed.next)
                # A snapshot that is still kept for it must not be its next one: it may have acknowledged more since.
                self._offers.end(name)
                PARTIAL_RESYNCS.inc()
        return mode

    def plan_resume(self, name: str, since: Cursor | None) -> Resume:
        """How a replica would go on from this position; changes nothing. ``Diverged`` as in :meth:`resume`."""
        slot, bounds = self.replicas.slot(name), self.log.bounds()
        is_mine = since is not None and since.log_id == self.log.log_id
        if since is not None and is_mine and (slot is None or slot.invalid is None) and since.next >= bounds.first:
            # What a replica has of the terms from which on only this node led, it has from here.
            parting = agreement(since, self.log, bounds, term=self._home.state.led_since or self.term)
            if parting is not None:
                nothing_left = parting.upto <= bounds.first and bounds.first > 0
                return FullRebootstrap(Cause.WAL_REMOVED) if nothing_left else parting
        return plan_resume(slot, since, self.log.start(), bounds)

    def feed(self, caller: Caller, since: Cursor) -> LogFeed:
        """Everything from a position on, up to the durable end and following it."""
        self._check_term(caller)
        self.replicas.now.replica(caller.name)
        replicas, commits = self.replicas, self._commits
        return LogFeed(
            self.log,
            since,
            self.beat,
            lambda upto: replicas.sent(caller.name, upto),
            is_awaited=lambda: not self._is_alone or commits.is_awaited,
        )

    def acknowledge(self, caller: Caller, progress: Progress) -> Acknowledgement:
        """A replica says how far it is: that counts, and moves its slot, unless the slot is invalid."""
        refused = self.tell(caller, progress)
        if refused is None:
            refused = self.replicas.move_slot(caller.name)
        return Acknowledgement(self.beat(), refused)

    def tell(self, caller: Caller, progress: Progress) -> str | None:
        """The same for who wants to hear only why it did not count; its slot is moved a little later."""
        self._check_term(caller)
        name = caller.name
        if caller.term != self.term:
            raise Fenced(
                f"Replica {name!r} reports in term {caller.term}, and this primary leads in term {self.term}: what it "
                "has may be another log. It has to register again."
            )
        refused = self.replicas.tell(name, progress)
        self._commits.moved()
        return refused

    # --- bootstrap ---------------------------------------------------------------------------------------------

    def begin_snapshot(self, caller: Caller, kind: str) -> SnapshotOffer:
        """Pin the log where it ends, and seal a snapshot behind that; again gives the same while it is kept."""
        self._check_term(caller)
        self.replicas.bootstraps(caller.name)
        return self._offers.begin(caller.name, kind)

    def chunks(self, caller: Caller, snapshot: str, path: str, offset: int) -> Iterator[Chunk]:
        """A file of a snapshot from a byte on."""
        self._check_term(caller)
        self._offers.touch(caller.name)
        return self._offers.chunks(caller.name, snapshot, path, offset)

    def end_snapshot(self, caller: Caller, cursor: Cursor) -> None:
        """The bootstrap is complete and durable at this cursor: the replica's slot is valid again, and stands there."""
        self._check_term(caller)
        self.replicas.bootstrapped(caller.name, cursor.next)
        self._offers.end(caller.name)

    # --- what others are told ----------------------------------------------------------------------------------

    def beat(self) -> Beat:
        """How far this primary is. ``Fenced`` when it is none any more."""
        self.gate.check("nothing more is told")
        durable = self.log.bounds().next
        return Beat(self.term, self.term_start, durable, min(durable, self.committed), self.replicas.now.epoch)

    def topology(self, caller: Caller) -> Topology:
        """Who replicates the log, and how far each is."""
        self._check_term(caller)
        jump = self._clock.now() - self.replicas.time()
        members = tuple(
            Member(
                each.name,
                each.region,
                each.sent,
                each.applied,
                each.durable,
                each.apply_errors,
                each.divergences,
                each.connected_at + jump,
                each.last_seen + jump,
                each.bootstrapping,
                each.healthy,
            )
            for each in self.registry.replicas.values()
        )
        beat = self.beat()
        return Topology(
            self.log.log_id,
            self.name,
            self.term,
            self.term_start,
            beat.epoch,
            str(self.policy),
            beat.durable,
            beat.committed,
            members,
            self.log.bounds().first,
        )

    @property
    def registry(self) -> Registry:
        """All replicas, as a value."""
        return self.replicas.with_sent()

    # --- keeping house -----------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Judge who is silent, and forget what nobody needs; called about once a poll interval."""
        self.replicas.judge(poll_seconds=self.options.poll_seconds)
        self.replicas.move_slots()
        self._offers.sweep()
        self.log.trim(self.options.retention_policy, limits=self.options.slot_limits)
        log = str(self.log.log_id)
        registry = self.registry
        REPLICATION_LAG.labels(log).set(registry.lag)
        SAFE_REPLAY.labels(log).set(registry.safe_replay or 0)
        for each in registry.replicas.values():
            DIVERGENCES.labels(log, each.name).set(each.divergences)
        self._home.remember(committed=self.committed)

    def trim(self, upto: int) -> int:
        """Forget what is below an offset and was archived, but nothing that a slot needs; returns where it stopped."""
        self.replicas.move_slots()
        return self.log.trim(upto, limits=self.options.slot_limits)

    def step_down(self, why: str) -> None:
        """Be the primary no more: nothing is written or acknowledged from here on."""
        self.gate.shut(why)
        self._commits.give_up()

    def _check_term(self, caller: Caller) -> None:
        if caller.term > self.term:
            self._home.hear_term(caller.term, caller.name)
            self.step_down(f"{caller.name} has seen term {caller.term}")
        self.gate.check("nothing was done")

    def _remember(self, registry: Registry) -> None:
        peers = tuple(Peer(each.name, each.region, each.divergences) for each in registry.replicas.values())
        self._home.remember(peers=peers, policy=str(self.policy), primary=self.name)
