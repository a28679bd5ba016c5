"""Write-ahead log API numbered by lsn: payloads from lsn 1 on."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator
from typing import Final, NamedTuple, Self, final

import pyarrow as pa

from strandline.compat.spool.migrate import folder_of
from strandline.errors import ExpectationFailed, InvalidInput, NotFound
from strandline.log.wal.log import PENDING_BYTES, ROLL_BYTES, TAIL_BYTES, WalLog
from strandline.log.wal.recover.verify import OnProgress, WalVerification
from strandline.log.wal.write.groups import CommitGroup, WalHandle, check_numbers
from strandline.model.addresses import Address
from strandline.model.arguments import LARGEST_NUMBER, Positive, Signed, Timeout, checked
from strandline.model.cursor import Cursor, Limit
from strandline.model.records import Op, RecordSource, record_batch, values_bytes
from strandline.storage.closing import Closing
from strandline.storage.env import SYSTEM, Env


class WalRecord(NamedTuple):
    """One record of a write-ahead log."""

    term: int
    lsn: int
    timestamp: int
    """Milliseconds since the epoch."""
    payload: bytes | None


class LsnHandle:
    """A pending append: its result is the lsn of its last record, once it is durable."""

    __slots__ = ("_count", "_first", "_group")

    def __init__(self, group: CommitGroup, first: int, count: int = 1) -> None:
        self._group = group
        self._first = first
        self._count = count

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._group.is_known

    def result(self, timeout: float | None = None) -> int:
        """Block until the record is durable, or raise why it is not; ``TimeoutError`` if it is neither yet."""
        self._group.wait(timeout)
        return self._first + self._count

    def lsns(self, timeout: float | None = None) -> range:
        """All lsns of an append of many records."""
        last = self.result(timeout)
        return range(last - self._count + 1, last + 1)

    def __await__(self) -> Generator[object, None, int]:
        return self._group.awaited(self._first + self._count)


@final
@checked
class WriteAheadLog(Closing):
    """A durable log of payloads on this machine's disk: an append that returned is never lost, even in a power failure.

    Records are numbered by lsn, from 1 on, without a gap; 0 means "none". :attr:`log` is the same log with
    offsets, cursors, spans and slots, for all other functions: ``strandline.follow(wal.log, sink)``.

    >>> import tempfile
    >>> wal = WriteAheadLog.open(tempfile.mkdtemp() + "/orders")
    >>> wal.append(b"first"), wal.append_many([b"second", b"third"])
    (1, range(2, 4))
    >>> [(record.lsn, record.payload) for record in wal.read_since(1)]
    [(2, b'second'), (3, b'third')]
    >>> wal.prune_through(2), wal.oldest, wal.current
    (2, 3, 3)
    >>> wal.close()
    """

    def __init__(self, log: WalLog) -> None:
        """Use :meth:`open`."""
        self.log = log
        self._add = log.add_value

    @classmethod
    def open(
        cls,
        path: Address,
        *,
        create: bool = True,
        migrate: bool = False,
        renumber: bool = False,
        valid_prefix: bool = False,
        roll_bytes: int = ROLL_BYTES,
        tail_bytes: int = TAIL_BYTES,
        pending_bytes: int = PENDING_BYTES,
        background: bool = True,
        env: Env = SYSTEM,
    ) -> WriteAheadLog:
        """Open the log in the folder ``path`` for writing, as :meth:`WalLog.open` does.

        A spool of older versions (``path`` with the suffix ``.logical.wal``, and its slots) is never taken over
        silently: with ``migrate`` it is moved into the folder, and the original file stays where it is. A spool whose
        lsns leave gaps or go back needs ``renumber``: records get new lsns, and keep the old ones in the header
        ``spool-lsn``; slots are moved accordingly. One that is damaged before its end needs ``valid_prefix``: the
        records behind the damage are left out.
        """
        folder = folder_of(path, migrate=migrate, renumber=renumber, valid_prefix=valid_prefix, env=env)
        log = WalLog.open(
            folder,
            create=create,
            roll_bytes=roll_bytes,
            tail_bytes=tail_bytes,
            pending_bytes=pending_bytes,
            background=background,
            env=env,
        )
        return cls(log)

    def __repr__(self) -> str:
        return f"WriteAheadLog({self.log.folder!r})"

    def __enter__(self) -> Self:
        self.log.__enter__()  # refuses a forked child
        return self

    def close(self) -> None:
        """Make all appends durable, and close the log. Idempotent."""
        self.log.close()

    def append(
        self, payload: bytes, *, lsn: int | None = None, term: int | None = None, timestamp: Signed | None = None
    ) -> int:
        """Append a payload; returns its lsn when it is durable.

        For replicas: the ``lsn`` that it must get (``ExpectationFailed``, with the one that follows, if it cannot),
        its ``term`` (``Fenced`` below the log's) and its ``timestamp`` in milliseconds. A log that never held a record
        accepts any first lsn.
        """
        if lsn is None and term is None and timestamp is None:
            group, offset = self._add(payload)
            group.wait()
            return offset + 1
        return self.submit(payload, lsn=lsn, term=term, timestamp=timestamp).result()

    def submit(
        self, payload: bytes, *, lsn: int | None = None, term: int | None = None, timestamp: Signed | None = None
    ) -> LsnHandle:
        """Append without waiting: the handle's ``result()``, or awaiting it, returns the lsn when it is durable."""
        if lsn is None and term is None and timestamp is None:
            return LsnHandle(*self._add(payload))
        check_numbers(timestamp=timestamp)
        time = None if timestamp is None else timestamp * _MICROSECONDS
        with _following(lsn) as expect:
            return _lsn_handle(self.log.append_value(payload, expect=expect, term=term, timestamp=time))

    def append_many(self, values: Iterable[bytes], *, term: int | None = None) -> range:
        """Append values as one frame, all or none; returns their lsns when they are durable."""
        given = values_bytes(values)
        if not given:
            return range(self.current + 1, self.current + 1)
        now, count = self.log.env.clock.now(), len(given)
        batch = record_batch(timestamps=[now] * count, ops=[Op.PUT] * count, keys=[None] * count, values=given)
        return self.append_batch(batch, term=term)

    def append_batch(
        self, batch: RecordSource, *, lsn: int | None = None, term: int | None = None, timestamp: Signed | None = None
    ) -> range:
        """Append a table of records as one frame, all or none; returns their lsns when they are durable."""
        return self.submit_batch(batch, lsn=lsn, term=term, timestamp=timestamp).lsns()

    def submit_batch(
        self, batch: RecordSource, *, lsn: int | None = None, term: int | None = None, timestamp: Signed | None = None
    ) -> LsnHandle:
        """Append a batch without waiting; the handle's result is the last lsn."""
        with _following(lsn) as expect:
            return _lsn_handle(self.log.append_batch(batch, expect=expect, term=term, timestamp=timestamp))

    @property
    def oldest(self) -> int:
        """The lowest lsn that is retained; one above :attr:`current` if none is."""
        return self.log.bounds().first + 1

    @property
    def current(self) -> int:
        """The highest lsn that is durable; 0 before the first."""
        return self.log.bounds().next

    def read_since(self, lsn: int, max_count: Positive = 1000) -> list[WalRecord]:
        """Up to ``max_count`` durable records after this lsn, in order.

        ``CursorExpired`` if the next one is no longer retained, ``Diverged`` for an lsn above :attr:`current`.
        """
        cursor = Cursor(self.log.log_id, lsn)
        records: list[WalRecord] = []
        try:
            for span in self.log.plan(cursor, Limit(records=max_count, upto=min(lsn + max_count, LARGEST_NUMBER))):
                for batch in span.fetch(_READ):
                    records += _records(span.frame.term, batch)
        except NotFound:
            self.log.plan(cursor, Limit(batches=1))  # raises if it was trimmed since it was planned
            raise
        return records

    def wait(self, past: int, timeout: Timeout) -> bool:
        """Block until an lsn above ``past`` is durable (True), or until the timeout (False)."""
        return self.log.wait(Cursor(self.log.log_id, past), timeout)

    def verify(self, on_progress: OnProgress | None = None) -> WalVerification:
        """Read every byte of the log and report all damage, concurrently with other calls; changes nothing."""
        return self.log.verify(on_progress)

    def prune_through(self, lsn: int) -> int:
        """Durably delete everything up to and including this lsn, but nothing that a slot needs; returns the reached
        lsn.

        Whole files are deleted. The end does not change, even if everything is trimmed.
        """
        return self.log.trim(lsn)


_MICROSECONDS: Final = 1_000
_READ: Final = ("offset", "timestamp", "value")


@contextlib.contextmanager
def _following(lsn: int | None) -> Iterator[int | None]:
    """The offset of an lsn that a record must get; if it cannot, the error names the next lsn."""
    if lsn is None:
        yield None
        return
    check_numbers(lsn=lsn)
    if not lsn:
        raise InvalidInput("The first lsn is 1: 0 means none.")
    try:
        yield lsn - 1
    except ExpectationFailed as error:
        if error.end is None:
            raise
        raise ExpectationFailed(
            f"Lsn {lsn} does not follow: the next one is {error.end + 1}; nothing was appended."
        ) from error


def _lsn_handle(handle: WalHandle) -> LsnHandle:
    if handle.first is None:
        raise AssertionError("an append without a number has its own offset")
    return LsnHandle(handle.group, handle.first, handle.count)


def _records(term: int, batch: pa.RecordBatch) -> Iterator[WalRecord]:
    offsets, timestamps, values = batch.columns
    columns = offsets.to_pylist(), timestamps.view(pa.int64()).to_pylist(), values.to_pylist()
    for offset, timestamp, value in zip(*columns, strict=True):
        yield WalRecord(term, offset + 1, timestamp // 1000, value)
