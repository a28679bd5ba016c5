"""Builds a snapshot from the log in parallel: the state of every key at one cursor, sealed as stores import it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID

import msgspec
import pyarrow as pa

from strandline.bulk.range_jobs import RangeJob, parts_of
from strandline.bulk.snapshot_tasks import MergeTask, ReduceTask, counts_in, merged_prefix, states
from strandline.errors import AlreadyExists, Diverged, InvalidInput, NotFound, NullKey
from strandline.followers.stores.append_log import seal_frames
from strandline.followers.stores.append_log_file import encode_columns
from strandline.log.addressed import log_at
from strandline.log.contract import READING, LogReading, require
from strandline.log.read.span_tasks import is_same_history
from strandline.model.addresses import Address, as_folder
from strandline.model.arguments import checked
from strandline.model.cursor import Cursor
from strandline.model.records import Op
from strandline.model.sink import StorePosition
from strandline.model.snapshot import Snapshot
from strandline.snapshots.artifacts import Artifacts
from strandline.snapshots.sealed import check_snapshot
from strandline.snapshots.staging import check_free, scratch_folder
from strandline.storage.disk import DISK
from strandline.storage.env import SYSTEM
from strandline.storage.objects.store import ObjectStore
from strandline.storage.objects.urls import open_store
from strandline.storage.task_pool import TaskPool, ThreadPool
from strandline.tables.files.layout import shares

SnapshotKind: TypeAlias = Literal["append-log", "rocksdb"]
"""The kind of store that imports the snapshot: ``AppendLogStore`` or ``RocksStore``."""

PLAN: Final = "snapshot-plan.json"
GROUP_BYTES: Final = 64 << 20
"""Approximate stored bytes of the log that one task reduces, and that one share of the keys has."""
_MOST_SHARES: Final = 4096
_SCRATCH: Final = ("reduced-", "merged-")
"""How the names of the objects in the scratch begin."""
_REMEDY: Final = "name another address for the scratch"


class SnapshotPlan(msgspec.Struct, frozen=True):
    """The ranges and shares of a build. Fixed when the build begins, so that it can be continued."""

    log_id: UUID
    upto: int
    cuts: tuple[int, ...]
    """The first offsets of the ranges that are reduced."""
    shares: int
    cursor: str
    """The log's cursor at ``upto``: that of the snapshot."""
    kind: Literal["strandline-snapshot-plan"] = "strandline-snapshot-plan"
    version: Literal[1] = 1


@checked
def build_snapshot(
    log: LogReading | Address,
    folder: Address,
    *,
    kind: Literal["append-log", "rocksdb"] = "append-log",
    upto: int | None = None,
    scratch: Address | None = None,
    publish: Artifacts | None = None,
    pool: TaskPool | None = None,
    options: dict[str, str] | None = None,
    group_bytes: int = GROUP_BYTES,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Snapshot:
    """Seal the newest value of each key, without deleted ones, up to ``upto`` or the log's end, in a folder.

    The content is that of a store of this ``kind`` which has followed the log from offset 0 to the snapshot's cursor;
    ``sl.snapshots.bootstrap`` imports it, and the store follows on from there. ``publish`` uploads it for others.

    ``pool`` runs the tasks: threads of this process, or ``sl.spark.executors(spark)``. They write to ``scratch``, the
    address of an empty folder or prefix that all of them reach; by default ``<folder>.scratch`` on this machine. Killed
    at any moment and called again, it continues from there, with the same cursor; at the end the scratch is removed.
    ``options`` are for the store of the scratch. ``on_progress`` gets the records reduced so far, and all.

    ``NullKey`` for a record without key, ``CursorExpired`` if the log no longer has its first records: then only a
    store has their keys. ``AlreadyExists`` if the folder holds anything but a snapshot of this log, ``Diverged`` if the
    log was restored from a copy meanwhile.
    """
    folder = as_folder(folder)
    with log_at(log) as source:
        require(source, "folded", *READING)
        store = open_store(f"{folder}.scratch" if scratch is None else scratch, options)
        snapshot = _sealed(folder, source, kind, upto)
        if snapshot is None:
            check_free(folder, disk=DISK)
            job = RangeJob(source, store, pool or ThreadPool(), on_progress, _REMEDY)
            try:
                snapshot = _built(job, folder, kind, upto, group_bytes)
            except NullKey:
                if scratch is None:
                    _remove_empty(f"{folder}.scratch")
                raise
            except (AlreadyExists, NotFound):
                # Another process that builds the same may have sealed it meanwhile, and removed the scratch.
                snapshot = _sealed(folder, source, kind, upto)
                if snapshot is None:
                    raise
                _remove_orphans(store)
        _clean(store, snapshot.cursor)
        if scratch is None:
            _remove_empty(f"{folder}.scratch")
        if publish is not None:
            publish.publish(folder, log=source)
        return snapshot


def _remove_empty(folder: str) -> None:
    with contextlib.suppress(NotFound):
        if not DISK.scan(folder):
            DISK.remove_folder(folder)


def _sealed(folder: str, log: LogReading, kind: str, upto: int | None) -> Snapshot | None:
    """The snapshot that an earlier call has sealed; None without any."""
    try:
        found = check_snapshot(folder)
    except NotFound:
        return None
    if (found.cursor.log_id, found.kind) != (log.log_id, kind) or upto not in (None, found.cursor.next):
        raise AlreadyExists(
            f"{folder} holds a snapshot of kind {found.kind} at {found.cursor}: build this one in another folder."
        )
    if not is_same_history(log, found.cursor):
        raise Diverged(
            f"{folder} has records that {log!r} does not have now: the log was restored from a copy, and has grown "
            "differently since. Delete it, and build the snapshot again."
        )
    return found


def _built(job: RangeJob, folder: str, kind: SnapshotKind, upto: int | None, group_bytes: int) -> Snapshot:
    log, store = job.log, job.store

    def new() -> SnapshotPlan:
        cursor, cuts = job.cut(0, upto, group_bytes)
        return SnapshotPlan(log.log_id, cursor.next, cuts, len(shares(min(len(cuts), _MOST_SHARES))), str(cursor))

    plan = job.begun(PLAN, SnapshotPlan, new, _SCRATCH)
    try:
        ranges = parts_of(0, plan.cuts, plan.upto, f"reduced-{plan.shares:04d}-{{:020d}}-{{:020d}}.arrow")
        if not 1 <= plan.shares <= _MOST_SHARES or plan.shares.bit_count() != 1:
            raise ValueError(f"{plan.shares} shares")  # noqa: TRY301 - one sentence for both
    except ValueError as error:
        raise job.damaged(PLAN, error) from error
    if plan.log_id != log.log_id or upto not in (None, plan.upto):
        raise InvalidInput(
            f"{store.url} has the scratch of another snapshot, of {plan.log_id} up to {plan.upto:,}: finish that one, "
            "or name another address."
        )
    job.check_history(plan.cursor)
    cursor = Cursor.parse(plan.cursor)
    try:
        job.write(ranges, partial(ReduceTask, store, plan.shares), f"snapshot of {log!r}: newest records")
    except NullKey:
        _clean(store, cursor)  # another call would find the same record
        raise
    merged = _merged(job, plan, tuple(name for name, _, _ in ranges))
    job.check_history(plan.cursor)  # the log may have been restored meanwhile
    pieces = sum(counts_in(name)[1] for name in merged)
    found = states(store, merged)
    if kind == "rocksdb":
        return _sealed_rocks(folder, found, cursor)
    position = StorePosition(cursor)
    return seal_frames(folder, lambda term, time: encode_columns(found, pieces, position, term, time), cursor)


def _merged(job: RangeJob, plan: SnapshotPlan, sources: tuple[str, ...]) -> list[str]:
    """The states of all shares, in order; those that are missing are written."""
    there = {counts_in(item.path)[0]: item.path for item in job.store.list(merged_prefix(plan.upto))}
    missing = [number for number in range(plan.shares) if number not in there]
    tasks = [MergeTask(job.store, sources, plan.upto, plan.shares, number) for number in missing]
    for place, name in job.pool.run(tasks, f"snapshot of {job.log!r}: state"):
        there[missing[place]] = name
    return [there[number] for number in range(plan.shares)]


def _clean(store: ObjectStore, cursor: Cursor) -> None:
    """Remove the scratch of this snapshot only. The plan goes last: scratch without a plan cannot be continued."""
    try:
        plan = msgspec.json.decode(store.get(PLAN).data, type=SnapshotPlan)
    except (NotFound, msgspec.DecodeError):
        return
    if (plan.log_id, plan.upto) != (cursor.log_id, cursor.next):
        return
    for path in _scratch_in(store):
        store.delete(path)
    store.delete(PLAN)


def _scratch_in(store: ObjectStore) -> list[str]:
    return [item.path for prefix in _SCRATCH for item in store.list(prefix)]


def _remove_orphans(store: ObjectStore) -> None:
    """Remove what this build has written after another one had removed the plan; nothing if there is a new plan."""
    paths = _scratch_in(store)  # listed before the plan is read: objects of a new plan are not among them
    if not any(item.path == PLAN for item in store.list(PLAN)):
        for path in paths:
            store.delete(path)


def _sealed_rocks(folder: str, found: Iterator[tuple[pa.Array, pa.Array]], cursor: Cursor) -> Snapshot:
    """The state as a RocksDB store, sealed; the store itself is beside the folder meanwhile."""
    from strandline.followers.stores.rocks import RocksStore

    with scratch_folder(folder, env=SYSTEM) as place:
        store: Any = RocksStore.open(f"{place}/store", sync=False)
        with contextlib.closing(store):
            store.begin_resync(cursor.log_id)
            for keys, values in found:
                ops = pa.repeat(pa.scalar(int(Op.PUT), pa.int8()), len(keys))
                store.resync(pa.table({"op": ops, "key": keys, "value": values}))
            store.end_resync(cursor)
            snapshot: Snapshot = store.export_to(folder)
            return snapshot
