"""The write-ahead log: a log on this machine's own disk, written by one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, final
from uuid import UUID

from strandline.errors import LogClosed
from strandline.formats.wal.mark import Mark
from strandline.log.folders import FolderKind, check_missing, check_new
from strandline.log.produce.appending import Produces, Shipping, shipping_by
from strandline.log.wal.migrated_spool import refuse_changed_spool
from strandline.log.wal.names import hold_lock
from strandline.log.wal.read.catalog import Catalog
from strandline.log.wal.read.reading import WalReading
from strandline.log.wal.read.span import Tail, WalSpan, some_batches
from strandline.log.wal.read.watermark import Published, View
from strandline.log.wal.recover.repair import create_if_absent, repair
from strandline.log.wal.recover.rewind import finish_rewind
from strandline.log.wal.recover.scan_tail import Examined, examine, read_log_json
from strandline.log.wal.recover.verify import OnProgress, WalVerification, verify
from strandline.log.wal.slots import WalSlots
from strandline.log.wal.write.committer import GroupCommitter
from strandline.log.wal.write.groups import CommitGroup, WalHandle, check_numbers, encoded, encoded_copy, value_of
from strandline.log.wal.write.identity import IdentityFile
from strandline.log.wal.write.journal import CommitSteps, IndexWriter, Journal, WalSettings
from strandline.log.wal.write.log_start import DurableFiles, LogStart
from strandline.log.writers.numbered import numbered
from strandline.log.writers.source import known_as
from strandline.model.addresses import Address, as_folder
from strandline.model.arguments import checked
from strandline.model.content_type import check_content_type, check_same
from strandline.model.cursor import Cursor
from strandline.model.head import LogBatch, WriterId, WriterState
from strandline.model.records import RecordSource
from strandline.model.retention import NO_LIMITS, Retention, SlotLimits, SlotState, as_retention
from strandline.storage.clock import SteadyTime, boot_id
from strandline.storage.closing import Closing
from strandline.storage.disk import make_own_folder, sync_name
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import Origin, bound_to_process, call_in_child
from strandline.values.contract import Codec
from strandline.values.recorded import check_recorded, with_version

ROLL_BYTES: Final = 64 << 20
TAIL_BYTES: Final = 32 << 20
PENDING_BYTES: Final = 64 << 20


@bound_to_process(keep=("log_id",))
@final
@checked(own=("view", "newest", "ahead", "wait", "wait_past"))
class WalLog(Produces, WalReading, Closing):
    """A log whose appends are durable when their handle says so. Satisfies :class:`~strandline.log.contract.Log`.

    All appends that arrive while a sync runs share the next one. Nothing can be read before it is durable, except with
    :meth:`ahead`. After a failed write or sync every append raises until the log is opened again;
    durable records can still be read.

    Safe in threads; one process has it open at a time, others read it with
    :class:`~strandline.log.wal.read.reading.WalReader`.
    """

    def __init__(self, folder: str, found: Examined, identity: IdentityFile, settings: WalSettings) -> None:
        """Use :meth:`open`."""
        env = settings.env
        super().__init__(folder, found.log_id, Catalog(folder, found.log_id, found.firsts, disk=env.disk), env=env)
        self._steady = SteadyTime(env.clock, folder)
        self._held = contextlib.ExitStack()
        advice = "write it in the parent only, and read it here with a WalReader of its own"
        self._origin = Origin(f"The log in {folder}", advice=advice)
        self._closed = self._has_closed = False
        self._close_error: Exception | None = None
        """The error of closing."""
        self._tail = Tail(settings.tail_bytes)
        place = found.place
        index = IndexWriter(folder, place.first, found.index, found.indexed, disk=env.disk)
        for frame, writers in found.unindexed:
            index.passed(frame, writers)
        self._journal = Journal(folder, found.log_id, place, index, self._catalog.add, settings)
        if found.kept.start > place.next:  # the start was moved, but not applied before a crash
            self._journal.begin_file(found.kept.start)
        self._identity = identity
        mark = Mark(
            found.log_id,
            found.kept.start,
            place.next,
            place.first,
            place.term,
            settings.boot,
            sealed=identity.is_sealed,
        )
        self._published = Published.open(folder, mark, disk=env.disk)
        in_place = self._journal.check_in_place
        self.slots = WalSlots(folder, found.kept, self.bounds, self.cursor_at, in_place, origin=self._origin, env=env)
        self._steps = CommitSteps(
            self._journal,
            self._tail,
            self._published,
            durable=settings.durable,
            sealing=identity.seal,
            env=env,
        )
        self._committer = GroupCommitter(
            folder, steps=self._steps, end=self._end, place=place, settings=settings, sealed=identity.is_sealed
        )
        self._start = LogStart(
            folder, self.slots, self._journal, self._published, self._catalog, self._committer, env=env
        )

    @classmethod
    def open(
        cls,
        folder: Address,
        *,
        create: bool = True,
        roll_bytes: int = ROLL_BYTES,
        tail_bytes: int = TAIL_BYTES,
        pending_bytes: int = PENDING_BYTES,
        background: bool = True,
        durable: Callable[[int], object] | None = None,
        value: Codec | None = None,
        content_type: str | None = None,
        env: Env = SYSTEM,
        boot: UUID | None = None,
    ) -> WalLog:
        """Open the log in this folder for writing, and create it if there is none and ``create`` is set.

        Reads the last file only, from its index's last checkpoint on. A torn tail above the durable mark is
        cut, and set aside. ``CorruptData``, with file and byte, for damage at or below the mark and
        ``UnsupportedVersion`` for data of a newer version: nothing was changed then. ``Fenced``, naming the holder,
        while another process has it open. ``WrongKind`` in the folder of something else, such
        as a node, and where it would begin beside a spool; ``Diverged`` if the spool from which it was migrated was
        written since.

        A new file begins after ``roll_bytes``; ``tail_bytes`` of the newest records stay in
        memory for readers; appends wait while ``pending_bytes`` are queued. Without ``background`` no thread is
        started, and a thread that waits for a handle commits. ``durable`` is called first with each new durable end,
        by the committing thread; it must not raise. ``value`` is the codec of its values, which a new log records; an
        existing log has to have recorded it, in this version or an older one. ``content_type`` is the media type of
        its values, which never changes.
        """
        content_type = None if content_type is None else check_content_type(content_type)
        folder = as_folder(folder)
        (check_new if create else check_missing)(folder, FolderKind.WAL, disk=env.disk)
        if create:
            make_own_folder(folder, disk=env.disk)
        with contextlib.ExitStack() as held:
            hold_lock(held, folder, disk=env.disk)
            refuse_changed_spool(folder, disk=env.disk)
            if create:
                made = lambda: () if value is None else with_version((), value, folder)  # noqa: E731
                create_if_absent(folder, made, content_type=content_type, env=env)
            if value is not None or content_type is not None:  # before anything is repaired
                recorded = read_log_json(folder, disk=env.disk)
                check_recorded(recorded.values, value, folder)
                check_same(recorded.content_type, content_type, folder)
            finish_rewind(folder, disk=env.disk)
            found = examine(folder, disk=env.disk)
            if not create:
                sync_name(folder, disk=env.disk)  # its creator may have died before that sync
            repair(folder, found, disk=env.disk)
            here = boot_id() if boot is None else boot
            settings = WalSettings(roll_bytes, tail_bytes, pending_bytes, background, durable, here, env)
            log = cls(folder, found, IdentityFile.opened(folder, found.end, disk=env.disk), settings)
            log._held = held.pop_all()
        call_in_child(log, WalLog._after_fork)
        return log

    def __repr__(self) -> str:
        return f"WalLog({self.folder!r}, log_id={self._log_id})"

    def append(
        self, batch: RecordSource, *, writer: WriterId, number: int, expect: int | None = None, seal: bool = False
    ) -> WalHandle:
        """Append a batch as one frame, whole or not at all; the same writer and number again is a no-op."""
        return self.append_batch(batch, writer=writer, number=number, expect=expect, seal=seal)

    def append_batch(
        self,
        batch: RecordSource,
        *,
        writer: WriterId | None = None,
        number: int | None = None,
        expect: int | None = None,
        term: int | None = None,
        timestamp: int | None = None,
        seal: bool = False,
    ) -> WalHandle:
        """Append a batch as one frame; unnumbered without a writer, optionally at a given offset, term and time.

        ``expect`` is the offset that the batch must get, ``timestamp`` (milliseconds) the time of its first write.
        ``InvalidInput`` for more than 256 MiB, ``ExpectationFailed`` if another offset follows, ``Fenced`` for a term
        below the log's: nothing was appended.
        """
        check_numbers(expect=expect, term=term, timestamp=timestamp)
        append = numbered(writer, number)
        content = encoded(batch, now=self.env.clock.now())
        self._start.begin_at(expect or 0)
        return self._committer.add_batch(
            content, writer=append, expect=expect, term=term, timestamp=timestamp, seal=seal
        )

    def seal(self) -> Cursor:
        """Durably end the log, and return the cursor of its end: no record is ever appended there. Idempotent.

        Appends that were queued before become durable first. After a failed write every append raises, as usual, and
        whether the log is sealed is known when it is opened again.
        """
        with self._start.lock:
            self.slots.check_open()
            if not self.bounds().sealed:
                try:
                    queued = self._committer.end_intake()
                    if queued is not None:
                        queued.wait()
                    with self._committer.exclusively():
                        self._seal_at_end()
                except BaseException as error:  # also an interruption: appends were refused, and nothing proves why
                    self._committer.fail(error)
                    raise
                self._committer.seal_is_durable()
            return self.end()

    def _seal_at_end(self) -> None:
        """Called when nothing is queued or being committed, and nothing will be."""
        self._committer.check()
        self._journal.check_in_place()  # must not seal another log at this path
        self._identity.seal(self._journal.place.next)
        self._published.seal()

    def _shipping(self, writer: WriterId | None, compression: str | None) -> Shipping:
        return shipping_by(self.append, writer, self.last_number, env=self.env)

    def last_number(self, writer: WriterId) -> int | None:
        """The number of the writer's last append; None if the log does not know the writer."""
        last = self._committer.last_append(writer)
        return None if last is None else last[0].number

    def last_append(self, writer: WriterId) -> WriterState | None:
        """The last append of a writer, or of a source of ingested records; None if the log does not know it.

        Waits until that append is durable. Its ``sequence`` is its offset, ``listed`` is 0 if it is not known.
        """
        found = self._committer.last_append(known_as(writer))
        if found is None:
            return None
        state, group = found
        group.wait()
        return state

    def append_copy(self, batch: LogBatch) -> WalHandle:
        """Append a copy of a batch of another log of this identity, with its offset, term, time, writer and number.

        Neither its records nor its number are checked again. Raises as :meth:`append_batch` does if it does not fit
        this log.
        """
        content = encoded_copy(batch.batches, batch.pages)
        self._start.begin_at(batch.first)
        return self._committer.add_batch(
            content,
            writer=batch.append,
            expect=batch.first,
            term=batch.term,
            timestamp=batch.timestamp,
            is_copy=True,
        )

    def append_value(
        self, value: bytes, *, expect: int | None = None, term: int | None = None, timestamp: int | None = None
    ) -> WalHandle:
        """Append one value as a record of its own; many of them share a frame. ``timestamp`` is in microseconds."""
        if expect is None and term is None and timestamp is None:
            return WalHandle(*self._committer.add(value), 1)
        check_numbers(expect=expect, term=term, timestamp=timestamp)
        value = value_of(value)
        self._start.begin_at(expect or 0)
        now = self.env.clock.now() if timestamp is None else timestamp
        return WalHandle(*self._committer.add_value(value, now, term=term, expect=expect), 1)

    @property
    def add_value(self) -> Callable[[bytes], tuple[CommitGroup, int]]:
        """The function that queues one value, for many of them: returns the group to wait for, and the offset."""
        return self._committer.add

    @property
    def term(self) -> int:
        """The term of appends without an explicit one; it never decreases."""
        return self._committer.term

    @property
    def failed(self) -> bool:
        """Whether a write failed: nothing more is appended until it is opened again."""
        return self._committer.failed

    def view(self) -> View:
        """The durable, retained range now."""
        return self._published.view

    def _frames(self, since: int, end: int) -> Iterator[WalSpan]:
        while since < end:
            begins = self._tail.begins()
            if begins is not None and begins <= since:
                for held in self._tail.since(since):
                    if held.first >= end:
                        return
                    yield held
                    since = held.next
            else:
                for frame in self._catalog.frames(since, end if begins is None else min(begins, end)):
                    yield WalSpan.of(frame, None, self.env.disk)
                    since = frame.next

    def newest(self, since: int, size: int) -> list[LogBatch]:
        """The next few durable batches from the one with an offset on, up to ``size`` bytes, while they are in memory.

        The same batches as by :meth:`plan`, in a fraction of the time: for readers close to the end. Where it
        returns nothing, :meth:`plan` says why.
        """
        bounds = self.bounds()
        if since < bounds.first:
            return []
        return some_batches((held for held in self._tail.some(since) if held.first < bounds.next), size)

    def ahead(self, since: int, size: int) -> list[LogBatch]:
        """The next few batches, if the first one being synced is at ``since``: they may get lost.

        For senders whose receivers do not use them before they are durable here.
        """
        frames = self._steps.unsynced
        return some_batches(frames, size) if frames and frames[0].first == since else []

    def wait(self, past: Cursor, timeout: float) -> bool:
        """Block until a record past the cursor is durable (True), or until the timeout (False); does not poll."""
        return self._published.wait(past.next, timeout)

    def wait_past(self, durable: int, timeout: float, *, written: int | None = None) -> bool:
        """Block until a record past ``durable`` is durable; with ``written`` also until one past that is written."""
        return self._published.wait(durable, timeout, written=written)

    def enforce(self, limits: SlotLimits) -> list[SlotState]:
        """Durably invalidate the slots that break a limit; returns them. Drops those that expired. Logs each.

        A slot is idle since its last heartbeat, or since the log was opened. Idle time is counted on the monotonic
        clock: jumps of the wall clock do not matter, and it stops while the machine sleeps.
        """
        return self.slots.enforce(limits, self.bytes_behind)

    def verify(self, on_progress: OnProgress | None = None) -> WalVerification:
        """Read every byte of the log and report all damage, concurrently with other calls; changes nothing."""
        return verify(self.folder, env=self.env, on_progress=on_progress)

    def trim(self, upto: int | str | Retention, *, beyond_slots: bool = False, limits: SlotLimits = NO_LIMITS) -> int:
        """Durably delete everything below an offset, or what a policy does not retain; returns the new first offset.

        Nothing is deleted that a valid slot needs. Slots that break a limit are invalidated first; with
        ``beyond_slots`` those that need more are, too. Whole files are deleted; records below the offset in the first
        remaining file cannot be read any more. Runs concurrently with appends and reads, and costs little when there is
        nothing to delete.
        """
        wanted = upto if isinstance(upto, int) else as_retention(upto)
        self.enforce(limits)
        if not isinstance(wanted, int):
            wanted = self._retention_start(wanted, self.slots.consumed_floor(), self._steady.now())
        return self._start.trim(wanted, beyond_slots=beyond_slots)

    def keeping_files(self) -> contextlib.AbstractContextManager[DurableFiles]:
        """All durable files, now, none of which is removed within the block: for a copy."""
        return self._start.keeping_files()

    def evolve_value(self, value: Codec) -> Codec:
        """Durably record a new version of the value format; returns its codec. The same version again changes nothing.

        New fields are allowed, and fields that become wider: the new version decodes all older values. Anything
        else is ``SchemaRefused``. On a log of plain bytes it records the first version, and the caller vouches that
        the values so far have that format.
        """
        with self._start.lock:
            self.slots.check_open()
            self._journal.check_in_place()  # must not change another log at this path
            self._identity.edit(
                lambda identity: replace(identity, values=with_version(identity.values, value, self.folder))
            )
        return value

    def close(self) -> None:
        """Make all appends durable, and release the log. Idempotent.

        Waits for a running trim. Later changes raise ``LogClosed``; durable records can still be read. Raises what kept
        appends from being durable, unless a handle raised it, and releases the log anyway. If it is interrupted while
        the log's thread writes, that thread releases the log afterwards.
        """
        try:
            self._committer.close(self._is_closed)
        except BaseException:
            if not self._committer.running:
                self._end(clean=False)
            raise
        self._end(clean=True)
        with self._start.lock:
            had_returned, self._has_closed = self._has_closed, True
        if had_returned:
            return
        if self._close_error is not None:
            raise self._close_error
        self._committer.raise_unseen()

    def _end(self, *, clean: bool = True) -> None:
        """Release the log, once. Called by its thread when it ends, since no signal interrupts that one."""
        with self._start.lock:
            if self._closed:
                return
            try:
                self._release(clean=clean and not self._committer.failed)
            except Exception as error:  # noqa: BLE001 - raised by close()
                self._close_error = error

    def _release(self, *, clean: bool) -> None:
        with self._held, contextlib.ExitStack() as closing:
            self._closed = True
            closing.callback(self._published.close, clean=clean)
            closing.callback(self._journal.close)
            closing.callback(self.slots.close, self._is_closed)
            if clean:
                self._journal.write_index()

    def _is_closed(self) -> Exception:
        return LogClosed(f"The log in {self.folder} is closed: open it again.")

    def _after_fork(self) -> None:
        """In a forked child: refuse its handles, and close its descriptors, which changes nothing of the parent's."""
        with self._held:
            self._committer.after_fork(self._origin.refusal)
            self._published.after_fork()
            self._journal.close()
