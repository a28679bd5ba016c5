"""The replica role: follows a primary's log into its own copy, acknowledges it, and serves reads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import StrEnum
from typing import Final, final

from strandline.errors import (
    CorruptData,
    DiskFull,
    Diverged,
    Fenced,
    Gap,
    InvalidInput,
    LogClosed,
    LogFailed,
    NotReady,
    StrandlineError,
)
from strandline.followers.engine import Engine
from strandline.followers.events import Batching
from strandline.followers.run import Follower
from strandline.log.slots.resume import Cause, FullRebootstrap, PartialResync
from strandline.model.cursor import Bounds, Cursor
from strandline.model.head import LogBatch
from strandline.model.node import Membership, Peer, Trouble
from strandline.node.members.rules import check_membership, is_newer
from strandline.node.messages import Caller, Handover, ReplicaProgress, ReplicationFeed, Rewind, Topology, Upstream
from strandline.node.node_folder import SNAPSHOTS, NodeFolder
from strandline.node.options import NodeOptions
from strandline.node.replicate.bootstrap import bootstrap
from strandline.node.replicate.divergence import (
    check_replaceable,
    drop_uncommitted_seal,
    keep_tail,
    stepped_back,
    truncate_tail,
)
from strandline.node.replicate.incoming import AckSender, IncomingBatches
from strandline.node.replicate.log_copy import LogCopy
from strandline.node.replicate.watermark import ReplicaWatermark
from strandline.storage.objects.urls import open_store
from strandline.storage.retry import Backoff

_LOGGER = logging.getLogger(__name__)

RETRIES: Final = Backoff(attempts=1 << 30, base=0.1, ceiling=5.0)
"""Back-off between attempts to follow a primary; never gives up."""

_CHECKPOINT_SECONDS: Final = 5.0
"""Interval at which a replica stores its watermark, and applies the primary's retention."""

_AT_ONCE: Final = Batching(window=0.0, bytes=64 << 20)


class Condition(StrEnum):
    """State of a node. ``GAP`` and ``DIVERGED`` last until an operator acts."""

    LEADING = "leading"
    CONNECTING = "connecting"
    BOOTSTRAPPING = "bootstrapping"
    FOLLOWING = "following"
    FENCED = "fenced"
    """A primary of a lower term than it has seen sent records; it continues with a newer primary."""
    GAP = "gap"
    DIVERGED = "diverged"
    FAILED = "failed"
    """Its control thread has ended with an error."""


@final
class ReplicaRole:
    """Follows a primary step by step; what it acknowledges is durable here. Any thread may read.

    It resumes at its own position. A tail that the primary never had is truncated into quarantine first. A gap or a
    divergence stops it, across restarts, until :meth:`rebootstrap`.
    """

    def __init__(
        self,
        node_folder: NodeFolder,
        copy: LogCopy | None,
        connect: Callable[[], Upstream],
        options: NodeOptions,
        *,
        committed: int,
        knows_committed: bool,
    ) -> None:
        """``connect`` reaches the primary: ``NotReady`` if none is known.

        ``committed`` is the last known watermark, ``knows_committed`` whether it covers everything that this node has
        shown.
        """
        self.copy = copy
        self._node_folder = node_folder
        self._connect = connect
        self._options = options
        self._poll_seconds = options.poll_seconds
        self._clock = node_folder.env.clock
        self._upstream: Upstream | None = None
        self._feed: ReplicationFeed | None = None
        self._follower: Follower | None = None
        self._asked = False
        """Whether a bootstrap was requested."""
        self._term = 0
        self._epoch = -1
        self._failures = 0
        self._apply_errors = 0
        self._reported = 0
        """How many of its divergences were reported to a primary since the node was started."""
        self.watermark = ReplicaWatermark(
            node_folder, lambda: self.copy, lambda: self.condition is Condition.BOOTSTRAPPING,
            committed=committed, is_known=knows_committed,
        )  # fmt: skip
        """The copy as readers see it."""
        self._acks = AckSender(self._caller, self._progress, self.watermark.raise_to, self._poll_seconds, self._clock)
        self._handed_over = 0.0
        """When the primary's slots of consumers were last fetched."""
        self._checkpointed = self._clock.monotonic()
        """When the watermark was last stored: after a restart, readers see no less."""
        self.condition = Condition.CONNECTING
        if node_folder.state.trouble is not None:
            self.condition = Condition(node_folder.state.trouble.state)

    # --- following ---------------------------------------------------------------------------------------------

    def step(self) -> float:
        """Do the next step; returns the pause before the one after. Blocks on the network and the disk."""
        if self._node_folder.state.trouble is not None:
            return self._report()
        try:
            if self._follower is None:
                self._begin()
            else:
                self._follow(self._follower)
        except (Gap, Diverged) as error:
            self._stop(error)
        except StrandlineError as error:
            return self._retry(error)
        return 0.0

    def _follow(self, follower: Follower) -> None:
        """Apply and acknowledge the incoming batches, or wait for some."""
        follower.step()
        while not follower.is_between:
            follower.step()
        self._on_heartbeat()
        self._failures = 0

    def _retry(self, error: StrandlineError) -> float:
        """Disconnect from the primary; returns the back-off before the next attempt."""
        self.disconnect()
        if isinstance(error, LogFailed | LogClosed | DiskFull) and self.copy is not None:
            self._apply_errors += 1
            self.copy.reopen()
        elif isinstance(error, CorruptData):
            self._apply_errors += 1
        pause = self._back_off()
        level = logging.INFO if error.retryable else logging.WARNING
        _LOGGER.log(level, "Replica %s tries again in %.1f s: %s", self._node_folder.state.name, pause, error)
        self.condition = Condition.FENCED if isinstance(error, Fenced) else Condition.CONNECTING  # after its reason
        return pause

    def _back_off(self) -> float:
        """Seconds until the next attempt, after one more has failed."""
        self._failures += 1
        return RETRIES.pause(self._failures - 1, self._node_folder.env.chance.jitter())

    def _stop(self, error: Gap | Diverged) -> None:
        self.disconnect()
        condition = Condition.GAP if isinstance(error, Gap) else Condition.DIVERGED
        _LOGGER.error("Replica %s stopped (%s): %s", self._node_folder.state.name, condition, error)
        self._node_folder.remember(
            trouble=Trouble(str(condition), str(error), self._clock.now()),
            divergences=self._node_folder.state.divergences + (condition is Condition.DIVERGED),
        )
        self.condition = condition  # set after the reason: a reader of the condition finds why

    def _report(self) -> float:
        """Report a divergence to the primary, which cannot see it by itself."""
        divergences = self._node_folder.state.divergences
        if self._reported >= divergences:
            return self._poll_seconds
        try:
            upstream = self._connect()
            try:
                self._observe_term(upstream.register(self._caller(), region=self._options.region).topology.term)
                # At offset 0: no local record may count as the primary's.
                upstream.acknowledge(self._caller(), ReplicaProgress(0, 0, self._apply_errors, divergences))
            finally:
                upstream.close()
        except StrandlineError as error:
            pause = self._back_off()
            _LOGGER.info("Replica %s could not report that it diverged: %s", self._node_folder.state.name, error)
            return pause
        self._reported, self._failures = divergences, 0
        return self._poll_seconds

    def rebootstrap(self) -> None:
        """Clear the gap or divergence, and bootstrap from a snapshot of the primary."""
        self.disconnect()
        self.condition = Condition.CONNECTING
        self._asked = True
        self._node_folder.remember(trouble=None)

    def disconnect(self) -> None:
        """Disconnect from the primary; the next step connects again."""
        feed, self._feed, self._follower = self._feed, None, None
        upstream, self._upstream = self._upstream, None
        self._acks.stop()
        if feed is not None:
            feed.close()
        if upstream is not None:
            upstream.close()

    # --- connecting --------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._upstream = upstream = self._connect()
        registration = upstream.register(self._caller(), region=self._options.region)
        topology = registration.topology
        self._observe_term(topology.term)
        self._term = topology.term
        self._update_topology(topology)
        since = self._agree(upstream, topology)
        copy = self.copy
        if copy is None:
            raise AssertionError("after a bootstrap there is a copy")
        copy.term = self._term
        copy.drop_slots()
        self._keep_handover(upstream, copy)
        # The last record is requested again, where both retain it: if it differs, the logs have diverged.
        overlap = since.next - 1 if since.next > max(copy.log.bounds().first, topology.first) else since.next
        self.watermark.compared = None if overlap == since.next else overlap
        # Not before: a tail that the primary never had is truncated only now.
        drop_uncommitted_seal(copy, topology, self.watermark.shown, self._node_folder.state.name)
        self.watermark.raise_to(topology.committed)
        self.watermark.learn(topology.committed, topology.term_start)
        # Bootstrap snapshots of this node's own leadership are stale: their replicas may have acknowledged more since.
        self._node_folder.env.disk.remove_folder(self._node_folder.path(SNAPSHOTS))
        if self.watermark.compared is None:
            self._adopt(topology.term, topology.term_start, copy.log.bounds().extent)
        self._acks.begin(upstream)
        copy.on_durable = self._acks.durable
        self._feed = upstream.feed(self._caller(), Cursor(since.log_id, overlap))
        incoming = IncomingBatches(since.log_id, self._feed, lambda: self._node_folder.state.seen, self._holds)
        follower = Follower(
            Engine(_AT_ONCE), incoming, copy, self._acks, self._node_folder.env, seen_every=self._poll_seconds
        )
        follower.begin(since)
        self._follower = follower
        self.condition = Condition.FOLLOWING

    def _holds(self, batch: LogBatch, at: Cursor) -> bool:
        """Whether the record before a position equals the primary's; until then it is not shown or acknowledged."""
        is_same = self.copy is not None and self.copy.holds(batch, at)
        if is_same:
            self.watermark.compared = None
        return is_same

    def _agree(self, upstream: Upstream, topology: Topology) -> Cursor:
        """Find the position up to which both logs match; truncates the local tail behind it."""
        since = None if self.copy is None or self._asked else self.copy.end()
        is_built = False
        while True:
            match upstream.resume(self._caller(), since):
                case PartialResync() if since is not None and self.copy is not None:
                    break
                case Rewind() as answer if since is not None and self.copy is not None:
                    since = stepped_back(since, answer, self.copy.log, self.copy.log.bounds())
                case FullRebootstrap(cause) if not is_built:
                    if self.copy is not None and not self._asked:  # otherwise an operator gives the copy up
                        check_replaceable(self.copy, topology, self.watermark.shown)
                    level = logging.INFO if cause is Cause.NEW else logging.WARNING
                    name = self._node_folder.state.name
                    _LOGGER.log(level, "Replica %s builds its copy of the log (%s).", name, cause)
                    since, is_built = self._bootstrap(upstream, topology), True
                case FullRebootstrap(cause):
                    raise NotReady(f"The primary requests a second bootstrap right after the first ({cause}).")
                case answer:
                    raise CorruptData(f"A primary answered {answer} to a replica at {since}.")
        if since.next < self.copy.log.bounds().next:
            truncate_tail(self.copy, since.next, self.watermark.shown, self._node_folder.state.name)
        return since

    def _bootstrap(self, upstream: Upstream, topology: Topology) -> Cursor:
        self.condition = Condition.BOOTSTRAPPING
        former = self.copy

        def keep() -> None:
            if former is not None and not self._asked:
                keep_tail(former, topology, self.watermark.shown, self._node_folder.state.name)

        cursor = bootstrap(upstream, self._caller(), self._node_folder, before_swap=keep)
        # The new copy is current from here on. Readers of the old one may finish: it is removed only
        # at the next bootstrap.
        built = LogCopy(self._node_folder)
        with self.watermark.changing():
            self.copy = built  # first: the former one may have other records below the raised watermark
            self.watermark.rebuilt()
        if former is not None:
            former.close()
        self._node_folder.sweep(keep=None if former is None else former.generation)
        self._asked = False
        upstream.end_snapshot(self._caller(), cursor)
        return self.copy.end()  # not the snapshot's cursor: its term may belong to a record that is not retained

    # --- terms and heartbeats ----------------------------------------------------------------------------------

    def _caller(self) -> Caller:
        return Caller(self._node_folder.state.name, self._node_folder.state.seen)

    def _observe_term(self, term: int) -> None:
        seen = self._node_folder.state.seen
        if term < seen:
            raise Fenced(
                f"A primary of term {term} answers, but this replica has seen term {seen}: it is not followed. Point "
                "this replica to the primary of that term."
            )
        if term > seen:
            self._node_folder.adopt_term(term, "The primary")

    def _update_topology(self, topology: Topology) -> None:
        peers = tuple(Peer(member.name, member.region, member.divergences) for member in topology.members)
        # The members with the policy: that of a pending change means something else without its record.
        self._node_folder.remember(
            peers=peers, policy=topology.policy, primary=topology.primary, cold=self._cold_of(topology),
            membership=_checked(topology.membership, topology.term),
        )  # fmt: skip
        self._epoch = topology.epoch
        self.watermark.of_primary = max(self.watermark.of_primary, topology.committed)

    def _cold_of(self, topology: Topology) -> str:
        """The store of the log's cold tier, which the log keeps; empty for none."""
        known, said = self._node_folder.state.cold or self._options.cold_address, topology.cold
        if said is None or said == known:
            return known
        if known:
            raise NotReady(
                f"The log's cold tier is in {known}, but {topology.primary} has it in {said}: start that node with the "
                "former, or it leads another log."
            )
        try:
            open_store(said)  # no request
        except InvalidInput as error:
            raise CorruptData(f"{topology.primary} names no store for the cold tier: {error}") from error
        return said

    def _adopt(self, term: int, start: int, durable: int) -> None:
        """Store, before anything is acknowledged, that this copy has everything from before the primary's term."""
        if self._node_folder.state.adopted < term and durable >= start:
            self._node_folder.remember(adopted=term)

    def _on_heartbeat(self) -> None:
        heartbeat = None if self._feed is None else self._feed.heartbeat
        if heartbeat is None or self.copy is None or self._upstream is None:
            return
        self._observe_term(heartbeat.term)
        if heartbeat.term != self._term:
            raise NotReady(
                f"The primary is of term {heartbeat.term} now, not {self._term}: this replica registers again."
            )
        if heartbeat.epoch != self._epoch:
            self._update_topology(self._upstream.topology(self._caller()))
            self._handed_over = -self._poll_seconds  # the members may have changed
        if self.watermark.compared is None and self.copy.seal_with(heartbeat):
            self._acks.durable(heartbeat.durable)
        applied = self.copy.log.bounds().extent
        now = self._clock.monotonic()
        with self.watermark.changing():
            self.watermark.raise_to(heartbeat.committed)
            self.watermark.learn(heartbeat.committed, heartbeat.term_start)
            if applied >= heartbeat.durable:
                self.watermark.caught_up_at = now
        if now - self._handed_over >= self._poll_seconds:
            self._keep_handover(self._upstream, self.copy)
        if now - self._checkpointed >= _CHECKPOINT_SECONDS:
            self._checkpointed = now
            self._checkpoint(self._upstream)

    def _keep_handover(self, upstream: Upstream, copy: LogCopy) -> None:
        """Keep what this node needs to lead: the primary's slots of consumers, which pin the copy, and its keys."""
        self._handed_over = self._clock.monotonic()
        try:
            handover = self._handover(upstream)
        except InvalidInput:  # a primary of an earlier version has none
            return
        if is_newer(handover.membership, self._node_folder.state.membership):
            self._node_folder.remember(membership=_checked(handover.membership, self._term))
            handover = self._handover(upstream)  # it counts from here on, and no sooner
        copy.log.slots.copy_consumers(handover.slots)
        self._node_folder.tickets.adopt(handover.ticket_keys)

    def _handover(self, upstream: Upstream) -> Handover:
        caller = self._caller()  # before the record is looked up: one that it had in this term is told in this term
        known = self._node_folder.state.membership
        return upstream.handover(caller, membership=(0, 0) if known is None else known.version)

    def _checkpoint(self, upstream: Upstream) -> None:
        """Store the watermark, and apply the primary's retention."""
        self._node_folder.remember(committed=self.watermark.shown)
        if self.copy is not None:
            self.copy.log.trim(min(upstream.topology(self._caller()).first, self.committed))

    def _progress(self, durable: int | None) -> ReplicaProgress:
        """The acknowledgement of a durable end, by default the copy's; stores first whether that adopts the term.

        The seal counts as one more record.
        """
        bounds = Bounds(0, 0) if self.copy is None else self.copy.log.bounds()
        if durable is None or (bounds.sealed and durable == bounds.next):
            durable = bounds.extent
        heartbeat = None if self._feed is None else self._feed.heartbeat
        if self.watermark.compared is not None:
            durable = 0  # not compared yet: if the last record differs, others may too
        elif heartbeat is not None and heartbeat.term == self._term:
            self._adopt(heartbeat.term, heartbeat.term_start, durable)
        return ReplicaProgress(durable, durable, self._apply_errors, self._node_folder.state.divergences)

    @property
    def committed(self) -> int:
        """The commit watermark here: everything below is in this copy, and satisfies the primary's policy."""
        return self.watermark.committed


def _checked(found: Membership | None, term: int) -> Membership | None:
    """The members that a primary of this term sent; ``CorruptData`` if those of no log."""
    try:
        return None if found is None else check_membership(found, term=term)
    except InvalidInput as error:
        raise CorruptData(f"The primary sent no membership of a log: {error}") from error
