"""A replica's copy of the log: a write-ahead log of its own, with the same identity, offsets and terms."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, final
from uuid import UUID

import pyarrow as pa

from strandline.compat.spool.migrate import folder_of
from strandline.errors import Diverged, Fenced, Gap, InvalidInput, StorageError
from strandline.formats.wal.folder import SlotsFile
from strandline.log.wal.log import WalLog
from strandline.log.wal.recover.repair import take_back_seal
from strandline.log.wal.recover.rewind import copy_tail, rewind
from strandline.log.wal.recover.scan_tail import read_log_json
from strandline.log.wal.slots import write_slots_file
from strandline.log.wal.snapshot import KIND, KIND_VERSION, fill, verify
from strandline.log.wal.write.groups import WalHandle
from strandline.model.addresses import COPIED_SUFFIX
from strandline.model.content_type import check_same
from strandline.model.cursor import Cursor, Limit
from strandline.model.head import LogBatch
from strandline.model.node import Heartbeat
from strandline.model.records import RECORD_SCHEMA
from strandline.model.segments import COLD_FILE
from strandline.model.snapshot import Snapshot
from strandline.node.node_folder import QUARANTINE, NodeFolder
from strandline.node.options import NodeOptions
from strandline.snapshots.sealed import seal
from strandline.storage.disk import Disk, exists
from strandline.storage.lease import Lease
from strandline.tier.attachment import COLD_CODEC

_COLUMNS: Final = RECORD_SCHEMA.names


def create_log(node_folder: NodeFolder, lease: Lease | None, *, content_type: str | None) -> None:
    """Create a new log on a node that has none."""
    _refuse_second(node_folder, lease)
    folder, env = node_folder.data(generation := node_folder.next_generation()), node_folder.env
    WalLog.open(folder, create=True, background=False, content_type=content_type, env=env).close()
    node_folder.remember(generation=generation)


def take_over_log(node_folder: NodeFolder, source: str, lease: Lease | None, options: NodeOptions) -> None:
    """Begin the log of a node that has none with a copy of a write-ahead log: its records, terms, writers and slots.

    The log keeps its identity, so its cursors stay valid. The original is not changed. After a crash the
    node has all of it, or nothing and can begin again. ``Fenced`` while the original is open for writing,
    ``InvalidInput`` if it has a cold tier, and the node is to have none, or another.
    """
    _refuse_second(node_folder, lease)
    disk = node_folder.env.disk
    folder = folder_of(source, migrate=False, env=node_folder.env)
    _check_cold(folder, options, disk=disk)
    generation = node_folder.next_generation()
    copy = node_folder.data(generation)
    with WalLog.open(folder, create=False, background=False, env=node_folder.env) as log:
        disk.make_folders(copy)
        fill(log, copy)
        write_slots_file(copy, SlotsFile(log.log_id, log.bounds().first, tuple(log.slots.list())), disk=disk)
        disk.sync_folder(copy)
        disk.sync_folder(node_folder.folder)
        # Its terms count as led here: the node continues in a later term or, without a lease, in the same.
        node_folder.remember(generation=generation, seen=log.term, adopted=log.term, led=log.term)


def check_settings(node_folder: NodeFolder, options: NodeOptions) -> None:
    """Refuse another content type, or another cold tier, than the log has."""
    if options.content_type is not None and (generation := node_folder.state.generation):
        folder = node_folder.data(generation)
        check_same(read_log_json(folder, disk=node_folder.env.disk).content_type, options.content_type, folder)
    known, wanted = node_folder.state.cold, options.cold_address
    if known and wanted and known != wanted:
        raise InvalidInput(
            f"The log of node {node_folder.state.name} has its cold tier in {known}, and keeps it: leave out {wanted}, "
            "or name the former."
        )


def _check_cold(folder: str, options: NodeOptions, *, disk: Disk) -> None:
    """Refuse to take a log over without its cold tier: records that only its segments hold could not be read."""
    path = f"{folder}/{COLD_FILE}"
    if not exists(path, disk=disk):
        return
    cold = COLD_CODEC.decode(disk.read(path), path).value
    tiering, store = options.tiering, cold.store.rstrip("/")
    events = f"{store}/events" if tiering.events is None else tiering.events
    if (options.cold_address, events, tiering.partitions) != (store, cold.events, cold.partitions):
        raise InvalidInput(
            f"The write-ahead log in {folder} has a cold tier in {store}, with {cold.partitions} partitions of events "
            f"in {cold.events}: let the node have the same cold tier (--cold), with the same events. Nothing "
            "was changed."
        )


def _refuse_second(node_folder: NodeFolder, lease: Lease | None) -> None:
    """Refuse to begin a log where there is one: its nodes share the lease."""
    state = None if lease is None else lease.read()
    if state is not None and state.epoch > node_folder.state.led:
        raise InvalidInput(
            f"There has been a primary of this log before ({state.holder or 'released'}, term {state.epoch}): start "
            "this node without creating or taking over a log, and it follows. For another log, use another lease."
        )


def export_log(log: WalLog, folder: str, *, node_folder: NodeFolder) -> Snapshot:
    """Seal a snapshot of everything durable in a log, in a folder that is missing or empty."""
    return seal(
        folder,
        kind=KIND,
        kind_version=KIND_VERSION,
        cursor=None,  # known after the copy: appends continue meanwhile
        fill=partial(fill, log),
        verify=lambda data: verify(data, env=node_folder.env),
        env=node_folder.env,
    )


@final
class LogCopy:
    """The copy as a :class:`~strandline.model.sink.BatchSink`: taken batches are durable, and unchanged."""

    def __init__(self, node_folder: NodeFolder) -> None:
        self._node_folder = node_folder
        self._lock = threading.Lock()
        """Held while a batch is appended: once :meth:`fence` returns, no batch of a lower term is appended."""
        self.term = 0
        """The term of the primary that the node follows."""
        self.generation = node_folder.state.generation
        self.on_durable: Callable[[int], None] = lambda _: None
        """Called with each new durable end; must not raise."""
        self._leads = False
        """Whether the node leads: a thread then groups the commits of many appends. A follower is faster without."""
        self.log = self._open()

    def _open(self) -> WalLog:
        return WalLog.open(
            self._node_folder.data(self.generation),
            create=False,
            background=self._node_folder.background and self._leads,
            durable=None if self._leads else lambda upto: self.on_durable(upto),  # noqa: PLW0108 - of then
            env=self._node_folder.env,
        )

    # --- as a sink ---------------------------------------------------------------------------------------------

    def cursor(self, log_id: UUID) -> Cursor:
        """The cursor behind the last record; everything below is durable."""
        end = self.log.end()
        if end.log_id != log_id:
            raise Diverged(f"This replica has a copy of log {end.log_id}, and the primary's is {log_id}.")
        return self.end()

    def end(self) -> Cursor:
        """The cursor behind the last record, in the term of that record."""
        end, first = self.log.end(), self.log.bounds().first
        # An empty log has a term, but no record of it.
        return end if end.next > first else Cursor(end.log_id, end.next, self.log.term_at(end.next - 1) or 0)

    def take(self, batches: Sequence[LogBatch], *, since: Cursor, upto: Cursor) -> None:
        """Append the records that are new here, and return when they are durable; one sync for all of them."""
        del upto
        at = self.log.bounds().next
        if since.next > at:
            raise Gap(f"Records from offset {since.next} on should be applied, but this replica is at {at}.")
        with self._lock:
            self._check_term()
            handle: WalHandle | None = None
            for batch in batches:
                if batch.next > at:
                    handle = self.log.append_copy(batch if batch.first == at else from_offset(batch, at))
                    at = batch.next
            if handle is not None:
                handle.result()

    def _check_term(self) -> None:
        seen = self._node_folder.state.seen
        if self.term < seen:
            raise Fenced(
                f"This replica has seen term {seen}, but follows a primary of term {self.term}: nothing was applied."
            )

    def seal_with(self, heartbeat: Heartbeat) -> bool:
        """Durably seal the copy if the primary's log was sealed where the copy ends; whether it was just now."""
        bounds = self.log.bounds()
        if bounds.sealed or not heartbeat.sealed or heartbeat.durable != bounds.next + 1:
            return False
        with self._lock:
            self._check_term()
            self.log.seal()
        return True

    def unseal(self) -> None:
        """Take back a seal that the primary's log never had; the caller has checked that it was not committed."""
        self.log.close()
        try:
            take_back_seal(self._node_folder.data(self.generation), disk=self._node_folder.env.disk)
        finally:
            self.log = self._open()

    def drop_slots(self) -> None:
        """Drop the slots of this node's leadership: the primary has others. Copies of the primary's slots stay."""
        for slot in self.log.slots.list():
            if not slot.name.endswith(COPIED_SUFFIX):
                self.log.slots.drop(slot.name)

    def fence(self, term: int, who: str) -> None:
        """Durably adopt a higher term; once this returns, no batch of a lower one is appended."""
        with self._lock:
            self._node_folder.adopt_term(term, who)

    # --- comparing ---------------------------------------------------------------------------------------------

    def holds(self, batch: LogBatch, at: Cursor) -> bool:
        """Whether the record before a position equals the one in the batch, in content and term."""
        offset = at.next - 1
        if offset < self.log.bounds().first:
            return True  # not retained here: cannot be compared
        if self.log.term_at(offset) != batch.term:
            return False
        spans = self.log.plan(Cursor(at.log_id, offset), Limit(upto=at.next))
        mine = pa.Table.from_batches([part for span in spans for part in span.fetch(_COLUMNS)], RECORD_SCHEMA)
        theirs = pa.Table.from_batches(batch.batches, RECORD_SCHEMA).slice(offset - batch.first, 1)
        return bool(mine.equals(theirs))

    # --- changing it as a whole --------------------------------------------------------------------------------

    def rewind(self, to: int) -> str:
        """Truncate the log at an offset; moves the records into a quarantine folder, and returns its path."""
        return self._quarantined(to, rewind)

    def copy_tail(self, first: int) -> str:
        """Copy the records from an offset on into a quarantine folder, and return its path; the log stays as it is."""
        return self._quarantined(first, copy_tail)

    def _quarantined(self, first: int, move: Callable[..., object]) -> str:
        number = 1 + sum(row.is_folder for row in self._node_folder.env.disk.scan(self._node_folder.path(QUARANTINE)))
        aside = self._node_folder.path(QUARANTINE, f"{number:04d}-{first:020d}")
        self._node_folder.env.disk.make_folders(self._node_folder.path(QUARANTINE))
        self.log.close()
        try:
            folder = self._node_folder.data(self.generation)
            move(folder, first, quarantine=aside, env=self._node_folder.env)
        finally:
            self.log = self._open()
        return aside

    def reopen(self) -> None:
        """Reopen the log as a follower, also after a failed write: what was durable is kept."""
        self._leads = False
        with contextlib.suppress(StorageError):  # the folder is released all the same
            self.log.close()
        self.log = self._open()

    def lead(self, *, is_new: bool = True) -> WalLog:
        """Reopen the log for a primary, with the slots that it takes over.

        ``is_new``: another node may have led since this one did.
        """
        self._leads = True
        self.log.close()
        self.log = self._open()
        self.log.slots.take_over(self._node_folder.state.led, is_new=is_new)
        return self.log

    def close(self) -> None:
        """Close the log; open readers may continue."""
        self.log.close()


def from_offset(batch: LogBatch, at: int) -> LogBatch:
    """The part of a batch from an offset on, without the writer's number, which belongs to the whole batch."""
    table = pa.Table.from_batches(batch.batches, RECORD_SCHEMA).slice(at - batch.first)
    return LogBatch(at, batch.term, batch.timestamp, None, tuple(table.to_batches()))
