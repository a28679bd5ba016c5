"""Roles of a node over one copy of the log, and the transitions between them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import final

from strandline.compat.spool.migrate import folder_of
from strandline.errors import InvalidInput, NotReady, StorageError, Unsupported
from strandline.formats.wal.folder import Kept
from strandline.log.wal.log import WalLog
from strandline.log.wal.slots import write_kept
from strandline.log.wal.snapshot import fill
from strandline.model.segments import COLD_FILE
from strandline.model.snapshot import Snapshot
from strandline.node.elect.candidacy import Candidacy
from strandline.node.lead.leadership import Leadership
from strandline.node.lead.primary import PrimaryRole
from strandline.node.messages import ElectionReport, Upstream
from strandline.node.node_folder import NodeFolder
from strandline.node.options import NodeOptions
from strandline.node.replicate.log_copy import KIND, LogCopy, export_log
from strandline.node.replicate.replica import ReplicaRole
from strandline.storage.clock import CHANCE, CLOCK, Chance, Clock
from strandline.storage.files import exists
from strandline.storage.lease import Lease

_LOGGER = logging.getLogger(__name__)


@final
class Roles:
    """The current role of a node, and its copy of the log. One thread changes it, any thread reads it.

    Checks every promotion: a node leads only if it has everything committed, and from then on nothing of a lower term
    is accepted or acknowledged.
    """

    def __init__(
        self,
        node_folder: NodeFolder,
        options: NodeOptions,
        *,
        connect: Callable[[str], Upstream],
        lease: Lease | None,
        background: bool = True,
        clock: Clock = CLOCK,
        chance: Chance = CHANCE,
    ) -> None:
        """Begin as a replica, with the copy in the folder, if any."""
        self.lease = lease
        self._node_folder = node_folder
        self._options = options
        self._reach = connect
        self._background = background
        self._clock = clock
        self._chance = chance
        self._candidacy = Candidacy(node_folder, options, connect)
        self._led: LogCopy | None = None
        """The copy of the primary role."""
        copy, state = self._open_copy() if node_folder.state.generation else None, node_folder.state
        # Readers saw no more than the copy: if all of it is committed, the watermark covers that.
        knows = copy is not None and (state.settled or state.committed >= copy.bounds().next)
        self.now: PrimaryRole | ReplicaRole = self._follower(copy, state.committed, knows_committed=knows)

    def _open_copy(self) -> LogCopy:
        return LogCopy(self._node_folder, background=self._background, clock=self._clock, chance=self._chance)

    @property
    def copy(self) -> LogCopy | None:
        """The copy of the log, in either role."""
        role = self.now
        return role.copy if isinstance(role, ReplicaRole) else self._led

    def _follower(self, copy: LogCopy | None, committed: int, *, knows_committed: bool) -> ReplicaRole:
        return ReplicaRole(
            self._node_folder,
            copy,
            self._find_primary,
            committed=committed,
            knows_committed=knows_committed,
            region=self._options.region,
            poll_seconds=self._options.poll_seconds,
            background=self._background,
            clock=self._clock,
            chance=self._chance,
        )

    def _find_primary(self) -> Upstream:
        url = self._options.upstream
        if self.lease is not None:
            state = self.lease.look()
            holder = None if state is None else state.holder
            name, _, url = ("", "", None) if holder is None else holder.partition(" ")
            if name == self._node_folder.state.name:
                url = None  # an earlier run of this node
        if not url:
            raise NotReady(f"{self._node_folder.state.name} knows of no primary now.")
        return self._reach(url)

    # --- transitions -------------------------------------------------------------------------------------------

    def step_down(self, primary: PrimaryRole, why: str) -> None:
        """Stop leading, and follow."""
        primary.step_down(why)
        _LOGGER.warning("Node %s leads no more, after term %d.", self._node_folder.state.name, primary.term)
        if self.lease is not None:
            self.lease.release()
        self.settle()
        committed, knows = primary.committed, primary.knows_committed
        if self._led is not None:
            self._led.reopen()  # queued appends are written or refused, and a failed log is usable again
        self.now = self._follower(self._led, committed, knows_committed=knows)

    def settle(self) -> None:
        """Store the watermark up to which readers were shown records, at the end of a role.

        If the disk refuses, the node serves no reads after a restart until a primary tells it the watermark.
        """
        role = self.now
        committed = role.committed if isinstance(role, PrimaryRole) else role.highest_shown
        try:
            self._node_folder.remember(committed=committed, settled=role.knows_committed)
        except StorageError as error:
            _LOGGER.warning("Node %s could not store its watermark: %s", self._node_folder.state.name, error)

    def lead_leased(self, lease: Lease, *, force: bool) -> PrimaryRole:
        """Lead in the term of a lease that was just acquired; raises, and releases it, if this node must not."""
        term = lease.ensure()
        if self._node_folder.state.generation and self._node_folder.state.led == term - 1:
            # Stored first: a crash from here on must not make it forget that it led. Until then the lease's holder
            # tells the same.
            self._node_folder.remember(led=term)
        try:
            return self.lead_checked(term, lease, force=force)
        except BaseException:
            lease.release()
            raise

    def lead_checked(self, term: int, lease: Lease | None, *, force: bool) -> PrimaryRole:
        """Lead in this term; raises if this node must not."""
        # There was no term in between: nobody else can have led.
        continues = lease is not None and self._node_folder.state.led == term
        if self.copy is not None:
            self.copy.fence(term, "The lease" if lease is not None else self._node_folder.state.name)
        mine = self.report()
        if not (continues and mine.unhealthy is None):
            self._candidacy.check(mine, force=force)
        return self.lead(term, lease, continues=continues)

    def lead(self, term: int, lease: Lease | None, *, continues: bool = False) -> PrimaryRole:
        """Lead in this term; the caller has made sure that nothing committed is missing here.

        ``continues`` if nobody else can have led since this node did.
        """
        role, copy = self.now, self.copy
        if copy is None:
            raise NotReady(f"{self._node_folder.state.name} has no copy of the log yet.")
        committed = 0
        if isinstance(role, ReplicaRole):
            role.close()
            committed = role.highest_committed
        settled = continues and self._node_folder.state.settled
        led_since = (continues and self._node_folder.state.led_since) or term
        self._node_folder.remember(
            seen=term, adopted=term, led=term, led_since=led_since, committed=committed, settled=False, trouble=None,
            primary=self._node_folder.state.name, policy=str(self._options.commit_policy),
        )  # fmt: skip
        primary = PrimaryRole(
            self._node_folder,
            copy.lead(),
            Leadership(term, lease),
            self._options,
            exports={KIND: self._export},
            settled=settled,
            clock=self._clock,
        )
        primary.leadership.check("it does not lead")
        self._led, self.now = copy, primary
        return primary

    # --- reports -----------------------------------------------------------------------------------------------

    def check_newest(self) -> None:
        """``NotReady`` if a reachable node has more than this one, which led last."""
        self._candidacy.check_newest(self.report())

    def is_behind(self) -> bool:
        """Whether a reachable node has more: then that one should get the lease."""
        return self._candidacy.is_behind(self.report())

    def _export(self, folder: str) -> Snapshot:
        return export_log(self.log(), folder, node_folder=self._node_folder, clock=self._clock, chance=self._chance)

    def log(self) -> WalLog:
        """The copy's log; ``NotReady`` if there is none."""
        if self.copy is None:
            raise NotReady(f"{self._node_folder.state.name} has no copy of the log yet.")
        return self.copy.log

    def report(self) -> ElectionReport:
        """This node's report for elections."""
        state, role = self._node_folder.state, self.now
        durable = 0 if self.copy is None else self.copy.bounds().next
        trouble = None if state.trouble is None else state.trouble.state
        committed = role.highest_committed if isinstance(role, ReplicaRole) else role.committed
        adopted = 0 if self.copy is None else state.adopted
        return ElectionReport(state.name, state.seen, adopted, durable, max(committed, state.committed), trouble)


def create_log(node_folder: NodeFolder, lease: Lease | None, *, clock: Clock, chance: Chance) -> None:
    """Create a new log on a node that has none."""
    _refuse_second(node_folder, lease)
    generation = node_folder.next_generation()
    WalLog.open(
        node_folder.data(generation), background=False, disk=node_folder.disk, clock=clock, chance=chance
    ).close()
    node_folder.remember(generation=generation)


def take_over_log(node_folder: NodeFolder, source: str, lease: Lease | None, *, clock: Clock, chance: Chance) -> None:
    """Begin the log of a node that has none with a copy of a write-ahead log: its records, terms, writers and slots.

    The log keeps its identity, so that cursors of it stay valid, and the original stays as it is. After a crash the
    node has all of it, or nothing and can begin again. ``Fenced`` while somebody has the original open for writing,
    ``Unsupported`` if it has a cold tier.
    """
    _refuse_second(node_folder, lease)
    folder = folder_of(source, migrate=False, disk=node_folder.disk, clock=clock, chance=chance)
    if exists(f"{folder}/{COLD_FILE}", disk=node_folder.disk):
        raise Unsupported(
            f"The write-ahead log in {folder} has a cold tier ({COLD_FILE}), which the log of a primary and its "
            "replicas cannot have yet: what only segments have would be out of reach. Nothing was changed."
        )
    generation = node_folder.next_generation()
    copy = node_folder.data(generation)
    with WalLog.open(folder, create=False, background=False, disk=node_folder.disk, clock=clock, chance=chance) as log:
        node_folder.disk.make_folders(copy)
        fill(log, copy)
        write_kept(copy, Kept(log.log_id, log.bounds().first, tuple(log.slots())), disk=node_folder.disk)
        node_folder.disk.sync_folder(copy)
        node_folder.disk.sync_folder(node_folder.folder)
        # Its terms count as led here: the node goes on in a later one or, without a lease, in the same.
        node_folder.remember(generation=generation, seen=log.term, adopted=log.term, led=log.term)


def _refuse_second(node_folder: NodeFolder, lease: Lease | None) -> None:
    """Refuse to begin a log where there is one: its nodes share the lease."""
    state = None if lease is None else lease.look()
    if state is not None and state.epoch > node_folder.state.led:
        raise InvalidInput(
            f"There has been a primary of this log before ({state.holder or 'released'}, term {state.epoch}): start "
            "this node without creating or taking over a log, and it follows. For another log, use another lease."
        )
