"""The cold tier of a replicated log, as one node uses it: every node reads segments, the primary writes them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final, final
from uuid import UUID

from strandline.errors import LogClosed, NotReady
from strandline.log.contract import Slot
from strandline.log.slots.table import TableSlot
from strandline.log.topic.contract import Topic
from strandline.log.wal.slots import WalSlots
from strandline.model.retention import TIER_SLOT, SlotState
from strandline.model.segments import COLD_FILE, ColdTier
from strandline.node.elect.node_lease import Leadership
from strandline.node.lead.committed_log import CommittedLog
from strandline.node.lead.primary import PrimaryRole
from strandline.node.lead.slots import ConsumerSlots
from strandline.node.options import TierSettings
from strandline.storage.closing import Closing
from strandline.storage.env import SYSTEM, Env
from strandline.storage.objects.store import ObjectStore
from strandline.storage.worker_thread import WorkerThread
from strandline.tier.attachment import ColdAccess, ColdCell, open_events
from strandline.tier.claim import CLAIM_FILE, ClaimCell, TierClaim
from strandline.tier.copy.tierer import Tierer
from strandline.tier.metadata.manager import MetadataManager
from strandline.tier.opening import partition_of
from strandline.tier.read.cold_reader import ColdReader
from strandline.tier.read.tiered_log import TieredLog
from strandline.tier.read.tiered_slots import TierableSlots, TieredSlots

_LOGGER = logging.getLogger(__name__)
_CLOSE_SECONDS: Final = 2.0
"""Seconds that closing waits for the store."""


@final
class NodeColdTier(Closing):
    """The cold tier of a node's log. Opened on first use; thread-safe.

    The store holds the segments of a log below its id, the description of its cold tier, and who claimed it.
    """

    def __init__(
        self,
        store: ObjectStore,
        log_id: UUID,
        settings: TierSettings,
        *,
        open_topic: Callable[[ColdTier, bool], Topic] | None = None,
        background: bool = True,
        env: Env = SYSTEM,
    ) -> None:
        """In this store; ``open_topic(cold, create)`` opens the topic of segment events, by default by its address."""
        self.log_id = log_id
        self.settings = settings
        self.cell = ColdCell(store, log_id, path=f"{log_id}/{COLD_FILE}", env=env)
        self._store = store
        access = ColdAccess(settings.options, settings.events_options, env)
        self._open_topic = open_topic or (lambda cold, create: open_events(cold, access, create=create))
        self._background = background
        self._env = env
        self._lock = threading.Lock()
        self._opened = ExitStack()
        self._closed = False
        self._known: tuple[MetadataManager, ColdTier] | None = None
        self._log: TieredLog | None = None

    def attach(self) -> None:
        """Durably record where the cold tier is, and create the topic of its events. Idempotent."""
        store, settings = self._store.url, self.settings
        events = f"{store.rstrip('/')}/events" if settings.events is None else settings.events
        cold = ColdTier(self.log_id, store, events, settings.partitions, "")
        self._open_topic(cold, True).close()
        self.cell.attach(store, events, partitions=settings.partitions)

    def _events(self) -> tuple[MetadataManager, ColdTier]:
        """The manager that follows the events of the log's segments, for readers and the tierer."""
        with self._lock:
            if self._closed:
                raise LogClosed(f"The cold tier in {self._store.url} was closed with its node: start that again.")
            if self._known is None:
                cold = self.cell.read()
                if cold is None:
                    raise NotReady(
                        f"The cold tier in {self._store.url} is not attached yet: the primary does that when it "
                        "reaches the store."
                    )
                with ExitStack() as opened:
                    topic = self._open_topic(cold, False)
                    opened.callback(topic.close)
                    manager = MetadataManager.start(topic, background=self._background, env=self._env)
                    opened.callback(manager.close)
                    manager.reconcile_assignment([manager.metadata_partition(partition_of(cold))])
                    self._opened, self._known = opened.pop_all(), (manager, cold)
            return self._known

    def log(self, hot: CommittedLog, primary: Callable[[], PrimaryRole | None]) -> TieredLog:
        """The log over both tiers; ``hot`` gives the node's copy as of each call, ``primary`` its role if it leads."""
        if self._log is None:

            def tier_slot() -> SlotState | None:
                role = primary()  # only a primary has it
                slots = () if role is None else role.log.slots.list()
                return next((slot for slot in slots if slot.name == TIER_SLOT), None)

            self._log = TieredLog(hot, self.cell, lambda _: self._reader(), tier_slot=tier_slot, role=primary)
        return self._log

    def _reader(self) -> ColdReader:
        manager, cold = self._events()
        return ColdReader(manager, self._store, partition_of(cold), self._env)

    def slots(self, primary: PrimaryRole, log: TieredLog) -> TieredSlots:
        """The slots of consumers on the primary, which pin records in either tier."""

        def first() -> int:
            # A former primary may be about to expire segments, and knows only its own slots. After this claim it cannot
            # decide to; what it decided before was announced.
            self._claim(primary).take()
            return log.bounds().first

        return TieredSlots(primary.slots, self.cell, first)

    def tierer(self, primary: PrimaryRole) -> Tierer:
        """The tierer of a primary, for as long as that leads."""
        self.attach()
        manager, cold = self._events()
        slots = TiererSlots(primary.log.slots, primary.leadership, self._claim(primary))
        settings = self.settings
        return Tierer(
            CommittedLog(primary.watermark.readable, lambda: slots),
            manager,
            self._store,
            name=cold.name,
            target=settings.target,
            linger=settings.linger,
            retention=settings.retention,
            announced=self.cell,
            env=self._env,
        )

    def _claim(self, primary: PrimaryRole) -> ClaimCell:
        claim = TierClaim(self.log_id, primary.term, primary.name)
        return ClaimCell(self._store, f"{self.log_id}/{CLAIM_FILE}", claim, env=self._env)

    def close(self) -> None:
        """Stop following the events. Idempotent. A store that does not answer holds up a thread, not the node."""
        self._closed = True
        if not self._background:
            self._close()
            return
        closing = WorkerThread(self._close, name="strandline-tier-closing")
        closing.start()
        closing.join(_CLOSE_SECONDS)

    def _close(self) -> None:
        with self._lock:
            opened, self._opened, self._known = self._opened, ExitStack(), None
        opened.close()


@final
class TiererSlots(ConsumerSlots, TierableSlots):
    """The slots that a primary's tierer sees, as they are stored: its own, and those of consumers.

    Its own is in the primary's log; the cell in the cold tier's store fences it by term. Replicas read the hot tier
    only, and pin no segments.
    """

    def __init__(self, table: WalSlots, leadership: Leadership, claim_cell: ClaimCell) -> None:
        """``claim_cell`` is the claim of this primary, in its term."""
        super().__init__(table, leadership)
        self._claim_cell = claim_cell

    @contextmanager
    def _changing(self) -> Iterator[WalSlots]:
        self.leadership.check("nothing was tiered")
        yield self.table

    def _is_shown(self, state: SlotState) -> bool:
        return state.name == TIER_SLOT or super()._is_shown(state)

    def _stored(self, name: str) -> str:
        return name

    def _shown(self, state: SlotState) -> SlotState:
        return state

    def claim(self, name: str, holder: str) -> TableSlot:
        """Become the holder of the tierer's slot, and claim the cold tier for this term."""
        claimed = super().claim(name, holder)
        self._claim_cell.take()
        return claimed

    def touch(self, name: str, epoch: int) -> None:
        """``Fenced`` unless this node leads, and no primary of a later term has claimed the cold tier."""
        super().touch(name, epoch)
        self._claim_cell.check()

    def begin_at(self, offset: int) -> int:
        """Let this copy of the log begin where its cold tier does, but not above a slot; returns where it begins.

        A former primary trimmed further than this node had, and then expired the segments.
        """
        with self._changing() as table:
            return table.begin_at(offset)

    def retire(self, slot: Slot, segments: Collection[UUID]) -> None:
        """Durably note segments before they are deleted, unless a primary of a later term has claimed the cold tier."""
        super().touch(slot.name, slot.epoch)
        self._claim_cell.retire(segments)

    def retired(self) -> Collection[UUID]:
        """The segments that this primary or a former one has noted, and may not have deleted yet."""
        return self._claim_cell.check().retired
