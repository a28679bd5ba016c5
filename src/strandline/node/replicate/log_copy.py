"""A replica's copy of the log: a write-ahead log of its own, with the same identity, offsets and terms."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Final, final
from uuid import UUID

import pyarrow as pa

from strandline.errors import Diverged, Fenced, Gap, StorageError
from strandline.log.wal.log import WalLog
from strandline.log.wal.recover.rewind import rewind
from strandline.log.wal.snapshot import KIND, KIND_VERSION, fill, verify
from strandline.log.wal.write.groups import WalHandle
from strandline.model.batch import LogBatch
from strandline.model.cursor import Bounds, Cursor, Limit
from strandline.model.records import RECORD_SCHEMA
from strandline.model.snapshot import Snapshot
from strandline.node.node_folder import QUARANTINE, Home
from strandline.snapshots.sealed import seal
from strandline.storage.clock import CHANCE, CLOCK, Chance, Clock

__all__ = ["KIND", "KIND_VERSION", "LogCopy", "export_log", "verify"]

_COLUMNS: Final = RECORD_SCHEMA.names


def export_log(log: WalLog, folder: str, *, home: Home, clock: Clock, chance: Chance) -> Snapshot:
    """Seal everything that is durable in a log as a snapshot in a folder that is absent or empty."""
    return seal(
        folder,
        kind=KIND,
        kind_version=KIND_VERSION,
        cursor=None,  # known when the files are copied, and not before: the log goes on meanwhile
        fill=lambda data: _fill(log, data),
        verify=lambda data: verify(data, disk=home.disk),
        disk=home.disk,
        clock=clock,
        chance=chance,
    )


def _fill(log: WalLog, folder: str) -> None:
    fill(log, folder)


@final
class LogCopy:
    """What was taken is durable, in the batches that it came in. A :class:`~strandline.model.sink.BatchSink`."""

    def __init__(self, home: Home, *, background: bool, clock: Clock = CLOCK, chance: Chance = CHANCE) -> None:
        """Open the copy that the node uses now."""
        self._home = home
        self._background = background
        self._clock = clock
        self._chance = chance
        self._lock = threading.Lock()
        """Held while a batch is appended: who learns of a higher term waits, and then nothing older is appended."""
        self.term = 0
        """The term of the primary that it follows."""
        self.generation = home.state.generation
        self.on_durable: Callable[[int], object] | None = None
        """Told each new end as soon as it is durable; what is told must not raise."""
        self._leads = False
        """Whether many append at once, for whom a thread commits. A follower is one, and quicker without."""
        self.log = self._open()

    def _open(self) -> WalLog:
        return WalLog.open(
            self._home.data(self.generation),
            create=False,
            background=self._background and self._leads,
            durable=None if self._leads else self._is_durable,
            disk=self._home.disk,
            clock=self._clock,
            chance=self._chance,
        )

    def _is_durable(self, upto: int) -> None:
        if self.on_durable is not None:
            self.on_durable(upto)

    # --- as a sink ---------------------------------------------------------------------------------------------

    def cursor(self, log_id: UUID) -> Cursor:
        """How far it has got; all below is durable."""
        end = self.log.end()
        if end.log_id != log_id:
            raise Diverged(f"This replica has a copy of log {end.log_id}, and the primary's is {log_id}.")
        return self.end()

    def end(self) -> Cursor:
        """The cursor behind everything that it holds, in the term of its last record."""
        end, first = self.log.end(), self.log.bounds().first
        # A log that holds nothing is in a term all the same: that of no record.
        return end if end.next > first else Cursor(end.log_id, end.next, self.log.term_at(end.next - 1) or 0)

    def take(self, batches: Sequence[LogBatch], *, since: Cursor, upto: Cursor) -> None:
        """Append what it does not have yet, and return when that is durable; one sync for all of it."""
        del upto
        at = self.log.bounds().next
        if since.next > at:
            raise Gap(f"Records from offset {since.next} on were to be applied, and this replica is at {at}.")
        with self._lock:
            if self.term < self._home.state.seen:
                raise Fenced(
                    f"This replica has seen term {self._home.state.seen}, and follows a primary of term {self.term}: "
                    "nothing was applied."
                )
            handle: WalHandle | None = None
            for batch in batches:
                if batch.next > at:
                    handle = self.log.append_copy(batch if batch.first == at else behind(batch, at))
                    at = batch.next
            if handle is not None:
                handle.result()

    def drop_slots(self) -> None:
        """Forget who followed this node when it led: they follow another one, which knows where they are."""
        for slot in self.log.slots():
            self.log.drop_slot(slot.name)

    def fence(self, term: int, who: str) -> None:
        """Remember a term that somebody tells; when this returns, nothing of a lower one is appended any more."""
        with self._lock:
            self._home.hear_term(term, who)

    # --- comparing ---------------------------------------------------------------------------------------------

    def holds(self, batch: LogBatch, at: Cursor) -> bool:
        """Whether the record before a position is the one that the batch has there, with the same content and term."""
        offset = at.next - 1
        if offset < self.log.bounds().first:
            return True  # it is gone here, so that nothing can be said
        if self.log.term_at(offset) != batch.term:
            return False
        spans = self.log.plan(Cursor(at.log_id, offset), Limit(upto=at.next))
        mine = pa.Table.from_batches([part for span in spans for part in span.fetch(_COLUMNS)], RECORD_SCHEMA)
        theirs = pa.Table.from_batches(batch.batches, RECORD_SCHEMA).slice(offset - batch.first, 1)
        return bool(mine.equals(theirs))

    def term_at(self, offset: int) -> int | None:
        """The term of a record."""
        return self.log.term_at(offset)

    def end_of_term(self, term: int) -> int:
        """The first offset whose record is of a higher term."""
        return self.log.end_of_term(term)

    def bounds(self) -> Bounds:
        """What it holds."""
        return self.log.bounds()

    # --- changing it as a whole --------------------------------------------------------------------------------

    def rewind(self, to: int) -> str:
        """Durably discard everything from an offset on, into a folder of its own, whose path is returned."""
        number = 1 + sum(row.is_folder for row in self._home.disk.scan(self._home.path(QUARANTINE)))
        aside = self._home.path(QUARANTINE, f"{number:04d}-{to:020d}")
        self._home.disk.make_folders(self._home.path(QUARANTINE))
        self.log.close()
        try:
            rewind(self._home.data(self.generation), to, quarantine=aside, disk=self._home.disk, clock=self._clock)
        finally:
            self.log = self._open()
        return aside

    def reopen(self) -> None:
        """Open it again, also after a write failed: what was durable is there. As one that follows."""
        self._leads = False
        with contextlib.suppress(StorageError):  # it lets go all the same
            self.log.close()
        self.log = self._open()

    def lead(self) -> WalLog:
        """Open it as the log of a primary."""
        self._leads = True
        self.log.close()
        self.log = self._open()
        return self.log

    def close(self) -> None:
        """Let go of it; what it holds can still be read by who does."""
        self.log.close()


def behind(batch: LogBatch, at: int) -> LogBatch:
    """What a batch has from an offset on: no longer the whole that its writer has numbered."""
    table = pa.Table.from_batches(batch.batches, RECORD_SCHEMA).slice(at - batch.first)
    return LogBatch(at, batch.term, batch.timestamp, None, tuple(table.to_batches()))
