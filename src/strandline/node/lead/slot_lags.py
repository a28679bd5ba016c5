"""Slots of a primary with their lag, and their metrics: those of consumers, of replicas and of the tierer."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import final

from strandline.log.slots.slot_lag import SlotLag, records_kept, slot_lags
from strandline.log.slots.slot_metrics import MeasuredSlot, SlotMetrics
from strandline.log.slots.trimming import floor
from strandline.log.wal.log import WalLog
from strandline.log.wal.read.reading import WalListing
from strandline.model.addresses import CONSUMER_SUFFIX
from strandline.model.retention import TIER_SLOT
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
            self._slots.measure(self._log.bounds(), floor([lag.state for _, lag in shown]), others)

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
