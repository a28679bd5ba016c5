"""Group commit: appends queue up while a sync runs, and share the next one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Final

from strandline.errors import DiskFull, ExpectationFailed, Fenced, LogFailed, Sealed
from strandline.log.wal.write.groups import (
    CommitGroup,
    FrameContent,
    GroupOrigin,
    NumberedAppends,
    ValueRun,
    WalHandle,
    value_of,
)
from strandline.log.wal.write.journal import CommitSteps, JournalPosition, WalSettings
from strandline.model.head import WriterId, WriterState

_LARGE: Final = 1 << 20
"""Values up to this size are not checked further."""

_OVERHEAD: Final = 64
"""Bytes of a queued value, besides its content."""


class GroupCommitter:
    """Gives each append its offset, under the lock that orders the bytes, and commits group after group.

    With ``background`` one thread commits; without, the threads that wait for a handle do. A failure is final: the
    failed appends raise, and so do all later ones.
    """

    def __init__(
        self,
        name: str,
        *,
        steps: CommitSteps,
        end: Callable[[], None],
        place: JournalPosition,
        settings: WalSettings,
        sealed: bool = False,
    ) -> None:
        """Continue at this position, where the log may have been ``sealed``.

        ``end`` is called by the thread when it was closed and everything is committed.
        """
        self._name = name
        self._steps = steps
        self._end = end
        self._now_ns = settings.env.clock.now_ns
        self.next = place.next
        """The offset of the next record."""
        self.term = place.term
        """The term of the next record."""
        self.sealed = sealed
        """Whether no record follows those that are queued."""
        self._sealing: CommitGroup | None = None
        """Settled when the seal is durable, or has failed; None for a log that was sealed when it was opened."""
        self._writers = NumberedAppends(place.writers)
        self._max_pending = max(1, settings.pending_bytes)  # an empty queue always has room
        self._lock = threading.Lock()
        """Orders appends: held while an offset is assigned and its record queued."""
        self._room = threading.Condition(self._lock)
        self._waiting_for_room = 0
        """Number of threads that wait for room."""
        self._committing = threading.Lock()
        """Held while the files are written."""
        self._turnstile = threading.Lock()
        self._commit_inline = None if settings.background else self.commit_all
        self._source = GroupOrigin(self._commit_inline)
        self._group = CommitGroup(self._source)
        self._refusal: Callable[[], Exception] | None = None
        self.failed = False
        """Whether a write failed, so that nothing more is appended."""
        self._failure_seen = False
        """Whether a caller has seen the failure."""
        self._wake = threading.Lock()
        self._wake.acquire()
        self._asleep = False
        self._closing = False
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        """Set last by the thread: a join that a signal interrupts would report it as stopped."""
        if settings.background:
            self._thread = threading.Thread(target=self._run, name=f"strandline-wal {name}", daemon=True)
            self._thread.start()

    def add(self, value: bytes) -> tuple[CommitGroup, int]:
        """Queue one value; returns its group, and its offset.

        Called for every record, so it makes no avoidable calls.
        """
        if type(value) is not bytes or len(value) > _LARGE:
            value = value_of(value)
        timestamp = self._now_ns() // 1000
        with self._lock:
            group = self._group
            run = group.run
            if run is None or group.size >= self._max_pending or self._refusal is not None:
                group, run = self._open_run(None, None)
            run.values.append(value)
            run.timestamps.append(timestamp)
            group.size += len(value) + _OVERHEAD
            first = self.next
            self.next = first + 1
            if self._asleep:
                self._asleep = False
                self._wake.release()
        return group, first

    def add_value(
        self, value: bytes, timestamp: int, *, term: int | None, expect: int | None
    ) -> tuple[CommitGroup, int]:
        """Queue one value with a timestamp (microseconds), and optionally a term and the offset that it must get."""
        with self._lock:
            group, run = self._open_run(term, expect)
            run.values.append(value)
            run.timestamps.append(timestamp)
            group.size += len(value) + _OVERHEAD
            first = self.next
            self.next = first + 1
            self._wake_thread()
        return group, first

    def _open_run(self, term: int | None, expect: int | None) -> tuple[CommitGroup, ValueRun]:
        """The run for the next value; called and left with the lock held."""
        if self._refusal is not None:
            raise self._refusal()
        self._check(term, expect)
        if self._group.size >= self._max_pending:
            self._make_room()
            self._check(term, expect)  # others may have appended meanwhile
        group = self._group
        run = group.run
        if run is None:
            run = group.run = ValueRun(self.next, self.term)
            group.items.append(run)
        return group, run

    def _wake_thread(self) -> None:
        if self._asleep:
            self._asleep = False
            self._wake.release()

    def add_batch(
        self,
        content: FrameContent,
        *,
        writer: tuple[WriterId, int] | None = None,
        expect: int | None = None,
        term: int | None = None,
        timestamp: int | None = None,
        is_copy: bool = False,
        seal: bool = False,
    ) -> WalHandle:
        """Queue a batch as one frame, the last one if it is to ``seal``; a repeated number of the writer is a no-op.

        A copy's number is not checked, only remembered: this log may have forgotten writers that the other one
        remembers.
        """
        judged = None if is_copy else writer
        count = content.count
        content.writer, content.timestamp = writer, timestamp
        if content.kept is not None:
            content.kept.append = writer
        with self._lock:
            if self._refusal is not None:
                raise self._refusal()
            if judged is not None and (repeated := self._repeated(*judged, count)) is not None:
                return repeated
            self._check(term, expect)
            if self._group.size >= self._max_pending:
                self._make_room()
                # Others may have appended, or sealed it, meanwhile.
                if judged is not None and (repeated := self._repeated(*judged, count)) is not None:
                    return repeated
                self._check(term, expect)
            group, first = self._group, self.next
            content.first, content.term, content.seals = first, self.term, seal
            group.items.append(content)
            group.run = None
            group.size += content.size
            self.next = first + count
            if writer is not None:
                self._writers.remember(*writer, first, count, group)
            if seal:
                self.sealed, self._sealing = True, group
            self._wake_thread()
        return WalHandle(group, first, count)

    def _repeated(self, writer: WriterId, number: int, count: int) -> WalHandle | None:
        """The handle of an append that was made before, also of a sealed log; None if it is the writer's next."""
        found = self._writers.repeated(writer, number, count)
        if found is None:
            self._check_unsealed()
            self._writers.check(writer, number)
        return found

    def end_intake(self) -> CommitGroup | None:
        """Refuse all later appends; returns what is queued, if anything is. Raises why nothing can be sealed."""
        with self._lock:
            self.check()
            if not self.sealed:
                self.sealed, self._sealing = True, CommitGroup()
            self._group.run = None
            return self._group if self._group.items else None

    def seal_is_durable(self) -> None:
        """From here on appends are told that the log is sealed."""
        if self._sealing is not None:
            self._sealing.settle()

    def check(self) -> None:
        """Raise why nothing can be sealed, if a write failed. A log that is just being closed can still be sealed."""
        if self.failed and self._refusal is not None:
            raise self._refusal()

    def _check_unsealed(self) -> None:
        """``Sealed`` if it was sealed; called and left with the lock held, which is released meanwhile."""
        if self.sealed:
            if self._sealing is not None:
                self._lock.release()  # not before it is durable: a crash must not take back what a caller was told
                try:
                    self._sealing.wait()
                finally:
                    self._lock.acquire()
            raise Sealed.at(self.next, f"The log in {self._name}")

    def _check(self, term: int | None, expect: int | None) -> None:
        """Refuse an append that does not follow; sets the term for this record and later ones."""
        self._check_unsealed()
        if expect is not None and expect != self.next:
            error = ExpectationFailed(
                f"The append expected the log to end at {expect}, and it ends at {self.next}; nothing was appended."
            )
            error.end = self.next
            raise error
        if term is not None:
            if term < self.term:
                raise Fenced(
                    f"The append is of term {term}, and the log is in term {self.term}: terms never decrease, and "
                    "its writer must stop."
                )
            if term > self.term:
                self.term, self._group.run = term, None

    def last_append(self, writer: WriterId) -> tuple[WriterState, CommitGroup] | None:
        """The last append of a writer, and the group to wait for until it is durable; None if it is not known."""
        with self._lock:
            return self._writers.last(writer)

    def _make_room(self) -> None:
        """Wait until less is queued; called and left with the lock held."""
        if self._commit_inline is not None:
            self._lock.release()
            try:
                self._commit_inline()
            finally:
                self._lock.acquire()
        else:
            self._waiting_for_room += 1
            try:
                while self._group.size >= self._max_pending and self._refusal is None:
                    self._room.wait()
            finally:
                self._waiting_for_room -= 1
        if self._refusal is not None:
            raise self._refusal()

    def commit_all(self) -> None:
        """Commit everything that is queued now."""
        with self._committing:
            group = self._take()
            if group is not None and self._commit_group(group):
                self._settle(group)

    @contextlib.contextmanager
    def exclusively(self) -> Iterator[None]:
        """No commit runs within the block: no other thread touches the files."""
        with self._turnstile, self._committing:
            yield

    def _take(self) -> CommitGroup | None:
        with self._lock:
            group = self._group
            if not group.items or self.failed:
                return None
            self._group = CommitGroup(self._source)
            if self._waiting_for_room:
                self._room.notify_all()
        return group

    def _commit_group(self, group: CommitGroup, unsettled: CommitGroup | None = None) -> bool:
        """Make a group durable, or fail; ``unsettled`` is the group before, which is durable but not settled yet."""
        try:
            try:
                written = self._steps.write(group.items)
            finally:
                # Waiters of the group before are woken now: they run during the sync, which needs no interpreter lock.
                # Earlier they would only have delayed the write.
                self._settle(unsettled)
            self._steps.finish(written)
        except BaseException as error:
            self.fail(error)
            group.settle(self._refusal)
            if not isinstance(error, Exception):
                raise
            return False
        return True

    def _settle(self, group: CommitGroup | None) -> None:
        if group is None:
            return
        group.settle()
        try:
            self._steps.after_wake()
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise

    def _run(self) -> None:
        try:
            self._commit_until_closed()
            self._end()
        finally:
            self._ended.set()

    def _commit_until_closed(self) -> None:
        """Commit group after group, until it is closed and the queue is empty."""
        unsettled: CommitGroup | None = None
        try:
            while True:
                with self._turnstile:  # a busy log must not starve exclusively()
                    pass
                with self._committing:
                    group = self._take()
                    if group is not None:
                        unsettled = group if self._commit_group(group, unsettled) else None
                    if group is None or not self._group.items or self._turnstile.locked():
                        self._settle(unsettled)
                        unsettled = None
                # Never sleeps with an unsettled group: the appends queued after it may just have been refused.
                if unsettled is None and self._is_over():
                    return
        except BaseException:
            if unsettled is not None:
                unsettled.settle()
            self._refuse(lambda: LogFailed(f"The log in {self._name} stopped: open it again."))
            raise

    def _is_over(self) -> bool:
        """Sleep until there is something to do; whether nothing more will come."""
        with self._lock:
            # Both under the lock: an append between the two checks would be lost by a concurrent close.
            if self._group.items and not self.failed:
                return False
            if self._closing:
                return True
            self._asleep = True
        self._wake.acquire()
        return False

    def fail(self, error: BaseException) -> None:
        """Refuse all queued and later appends: nothing may follow a failure."""

        def refusal() -> Exception:
            self._failure_seen = True
            return _stopped(self._name, error)

        self._refuse(refusal)

    def raise_unseen(self) -> None:
        """Raise the failure if no caller has seen it: appends without a waiting caller may not be durable."""
        if self.failed and not self._failure_seen and self._refusal is not None:
            raise self._refusal()

    def _refuse(self, refusal: Callable[[], Exception]) -> None:
        with self._lock:
            if not self.failed:
                self.failed, self._refusal = True, refusal
            group, self._group = self._group, CommitGroup(self._source)
            self._room.notify_all()
        group.settle(self._refusal)
        if self._sealing is not None and not self._sealing.done:
            self._sealing.settle(self._refusal)

    def close(self, refusal: Callable[[], Exception]) -> None:
        """Refuse later appends, and commit the queue, unless that fails."""
        with self._lock:
            # No call before the thread is woken: an interrupting signal finds all of it done, or nothing.
            if self._refusal is None:
                self._refusal = refusal
            self._closing = True
            if self._asleep:
                self._asleep = False
                self._wake.release()
            self._room.notify_all()
        if self._thread is not None:
            self._ended.wait()
            return
        try:
            self.commit_all()
        except BaseException as error:
            if self._group.items:
                self.fail(error)  # no thread commits it any more
            raise

    def continue_at(self, offset: int) -> None:
        """Assign this offset next; the caller ensures that nothing is queued and no other thread appends."""
        with self._lock:
            if self._group.items:
                raise ExpectationFailed("Other threads have appended meanwhile; nothing was appended.")
            self.next = offset

    @property
    def running(self) -> bool:
        """Whether its thread may still write."""
        return self._thread is not None and not self._ended.is_set()

    def after_fork(self, refusal: Callable[[], Exception]) -> None:
        """In a forked child, where no thread commits or releases the locks: refuse everything.

        Unsettled groups stay unsettled here, whether they are queued, being written or durable already: their waiters
        are refused, too.
        """
        self._lock, self._committing, self._turnstile = threading.Lock(), threading.Lock(), threading.Lock()
        self._room = threading.Condition(self._lock)
        self._asleep, self._thread = False, None
        self._refusal = refusal
        self._source.lose(refusal)
        self._group = CommitGroup(self._source)


def _stopped(name: str, cause: BaseException) -> Exception:
    """The error of appends to a log after a write failed."""
    error: Exception
    if isinstance(cause, DiskFull):
        error = DiskFull(f"The log in {name} stopped, since its disk is full ({cause}): make room, and open it again.")
    else:
        error = LogFailed(
            f"The log in {name} stopped, since it could not write ({cause!r}): acknowledged records are kept, others "
            "may be lost; open it again."
        )
    error.__cause__ = cause
    return error
