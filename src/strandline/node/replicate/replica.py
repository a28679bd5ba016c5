"""A replica: follows a primary's log into a copy of its own, and can say how far that is."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from enum import StrEnum
from typing import Final, final

from strandline.errors import (
    CorruptData,
    DiskFull,
    Diverged,
    Fenced,
    Gap,
    LogClosed,
    LogFailed,
    NotReady,
    StrandlineError,
)
from strandline.followers.engine import Engine
from strandline.followers.events import Batching
from strandline.followers.run import Follower
from strandline.log.resume import FullRebootstrap, PartialResync
from strandline.model.batch import LogBatch
from strandline.model.cursor import Cursor
from strandline.model.node import Peer, Trouble
from strandline.node.lead.committed_log import ReadableLog
from strandline.node.lead.replica_registry import Progress
from strandline.node.messages import Caller, Feed, Rewind, Topology, Upstream
from strandline.node.node_folder import SNAPSHOTS, Home
from strandline.node.replicate.acks import Telling
from strandline.node.replicate.agreement import stepped_back
from strandline.node.replicate.bootstrap import bring_over
from strandline.node.replicate.incoming import Arrivals
from strandline.node.replicate.log_copy import LogCopy
from strandline.storage.clock import CHANCE, CLOCK, Chance, Clock
from strandline.storage.retry import Backoff

_LOGGER = logging.getLogger(__name__)

RETRIES: Final = Backoff(attempts=1 << 30, base=0.1, ceiling=5.0)
"""How long a replica leaves a primary alone that it could not follow: for ever, and ever more patiently."""

_KEPT_EVERY: Final = 5.0
"""So many seconds apart a replica writes down what is committed, and forgets what its primary has forgotten."""

_AT_ONCE: Final = Batching(window=0.0, bytes=64 << 20)


class Condition(StrEnum):
    """What a replica is doing. The last three last until somebody deals with them."""

    CONNECTING = "connecting"
    BOOTSTRAPPING = "bootstrapping"
    FOLLOWING = "following"
    FENCED = "fenced"
    """It was sent records by a primary of a lower term than it has seen; it goes on with one that is not."""
    GAP = "gap"
    DIVERGED = "diverged"


@final
class ReplicaRole:
    """Follows a primary, one step after another; what it acknowledges is durable here. Reads may come from any thread.

    It resumes at its own position, whatever anybody else remembers. A tail that the primary never had is set aside
    before it goes on. A gap or a divergence stops it, in a state that outlasts restarts, until :meth:`rebootstrap`.
    """

    def __init__(
        self,
        home: Home,
        copy: LogCopy | None,
        connect: Callable[[], Upstream],
        *,
        committed: int,
        knows_committed: bool,
        region: str | None = None,
        poll_seconds: float = 1.0,
        background: bool = True,
        clock: Clock = CLOCK,
        chance: Chance = CHANCE,
    ) -> None:
        """``connect`` finds the primary: ``NotReady`` if there is none that is known.

        ``committed`` is the watermark that is known so far, ``knows_committed`` whether that is all that this node has
        ever shown.
        """
        self.copy = copy
        self._home = home
        self._connect = connect
        self._region = region
        self._poll_seconds = poll_seconds
        self._background = background
        self._clock = clock
        self._chance = chance
        self._upstream: Upstream | None = None
        self._feed: Feed | None = None
        self._follower: Follower | None = None
        self._asked = False
        """Whether somebody asked to build the copy again."""
        self._term = 0
        self._epoch = -1
        self._failures = 0
        self._apply_errors = 0
        self._reported = 0
        """How many of its divergences a primary was told since this node was started."""
        self._heard = self._committed = committed
        """The highest watermark that it was told, and the one up to which its own records are known to be those."""
        self.knows_committed = knows_committed
        """Whether its watermark covers everything that this node has ever shown; before that it shows nothing."""
        self._compared: int | None = None
        """The offset of the last record, while it is not known yet whether that is the primary's."""
        self._telling = Telling(
            self._caller, self._progress, end=self._end, heard=self._commit, poll_seconds=poll_seconds, clock=clock
        )
        self._kept = clock.monotonic()
        """When the watermark was last written down: after a restart its readers see no less than that."""
        self._fresh: float | None = None
        """When it was last known to have everything."""
        self._moved = threading.Condition()
        self.condition = Condition.CONNECTING
        if home.state.trouble is not None:
            self.condition = Condition(home.state.trouble.state)

    # --- following ---------------------------------------------------------------------------------------------

    def step(self) -> float:
        """Do the next thing; returns how many seconds to leave it alone then. Blocks on the network and the disk."""
        if self._home.state.trouble is not None:
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
        """Take what has come from its arrival to its acknowledgement; or wait for something."""
        follower.step()
        while not follower.is_between:
            follower.step()
        self._hear_beat()
        self._failures = 0

    def _retry(self, error: StrandlineError) -> float:
        """Let go of the primary, and try again later."""
        self.disconnect()
        if isinstance(error, LogFailed | LogClosed | DiskFull) and self.copy is not None:
            self._apply_errors += 1
            self.copy.reopen()
        elif isinstance(error, CorruptData):
            self._apply_errors += 1
        self.condition = Condition.FENCED if isinstance(error, Fenced) else Condition.CONNECTING
        pause = RETRIES.pause(self._failures, self._chance.jitter())
        self._failures += 1
        level = logging.INFO if error.retryable else logging.WARNING
        _LOGGER.log(level, "Replica %s tries again in %.1f s: %s", self._home.state.name, pause, error)
        return pause

    def _stop(self, error: Gap | Diverged) -> None:
        self.disconnect()
        condition = Condition.GAP if isinstance(error, Gap) else Condition.DIVERGED
        _LOGGER.error("Replica %s stopped (%s): %s", self._home.state.name, condition, error)
        self._home.remember(
            trouble=Trouble(str(condition), str(error), self._clock.now()),
            divergences=self._home.state.divergences + (condition is Condition.DIVERGED),
        )
        self.condition = condition  # after the reason: who sees that it has stopped can ask why

    def _report(self) -> float:
        """Tell the primary of a divergence, which it cannot see by itself; nothing else is done while it lasts."""
        divergences = self._home.state.divergences
        if self._reported >= divergences:
            return self._poll_seconds
        try:
            upstream = self._connect()
            try:
                self._hear_term(upstream.register(self._caller(), region=self._region).topology.term)
                # Without a position: none of what is here may be the primary's.
                upstream.acknowledge(self._caller(), Progress(0, 0, self._apply_errors, divergences))
            finally:
                upstream.close()
        except StrandlineError as error:
            pause = RETRIES.pause(self._failures, self._chance.jitter())
            self._failures += 1
            _LOGGER.info("Replica %s could not report that it diverged: %s", self._home.state.name, error)
            return pause
        self._reported, self._failures = divergences, 0
        return self._poll_seconds

    def rebootstrap(self) -> None:
        """Deal with what stopped it by building the copy again, from a snapshot of the primary."""
        self.disconnect()
        self.condition = Condition.CONNECTING
        self._asked = True
        self._home.remember(trouble=None)

    def disconnect(self) -> None:
        """Let go of the primary; the next step looks for it again."""
        feed, self._feed, self._follower = self._feed, None, None
        upstream, self._upstream = self._upstream, None
        self._telling.stop()
        if feed is not None:
            feed.close()
        if upstream is not None:
            upstream.close()

    # --- beginning ---------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._upstream = upstream = self._connect()
        registration = upstream.register(self._caller(), region=self._region)
        topology = registration.topology
        self._hear_term(topology.term)
        self._term = topology.term
        self._learn(topology)
        since = self._agree(upstream)
        copy = self.copy
        if copy is None:
            raise AssertionError("after a bootstrap there is a copy")
        copy.term = self._term
        copy.drop_slots()
        # The last record is asked for again, where both retain it: if it is another one there, the two have diverged.
        overlap = since.next - 1 if since.next > max(copy.bounds().first, topology.first) else since.next
        self._compared = None if overlap == since.next else overlap
        # Not before: what was in the way of the primary's records is gone only now.
        self._commit(topology.committed)
        self._know(topology.committed, topology.term_start)
        # Snapshots that this node took when it led are old now: who brought one over may have acknowledged more since.
        self._home.disk.remove_folder(self._home.path(SNAPSHOTS))
        self._adopt(topology.term, topology.term_start, copy.bounds().next)
        self._telling.begin(upstream)
        copy.on_durable = self._telling.durable
        self._feed = upstream.feed(self._caller(), Cursor(since.log_id, overlap))
        arrivals = Arrivals(since.log_id, self._feed, lambda: self._home.state.seen, self._holds)
        follower = Follower(Engine(_AT_ONCE), arrivals, copy, self._telling, self._clock, seen_every=self._poll_seconds)
        follower.begin(since)
        self._follower = follower
        self.condition = Condition.FOLLOWING

    def _holds(self, batch: LogBatch, at: Cursor) -> bool:
        """Whether the record before a position is the primary's; before that is known it is not shown, nor counts."""
        is_same = self.copy is not None and self.copy.holds(batch, at)
        if is_same:
            self._compared = None
        return is_same

    def _commit(self, upto: int) -> None:
        """Everything below is committed on the primary, and so here: but for a record that has to be compared yet."""
        known = upto if self._compared is None else min(upto, self._compared)
        if known > self._committed:
            self._unsettle()
            self._committed = known

    def _unsettle(self) -> None:
        """Note, before the first time that more is shown than is written down, that what is written may be too low."""
        if self._home.state.settled:
            self._home.remember(settled=False)

    def _know(self, committed: int, term_start: int) -> None:
        """A primary whose watermark has passed the beginning of its term knows of everything that was ever committed.

        What this node has shown is among it.
        """
        if committed >= term_start and self._compared is None:
            self.knows_committed = True

    def _agree(self, upstream: Upstream) -> Cursor:
        """Come to a position from which both logs are the same; what is here behind it is set aside."""
        since = None if self.copy is None or self._asked else self.copy.end()
        is_built = False
        while True:
            match upstream.resume(self._caller(), since):
                case PartialResync() if since is not None and self.copy is not None:
                    break
                case Rewind() as answer if since is not None and self.copy is not None:
                    since = stepped_back(since, answer, self.copy, self.copy.bounds())
                case FullRebootstrap(cause) if not is_built:
                    _LOGGER.warning("Replica %s builds its copy of the log (%s).", self._home.state.name, cause)
                    since, is_built = self._bootstrap(upstream), True
                case FullRebootstrap(cause):
                    raise NotReady(f"The primary wants the copy built again that was just built ({cause}).")
                case answer:
                    raise CorruptData(f"A primary answered {answer} to a replica at {since}.")
        if since.next < self.copy.bounds().next:
            self._rewind(since.next)
        return since

    def _rewind(self, to: int) -> None:
        if self.copy is None:
            return
        if to < self._committed:
            raise Diverged(
                f"The primary parts from this replica at offset {to}, and everything below {self._committed} was "
                "committed: nothing was discarded. One of the two must not be here."
            )
        end = self.copy.bounds().next
        aside = self.copy.rewind(to)
        _LOGGER.warning(
            "Replica %s had %d records that the primary never had, from offset %d on; they are in %s.",
            self._home.state.name, end - to, to, aside,
        )  # fmt: skip

    def _bootstrap(self, upstream: Upstream) -> Cursor:
        self.condition = Condition.BOOTSTRAPPING
        cursor = bring_over(upstream, self._caller(), self._home, chance=self._chance)
        former = self.copy
        # From here on this is the copy, whatever happens next. Readers who have the other one go on with that, which
        # is removed only the next time.
        built = LogCopy(self._home, background=self._background, clock=self._clock, chance=self._chance)
        with self._moved:
            # Every record of it is the primary's: what was heard of as committed is so here, from this moment on.
            self._unsettle()
            self.copy, self._committed = built, max(self._committed, self._heard)
            self._moved.notify_all()
        if former is not None:
            former.close()
        self._home.sweep(keep=None if former is None else former.generation)
        self._asked = False
        upstream.end_snapshot(self._caller(), cursor)
        return self.copy.end()  # not the snapshot's: that may tell the term of a record which nobody retains

    # --- hearing and telling -----------------------------------------------------------------------------------

    def _caller(self) -> Caller:
        return Caller(self._home.state.name, self._home.state.seen)

    def _hear_term(self, term: int) -> None:
        seen = self._home.state.seen
        if term < seen:
            raise Fenced(
                f"A primary of term {term} answers, and this replica has seen term {seen}: it is not followed. Point "
                "this replica to the primary of that term."
            )
        if term > seen:
            self._home.hear_term(term, "The primary")

    def _learn(self, topology: Topology) -> None:
        peers = tuple(Peer(member.name, member.region, member.divergences) for member in topology.members)
        self._home.remember(peers=peers, policy=topology.policy, primary=topology.primary)
        self._epoch = topology.epoch
        self._heard = max(self._heard, topology.committed)

    def _adopt(self, term: int, start: int, durable: int) -> None:
        """Note, before anything is acknowledged, that this copy has everything from before the primary's term."""
        if self._home.state.adopted < term and durable >= start:
            self._home.remember(adopted=term)

    def _hear_beat(self) -> None:
        beat = None if self._feed is None else self._feed.beat
        if beat is None or self.copy is None or self._upstream is None:
            return
        self._hear_term(beat.term)
        if beat.term != self._term:
            raise NotReady(f"The primary is of term {beat.term} now, not {self._term}: this replica registers again.")
        if beat.epoch != self._epoch:
            self._learn(self._upstream.topology(self._caller()))
        applied = self.copy.bounds().next
        with self._moved:
            self._commit(beat.committed)
            self._know(beat.committed, beat.term_start)
            now = self._clock.monotonic()
            if applied >= beat.durable:
                self._fresh = now
            self._moved.notify_all()
        if now - self._kept >= _KEPT_EVERY:
            self._kept = now
            self._keep_house(self._upstream)

    def _keep_house(self, upstream: Upstream) -> None:
        """Write down what is committed, and forget what the primary has forgotten."""
        self._home.remember(committed=self._committed)
        if self.copy is not None:
            self.copy.log.trim(min(upstream.topology(self._caller()).first, self.committed))

    def _progress(self, durable: int) -> Progress:
        """What a durable end comes to; noted first, if with it this copy has everything from before a term."""
        beat = None if self._feed is None else self._feed.beat
        if beat is not None and beat.term == self._term:
            self._adopt(beat.term, beat.term_start, durable)
        if self._compared is not None:
            durable = min(durable, self._compared)
        return Progress(durable, durable, self._apply_errors, self._home.state.divergences)

    def _end(self) -> int:
        return 0 if self.copy is None else self.copy.bounds().next

    # --- reading -----------------------------------------------------------------------------------------------

    @property
    def committed(self) -> int:
        """Everything below is here, and satisfies the primary's policy."""
        return 0 if self.copy is None else min(self._committed, self.copy.bounds().next)

    @property
    def highest_shown(self) -> int:
        """Everything below is committed, and what of it is here may have been shown."""
        return self._committed

    @property
    def highest_committed(self) -> int:
        """The highest watermark that it has heard of, whether it has so much or not."""
        return max(self._heard, self._committed)

    def readable(
        self, *, after: Cursor | None = None, max_staleness: float | None = None, timeout: float = 1.0
    ) -> ReadableLog:
        """The log as of now, up to what is committed; nothing that is read here can be taken back.

        ``after`` is a bookmark, as a commit gives it: waits until that is here. ``max_staleness`` waits until this
        replica had everything so many seconds ago or less. ``NotReady`` if it takes longer than ``timeout``, and while
        the copy is being built again; ``Diverged`` if the bookmarked record was lost when the primary was.
        """
        if self.copy is None:
            raise NotReady("This replica has no copy of the log yet: it has to bootstrap first. Ask another node.")
        if not self.knows_committed:
            raise NotReady(
                f"This replica does not know yet how much of its copy is committed: it was not closed in good order, "
                f"and may have shown more than the {self.committed} records of which it knows. Ask again when it "
                "follows a primary, or ask another node."
            )
        if after is not None:
            self._wait(lambda: self.committed >= after.next, timeout, f"offset {after.next - 1} is not here yet")
        if max_staleness is not None:
            self._wait(lambda: self.staleness <= max_staleness, timeout, f"it is {self.staleness:.1f} s behind")
        copy = self.copy  # not before: while it waited, another one may have taken its place
        if after is not None:
            found = copy.term_at(after.next - 1)
            if after.log_id != copy.log.log_id or (after.term and found is not None and found != after.term):
                raise Diverged(
                    f"The record before {after.next} is of term {found} here, and the bookmark says {after.term}: it "
                    "was lost with its primary, or is of another log."
                )
        return ReadableLog(copy.log, lambda: self.committed, self._wait_past)

    @property
    def staleness(self) -> float:
        """How many seconds ago this replica was last known to have everything; infinite if never."""
        return float("inf") if self._fresh is None else self._clock.monotonic() - self._fresh

    def _wait(self, is_so: Callable[[], bool], timeout: float, why: str) -> None:
        if self.condition is Condition.BOOTSTRAPPING:
            raise NotReady("This replica builds its copy again, and serves no reads that ask for more than it has.")
        with self._moved:
            if not self._moved.wait_for(is_so, timeout):
                raise NotReady(f"The wait of {timeout:g} s is over, and {why}: ask again, or ask the primary.")

    def _wait_past(self, past: int, timeout: float) -> bool:
        with self._moved:
            return self._moved.wait_for(lambda: self.committed > past, timeout)

    def close(self) -> None:
        """Let go of the primary; the copy is the node's to close."""
        self.disconnect()
