"""Counters and timers for Prometheus, in the process's registry.

Serve it with ``prometheus_client.start_http_server(port)``. docs/metrics.md describes each metric.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Literal

from prometheus_client import Counter, Gauge, Histogram

from strandline.storage.clock import CLOCK

Role = Literal["producer", "consumer", "trimmer"]
"""Role of a writer of a head: shows whether appends, acknowledgements or trims contend."""

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

BATCHES_WRITTEN = Counter("strandline_batches_written", "Batches listed, or made durable, by this process.")
RECORDS_WRITTEN = Counter("strandline_records_written", "Records in batches listed, or made durable, by this process.")
BYTES_WRITTEN = Counter("strandline_bytes_written", "Stored bytes of batches listed, or made durable, by this process.")
COMMIT_SECONDS = Histogram(
    "strandline_wal_commit_seconds",
    "Writing and syncing one group of appends to a write-ahead log.",
    buckets=(0.00005, 0.0001, 0.00025, 0.0005, *_SECONDS),
)
FLUSH_SECONDS = Histogram(
    "strandline_flush_seconds", "From closing a batch to its listing, upload included.", buckets=_SECONDS
)

BATCHES_FETCHED = Counter("strandline_batches_fetched", "Batches read and checked.")
RECORDS_FETCHED = Counter("strandline_records_fetched", "Records in batches read and checked.")
BYTES_FETCHED = Counter("strandline_bytes_fetched", "Stored bytes of batches read and checked.")
FETCH_SECONDS = Histogram("strandline_fetch_seconds", "Reading and checking one batch.", buckets=_SECONDS)

BATCHES_TRIMMED = Counter("strandline_batches_trimmed", "Batches that trims deleted.")
RECORDS_TRIMMED = Counter("strandline_records_trimmed", "Records in batches that trims deleted.")
BYTES_TRIMMED = Counter("strandline_bytes_trimmed", "Stored bytes of what trims deleted, orphans not included.")
ORPHANS_DELETED = Counter("strandline_orphans_deleted", "Deleted objects that were uploaded and never listed.")
ORPHAN_BYTES_DELETED = Counter("strandline_orphan_bytes_deleted", "Bytes of deleted objects that were never listed.")
TRIM_SECONDS = Histogram("strandline_trim_seconds", "One round of trimming.", buckets=_SECONDS)

HEAD_WRITES = Counter("strandline_head_writes", "Conditional writes of a head or manifest that landed.", ["role"])
HEAD_CONFLICTS = Counter("strandline_head_conflicts", "Conditional writes of a head that lost a race.", ["role"])

ACKNOWLEDGED = Counter("strandline_acknowledgements", "Batches durably acknowledged by consumers of this process.")
DESCRIPTORS = Counter("strandline_descriptors", "Descriptors handed out by consumers of this process.")
DEAD_LETTERS = Counter("strandline_dead_letters", "Batches that could not be read and were set aside.")
INVALIDATIONS = Counter("strandline_slot_invalidations", "Slots invalidated by this process.", ["reason"])

QUEUE_LENGTH = Gauge("strandline_queue_length", "Batches listed and not acknowledged, as last seen.", ["log", "slot"])
LAG_RECORDS = Gauge("strandline_lag_records", "Records behind the end of the log, as last seen.", ["log", "slot"])
LAG_BYTES = Gauge("strandline_lag_bytes", "Stored bytes behind the end of the log, as last seen.", ["log", "slot"])
LAG_SECONDS = Gauge(
    "strandline_lag_seconds", "Age of the last batch a consumer fetched, by its ingestion time.", ["log", "slot"]
)

UPDATES_APPLIED = Counter("strandline_updates_applied", "Updates of keys that watches of this process applied.")
UPDATES_REJECTED = Counter("strandline_updates_rejected", "Updates that a watch's parse rejected or could not read.")
NATS_BROKEN_HEADERS = Counter(
    "strandline_nats_broken_headers", "Messages that NATS delivered, and whose headers cannot be read whole."
)
STORE_FAILURES = Counter("strandline_store_failures", "Writes that the store of a watch refused.")
RESYNCS = Counter("strandline_resyncs", "Times a watch resynchronised its store after its cursor had expired.")

PARTIAL_RESYNCS = Counter("strandline_partial_resyncs", "Replicas that resumed at their own position.")
REBOOTSTRAPS = Counter("strandline_rebootstraps", "Replicas that had to build their state again.", ["cause"])
COMMITS = Counter("strandline_commits", "Appends on a primary, by the outcome of their commit policy.", ["outcome"])
REPLICATION_LAG = Gauge(
    "strandline_replication_lag_records", "Sent records that the slowest replica has not applied.", ["log"]
)
SAFE_REPLAY = Gauge(
    "strandline_safe_replay", "The offset below which all records are durable on every replica.", ["log"]
)
DIVERGENCES = Gauge(
    "strandline_divergences", "Divergences between a replica's log and its primary's.", ["log", "replica"]
)
_REPLICA = ["log", "replica"]
REPLICA_LAG_RECORDS = Gauge(
    "strandline_replica_lag_records", "Records from a replica's slot on: the primary retains them for it.", _REPLICA
)
REPLICA_LAG_BYTES = Gauge("strandline_replica_lag_bytes", "Their stored bytes.", _REPLICA)
REPLICA_LAG_SECONDS = Gauge("strandline_replica_lag_seconds", "Age of the oldest of them.", _REPLICA)
REPLICA_SILENT_SECONDS = Gauge(
    "strandline_replica_silent_seconds", "Seconds since the primary last heard of a replica.", _REPLICA
)
REPLICA_SLOT_PINS = Gauge(
    "strandline_replica_slot_pins", "1 while a replica's slot pins records, 0 once it is invalid.", _REPLICA
)
REPLICA_APPLY_ERRORS = Gauge(
    "strandline_replica_apply_errors", "Batches that a replica could not apply, as it has reported.", _REPLICA
)

_NODE = ["node"]
TERM = Gauge("strandline_term", "The highest term that this node has seen.", _NODE)
CONDITION = Gauge("strandline_node_condition", "1 for the condition that a node is in, else 0.", ["node", "condition"])
DURABLE_OFFSET = Gauge("strandline_durable_offset", "The offset below which all records are durable here.", _NODE)
COMMITTED_OFFSET = Gauge("strandline_committed_offset", "The commit watermark; NaN while it is not known.", _NODE)
DISK_FREE = Gauge("strandline_disk_free_bytes", "Bytes that are free where a node keeps its copy of the log.", _NODE)
LEASE_AGE = Gauge("strandline_lease_age_seconds", "Seconds since a node renewed its lease; NaN without one.", _NODE)
CALLS = Counter("strandline_calls", "Calls and streams that a node has ended, by their outcome.", ["method", "outcome"])

SLOT_LAG_RECORDS = Gauge("strandline_slot_lag_records", "Records that a slot has not passed.", ["log", "slot"])
SLOT_LAG_BYTES = Gauge("strandline_slot_lag_bytes", "Their stored bytes.", ["log", "slot"])
SLOT_LAG_SECONDS = Gauge("strandline_slot_lag_seconds", "Age of the oldest of them.", ["log", "slot"])
SLOT_PINS = Gauge("strandline_slot_pins", "1 while a slot pins records, 0 once it is invalid.", ["log", "slot"])
FLOOR = Gauge("strandline_floor", "The lowest position of the valid slots; NaN without one.", ["log"])
FIRST_OFFSET = Gauge("strandline_first_offset", "The first offset that the log retains.", ["log"])
NEXT_OFFSET = Gauge("strandline_next_offset", "The offset behind the last record of the log.", ["log"])

PIPELINE_COMMITS = Counter("strandline_pipeline_commits", "Ranges that pipelines committed.", ["log", "table"])
PIPELINE_RECORDS = Counter("strandline_pipeline_records", "Records in committed ranges.", ["log", "table"])
PIPELINE_BAD_RECORDS = Counter(
    "strandline_pipeline_bad_records", "Records that pipelines set aside in dead-letter tables.", ["log", "table"]
)
PIPELINE_UPKEEP_FAILURES = Counter(
    "strandline_pipeline_upkeep_failures",
    "Rounds of a table's upkeep that failed, and are tried again.",
    ["log", "table"],
)
PIPELINE_COMMIT_SECONDS = Histogram(
    "strandline_pipeline_commit_seconds",
    "Writing and committing one range, from its plan to its end.",
    ["log", "table"],
    buckets=_SECONDS,
)
PIPELINE_LAG_RECORDS = Gauge(
    "strandline_pipeline_lag_records", "Records that the table does not have yet, as last seen.", ["log", "table"]
)
PIPELINE_LAG_BYTES = Gauge(
    "strandline_pipeline_lag_bytes", "Their stored bytes, as last seen; NaN if unknown.", ["log", "table"]
)
PIPELINE_LAG_SECONDS = Gauge(
    "strandline_pipeline_lag_seconds", "Age of the oldest of them, as last seen; NaN if unknown.", ["log", "table"]
)
PART_RUNNING = Gauge("strandline_part_running", "Whether a part of a server works: 1, or 0.", ["part"])
PART_FAILURES = Counter("strandline_part_failures", "Failed attempts of a part of a server.", ["part"])
STREAM_LAG_RECORDS = Gauge(
    "strandline_stream_lag_records", "Records behind the logs that a Spark stream reads; NaN if unknown.", ["query"]
)
STREAM_INPUT_RATE = Gauge("strandline_stream_input_rows_per_second", "Rows that arrive at a Spark stream.", ["query"])
STREAM_PROCESSED_RATE = Gauge(
    "strandline_stream_processed_rows_per_second", "Rows that a Spark stream processes.", ["query"]
)
STREAM_RECORDS = Counter("strandline_stream_records", "Rows that Spark streams have read.", ["query"])

SEGMENT_EVENTS = Counter(
    "strandline_segment_events", "Segment events that this process followed, by their outcome.", ["outcome"]
)

BUILD = Gauge("strandline_build_info", "1, with the versions of this package and of Python.", ["version", "python"])


def report_build() -> None:
    """Set the build information; not on import, since that takes longer than the rest of this module."""
    from importlib.metadata import version

    BUILD.labels(version("strandline"), platform.python_version()).set(1)


@contextmanager
def timed(histogram: Histogram, monotonic: Callable[[], float]) -> Iterator[None]:
    """Observe how long a block takes, on the given clock, however it ends."""
    began = monotonic()
    try:
        yield
    finally:
        histogram.observe(monotonic() - began)


@contextmanager
def fetching() -> Iterator[Callable[[int, int], None]]:
    """Time reading and checking one batch; call the yielded function with its records and stored bytes."""

    def count(records: int, size: int) -> None:
        BATCHES_FETCHED.inc()
        RECORDS_FETCHED.inc(records)
        BYTES_FETCHED.inc(size)

    with timed(FETCH_SECONDS, CLOCK.monotonic):
        yield count


def count_written(records: int, size: int, seconds: float | None = None) -> None:
    """Count one listed batch; ``seconds`` is the time from closing it to its listing, if a producer closed it."""
    BATCHES_WRITTEN.inc()
    RECORDS_WRITTEN.inc(records)
    BYTES_WRITTEN.inc(size)
    if seconds is not None:
        FLUSH_SECONDS.observe(seconds)


def count_commit(
    labels: tuple[str, str], *, records: int, bad_records: int, seconds: float, upkeep_failures: int
) -> None:
    """Count a commit of a pipeline: its records, and what came up since the one before."""
    PIPELINE_COMMITS.labels(*labels).inc()
    PIPELINE_RECORDS.labels(*labels).inc(records)
    PIPELINE_BAD_RECORDS.labels(*labels).inc(bad_records)
    PIPELINE_COMMIT_SECONDS.labels(*labels).observe(seconds)
    PIPELINE_UPKEEP_FAILURES.labels(*labels).inc(max(0, upkeep_failures))


def count_write(role: Role | None, *, landed: bool) -> None:
    """Count an answered conditional write of a head; no role means another kind of object."""
    if role is not None:
        (HEAD_WRITES if landed else HEAD_CONFLICTS).labels(role).inc()
