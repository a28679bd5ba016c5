"""A log and all its slots at one moment: what each slot has not passed, and what it pins."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from uuid import UUID

from strandline.errors import StrandlineError
from strandline.log.lag import LogLag, lag_of
from strandline.log.object.head.head_log import HeadListing
from strandline.log.object.log import ObjectLog
from strandline.log.object.maintain.trimmer import TrimResult
from strandline.log.read.value_format import named_versions
from strandline.log.slots.slot_lag import records_kept, slot_lags
from strandline.log.slots.slot_metrics import MeasuredSlot, SlotMetrics
from strandline.log.slots.trimming import floor as lowest
from strandline.log.slots.trimming import pending_positions
from strandline.log.wal.read.reading import WalListing, WalReader
from strandline.model.cursor import SECOND, Bounds
from strandline.model.head import Pin
from strandline.model.retention import FOREVER, NO_LIMITS, Retention, SlotLimits, SlotState
from strandline.node.flight.client.remote_log import RemoteLog
from strandline.node.messages import NodeSlot, SlotKind
from strandline.opening import OpenedLog
from strandline.storage.metrics import PIPELINE_LAG_BYTES, PIPELINE_LAG_RECORDS, PIPELINE_LAG_SECONDS
from strandline.tier.read.tiered_log import hot_tier

_AS_WRITTEN: Final = (
    "Positions are as the process that writes the log last stored them: a consumer may be further by now."
)


@dataclass(frozen=True, slots=True)
class LogState:
    """A log and all its slots at one moment."""

    url: str
    log_id: UUID
    bounds: Bounds
    slots: tuple[NodeSlot, ...]
    now: int
    """The moment, in microseconds."""
    retention: Retention | None = FOREVER
    """None if the log does not tell: its writer, or its node, decides."""
    limits: SlotLimits = NO_LIMITS
    records_kept: int | None = None
    """What the next trim would delete if the slots that pin the floor were up to date; None if it deletes nothing."""
    pins: Mapping[str, Pin | None] = field(default_factory=dict)
    """Slots that are being created or moved, with what each pins meanwhile."""
    note: str | None = None
    """What a reader of the positions has to know."""
    values: str | None = None
    """The format of the values, if the log names one."""

    @property
    def floor(self) -> int | None:
        """The lowest position that a slot still needs; None without any."""
        return lowest([slot.lag.state for slot in self.slots], pending_positions(self.pins.values()))

    @property
    def floor_without(self) -> int | None:
        """Where the floor would be without the slots that pin it."""
        floor, pending = self.floor, pending_positions(self.pins.values())
        others = [slot.lag.state for slot in self.slots if slot.lag.state.position != floor]
        return lowest(others, [position for position in pending if position != floor])

    @property
    def creating(self) -> dict[str, int]:
        """Slots without a cell yet, with the offset that each pins."""
        known = {slot.lag.state.name for slot in self.slots}
        return {name: pin.position for name, pin in self.pins.items() if pin is not None and name not in known}

    def fields(self) -> dict[str, Any]:
        """The fields of ``--json``."""
        return {
            "url": self.url,
            "log_id": str(self.log_id),
            "first": self.bounds.first,
            "next": self.bounds.next,
            "sealed": self.bounds.sealed,
            "floor": self.floor,
            "floor_without": self.floor_without,
            "slots": [slot_fields(slot, self.now) for slot in self.slots],
            "records_kept": self.records_kept,
            "retention": None if self.retention is None else str(self.retention),
            "lag_bytes": self.limits.lag_bytes or None,
            "idle_seconds": self.limits.idle_seconds or None,
            "creating": self.creating,
            "note": self.note,
            "values": self.values,
        }


def slot_fields(slot: NodeSlot, now: int) -> dict[str, Any]:
    """A slot with its lag as fields of ``--json``, wherever one is shown. None: does not apply, or is not known."""
    lag, state, gone = slot.lag, slot.lag.state, slot.lag.state.invalid
    fields = {
        "slot": state.name,
        "kind": slot.kind,
        "position": state.position,
        "holder": state.holder,
        "epoch": state.epoch,
        "invalid": None if gone is None else str(gone.reason),
        "invalid_for": None if gone is None else max(0.0, (now - gone.at) / SECOND),
        "records_behind": lag.records_behind,
        "bytes_behind": lag.bytes_behind,
        "seconds_behind": lag.seconds_behind,
        "seconds_since_seen": lag.seconds_since_seen,
        "pins_floor": lag.pins_floor,
        "retained_bytes": lag.retained,
        "bytes_left": lag.bytes_left,
        "idle_left": lag.seconds_left,
        "expires_in": lag.expires_in,
        "pending": lag.pending,
    }
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in fields.items()}


def log_state(log: OpenedLog, now: int) -> LogState:
    """The current lag of the log and its slots. Of an object log, as far as its own tier retains it."""
    hot = hot_tier(log)
    values = named_format(hot)
    if isinstance(hot, RemoteLog):
        found = hot.slot_lags()
        decided = found.retention, found.limits, found.records_kept
        return LogState(hot.url, hot.log_id, hot.bounds(), found.slots, now, *decided, values=values)
    states = list(hot.slots.list())  # before the end: then no slot is ahead of it
    if isinstance(hot, ObjectLog):
        head, identity = hot.head(), hot.identity
        retention, limits = identity.retention, identity.limits
        seen = measured(log, HeadListing(head, hot.chunks, now), states, head.slots, retention, limits)
    else:
        seen = measured(log, WalListing(hot, hot.bounds(), now), states, {}, None)  # its writer knows the retention
    note = _AS_WRITTEN if states and isinstance(hot, WalReader) else None
    return replace(seen, note=note, values=values)


def measured(
    log: OpenedLog,
    listing: HeadListing | WalListing,
    states: Sequence[SlotState],
    pins: Mapping[str, Pin | None],
    retention: Retention | None,
    limits: SlotLimits = NO_LIMITS,
) -> LogState:
    """The lag of slots against the batches of a log."""
    now = listing.now
    found = slot_lags(listing, states, pins=pins, retention=retention, limits=limits, now=now)
    kept = None if retention is None else records_kept(listing, found, pins=pins, retention=retention)
    slots = tuple(NodeSlot(SlotKind.CONSUMER, each) for each in found)
    return LogState(log.url, log.log_id, listing.bounds, slots, now, retention, limits, kept, pins)


def measure_slots(metrics: SlotMetrics, seen: LogState) -> None:
    """Set the metrics of a log and its slots as they were seen."""
    measured = {
        lag.state.name: MeasuredSlot(
            lag.records_behind, lag.bytes_behind, lag.seconds_behind, lag.state.invalid is None
        )
        for _, lag in seen.slots
    }
    metrics.measure(seen.bounds, seen.floor, measured)


def trim_fields(done: TrimResult) -> dict[str, Any]:
    """What a trim of an object log has done, or would do, as fields of JSON."""
    return {
        "dry_run": done.dry_run,
        "floor": done.floor,
        "trimmed_records": done.trimmed_records,
        "trimmed_bytes": done.trimmed_bytes,
        "invalidated": [
            {
                "slot": slot.name,
                "position": slot.position,
                "reason": None if slot.invalid is None else str(slot.invalid.reason),
            }
            for slot in done.invalidated
        ],
        "expired_holds": done.expired,
        "deleted_objects": done.deleted,
        "deleted_bytes": done.deleted_bytes,
        "orphans": done.orphans,
        "orphan_bytes": done.orphan_bytes,
        "trims_waiting": done.waiting,
        "clock_ahead_of_store_seconds": 0.0 if done.clocks is None else done.clocks.skew,
        "listed_ahead_seconds": 0.0 if done.clocks is None else done.clocks.ahead,
    }


_LAGS: Final = (PIPELINE_LAG_RECORDS, PIPELINE_LAG_BYTES, PIPELINE_LAG_SECONDS)


def measure_lag(log: Any, labels: tuple[str, str], position: int | None, now: int) -> LogLag | None:
    """Measure the lag of a follower, and set its metrics; the labels are the log and its target.

    Not a number and None if it has no position yet, or the log does not tell.
    """
    lag = None
    with contextlib.suppress(StrandlineError):
        lag = None if position is None else lag_of(log, position, now)
    found = (None, None, None) if lag is None else (lag.records, lag.bytes, lag.seconds)
    for gauge, value in zip(_LAGS, found, strict=True):
        gauge.labels(*labels).set(math.nan if value is None else value)
    return lag


def named_format(log: Any) -> str | None:
    """Name and version of the format of a log's values; None if they are plain bytes, or the log does not tell."""
    versions = named_versions(log)
    return f"{versions[-1].format}, version {versions[-1].number}" if versions else None
