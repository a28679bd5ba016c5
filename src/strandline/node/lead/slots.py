"""Slots of a primary: those of consumers, under names of their own in one table; and the lag and metrics of all."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Final, final

from strandline.errors import AlreadyExists, Fenced, InvalidInput, LogClosed, NotFound, NotReady, SlotInvalid
from strandline.log.slots.rules import check_name
from strandline.log.slots.slot_lag import SlotLag, records_kept, slot_lags
from strandline.log.slots.slot_metrics import MeasuredSlot, SlotMetrics
from strandline.log.slots.table import TableSlot, named
from strandline.log.slots.trimming import floor as floor_of
from strandline.log.wal.log import WalLog
from strandline.log.wal.read.reading import WalListing
from strandline.log.wal.slots import WalSlots
from strandline.model.addresses import CONSUMER_SUFFIX
from strandline.model.arguments import checked
from strandline.model.cursor import Cursor
from strandline.model.retention import TIER_SLOT, SlotState
from strandline.node.elect.node_lease import Leadership
from strandline.node.lead.replicas import ReplicaRegistry
from strandline.node.messages import NodeSlot, NodeSlots, SlotKind
from strandline.node.options import NodeOptions
from strandline.storage.metrics import (
    DIVERGENCES,
    REPLICA_APPLY_ERRORS,
    REPLICA_LAG_BYTES,
    REPLICA_LAG_RECORDS,
    REPLICA_LAG_SECONDS,
    REPLICA_SILENT_SECONDS,
    REPLICA_SLOT_PINS,
    REPLICATION_LAG,
    SAFE_REPLAY,
)

MOST_SLOTS: Final = 1000
"""Most slots of consumers: a change of one slot writes all of them again."""

_UNCHANGED: Final = "no slot was changed"


@checked
class ConsumerSlots:
    """The slots of consumers in the table of a primary, while it leads; without those of replicas.

    Satisfies :class:`~strandline.log.contract.Slots`. ``NotReady`` if this node no longer leads: ``Fenced`` tells a
    holder that another one has its slot.
    """

    def __init__(self, table: WalSlots, leadership: Leadership) -> None:
        self.table = table
        self.leadership = leadership

    @contextlib.contextmanager
    def _changing(self) -> Iterator[WalSlots]:
        """The table, for a change of it within the block; raises if this node no longer leads."""
        try:
            self.leadership.check(_UNCHANGED)
        except Fenced as error:
            raise NotReady(str(error)) from error
        try:
            yield self.table
        except LogClosed as error:  # the node stepped down in between
            raise NotReady(f"This node is not the primary any more: {_UNCHANGED}. Call the new primary.") from error
        except (NotFound, AlreadyExists, Fenced, SlotInvalid) as error:  # with the name that its consumer knows
            raise type(error)(str(error).replace(f"{CONSUMER_SUFFIX}'", "'")) from error

    def _is_shown(self, state: SlotState) -> bool:
        return state.name.endswith(CONSUMER_SUFFIX)

    def _stored(self, name: str) -> str:
        """The name in the table."""
        return check_name(name) + CONSUMER_SUFFIX

    def _shown(self, state: SlotState) -> SlotState:
        """The slot under the name that its holder knows."""
        return replace(state, name=state.name.removesuffix(CONSUMER_SUFFIX))

    def create(
        self, name: str, position: int, *, lifetime: float | None = None, retained_from: int | None = None
    ) -> SlotState:
        """Durably create a slot that pins everything from ``position`` on, in either tier.

        ``retained_from`` is the first offset of the log's cold tier, if it has one: a slot may be there, too.
        ``InvalidInput`` beyond the most that a log has.
        """
        stored = self._stored(name)
        if stored.endswith(CONSUMER_SUFFIX) and len(self.list()) >= MOST_SLOTS:
            raise InvalidInput(f"The log has {MOST_SLOTS:,} slots, which is the most: drop one that nobody needs.")
        with self._changing() as table:
            return self._shown(table.create(stored, position, lifetime=lifetime, retained_from=retained_from))

    def claim(self, name: str, holder: str) -> TableSlot:
        """Durably become the slot's holder; another one is fenced."""
        with self._changing() as table:
            return TableSlot(self, name, holder, table.claim(self._stored(name), holder).epoch)

    def reset(self, name: str, position: int, *, retained_from: int | None = None) -> SlotState:
        """Durably move a slot and make it valid again; its holder is fenced."""
        with self._changing() as table:
            return self._shown(table.reset(self._stored(name), position, retained_from=retained_from))

    def drop(self, name: str) -> None:
        """Durably remove a slot."""
        with self._changing() as table:
            table.drop(self._stored(name))

    def touch(self, name: str, epoch: int) -> None:
        """Keep a slot alive."""
        with self._changing() as table:
            table.touch(self._stored(name), epoch)

    def advance(self, name: str, holder: str, epoch: int, to: Cursor) -> None:
        """Move a slot up; written before the log trims."""
        with self._changing() as table:
            table.advance(self._stored(name), holder, epoch, to)

    def flush(self) -> None:
        """Write positions that are only in memory so far."""
        with self._changing() as table:
            table.flush()

    def get(self, name: str) -> SlotState:
        """One slot, or ``NotFound``."""
        return named(self.list(), name)

    def list(self) -> Sequence[SlotState]:
        """The slots, by name."""
        return [self._shown(state) for state in self.table.list() if self._is_shown(state)]

    def floor(self) -> int | None:
        """The lowest position that is still needed."""
        return floor_of(self.list())

    def resume(self, name: str, holder: str, former: int) -> TableSlot:
        """Resume as the slot's holder after a failover, by a claim on the former primary, of epoch ``former``.

        ``Fenced`` if it was claimed or reset since, or if a later claim is known.
        """
        with self._changing() as table:
            resumed = table.resume(self._stored(name), holder, former)
        return TableSlot(self, name, holder, resumed.epoch)

    def copies(self) -> tuple[SlotState, ...]:
        """All slots of consumers as they are stored, for replicas to keep."""
        return tuple(self.table.consumers())


# --- lag and metrics -------------------------------------------------------------------------------------------

_OF_SLOTS = (REPLICA_LAG_RECORDS, REPLICA_LAG_BYTES, REPLICA_LAG_SECONDS, REPLICA_SILENT_SECONDS, REPLICA_SLOT_PINS)


def node_slots(log: WalLog, options: NodeOptions, *, committed: int, now: int) -> NodeSlots:
    """All slots of a primary's log at ``now`` (microseconds), for operators.

    Consumers are measured against the commit watermark, which is all that they can read, replicas against the durable
    end.
    """
    states = list(log.slots.list())  # before the end: then no slot is ahead of it
    listing, retention, limits = WalListing(log, log.bounds(), now), options.retention_policy, options.slot_limits
    lags = slot_lags(listing, states, pins={}, retention=retention, limits=limits, now=now)
    kept = records_kept(listing, lags, pins={}, retention=retention)
    return NodeSlots(tuple(_shown(lag, committed) for lag in lags), retention, limits, kept)


def _shown(lag: SlotLag, committed: int) -> NodeSlot:
    state = lag.state
    kind = kind_of(state.name)
    if kind is not SlotKind.CONSUMER:
        return NodeSlot(kind, lag)
    lag = replace(lag, state=replace(state, name=state.name.removesuffix(CONSUMER_SUFFIX)))
    if records := max(0, committed - state.position):
        return NodeSlot(kind, replace(lag, records_behind=records))
    return NodeSlot(kind, replace(lag, records_behind=0, bytes_behind=0, seconds_behind=0.0))


def kind_of(name: str) -> SlotKind:
    """The kind of a slot by its name in the table of a primary.

    >>> kind_of("b"), kind_of("billing.consumer"), kind_of("strandline-tier")
    (<SlotKind.REPLICA: 'replica'>, <SlotKind.CONSUMER: 'consumer'>, <SlotKind.TIER: 'tier'>)
    """
    if name.endswith(CONSUMER_SUFFIX):
        return SlotKind.CONSUMER
    return SlotKind.TIER if name == TIER_SLOT else SlotKind.REPLICA


@final
class PrimaryMetrics:
    """The metrics of all slots, and of each replica, also of one that is not registered any more. Safe in threads."""

    def __init__(self, log: WalLog) -> None:
        """Metrics of a primary's log; :meth:`end` removes them all."""
        self._log = log
        self._names: frozenset[str] = frozenset()
        self._slots = SlotMetrics(str(log.log_id))
        self._ended = False
        self._lock = threading.Lock()

    def measure(self, registry: ReplicaRegistry, shown: Sequence[NodeSlot]) -> None:
        """Set the metrics of these slots and replicas, and remove those of others, which are gone."""
        with self._lock:
            if self._ended:
                return
            log_id = str(self._log.log_id)
            names, others = set(registry.replicas), {}
            for kind, lag in shown:
                found = MeasuredSlot(lag.records_behind, lag.bytes_behind, lag.seconds_behind, lag.state.pins)
                if kind is not SlotKind.REPLICA:
                    others[lag.state.name] = found
                    continue
                names.add(lag.state.name)
                for metric, number in zip(_OF_SLOTS, (*found[:3], lag.seconds_since_seen, found.pins), strict=True):
                    metric.labels(log_id, lag.state.name).set(number)
            REPLICATION_LAG.labels(log_id).set(registry.lag)
            SAFE_REPLAY.labels(log_id).set(registry.safe_replay or 0)
            for each in registry.replicas.values():
                DIVERGENCES.labels(log_id, each.name).set(each.divergences)
                REPLICA_APPLY_ERRORS.labels(log_id, each.name).set(each.apply_errors)
            self._keep(names)
            self._slots.measure(self._log.bounds(), floor_of([lag.state for _, lag in shown]), others)

    def forget(self, name: str) -> None:
        """Remove those of one replica, which has no slot any more."""
        with self._lock:
            self._keep(self._names - {name})

    def end(self) -> None:
        """Remove all of them for good: this node no longer measures."""
        with self._lock:
            self._ended = True
            self._keep(frozenset())
            self._slots.end()

    def _keep(self, names: AbstractSet[str]) -> None:
        for name in self._names - names:
            for metric in (*_OF_SLOTS, DIVERGENCES, REPLICA_APPLY_ERRORS):
                with contextlib.suppress(KeyError):  # it has no such metric
                    metric.remove(str(self._log.log_id), name)
        self._names = frozenset(names)
