"""Reading half of a write-ahead log, and the reader for processes other than its writer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar, final
from urllib.parse import quote
from uuid import UUID

from strandline.errors import Diverged, NotFound, NotReady, Unsupported
from strandline.formats.json.value_versions import ValueVersion
from strandline.log.contract import LogReading
from strandline.log.read.planning import check_fingerprint, plan_entries
from strandline.log.read.reading import HeadPoller
from strandline.log.slots import resume
from strandline.log.slots.table import ReadOnlySlots
from strandline.log.slots.trimming import retention_start
from strandline.log.wal.migrated_spool import refuse_changed_spool
from strandline.log.wal.names import firsts_in
from strandline.log.wal.read.catalog import Catalog
from strandline.log.wal.read.span import WalSpan
from strandline.log.wal.read.watermark import MARK_READS, View, read_mark
from strandline.log.wal.recover.scan_tail import read_identity, read_log_json, read_slots_file
from strandline.model.addresses import Address, as_folder
from strandline.model.arguments import Signed, Timeout, checked
from strandline.model.cursor import NO_LIMIT, Bounds, Cursor, Limit, Start
from strandline.model.head import StoredAppend
from strandline.model.retention import Retention
from strandline.model.times import TOLERANCE
from strandline.storage.clock import boot_id
from strandline.storage.closing import Closing
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.values.contract import Codec
from strandline.values.recorded import check_recorded, newest

P = ParamSpec("P")
R = TypeVar("R")


def _again_if_trimmed(call: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A call that is repeated if files that it misses were trimmed meanwhile."""

    @wraps(call)
    def repeated(log: Any, /, *args: P.args, **options: P.kwargs) -> R:
        while True:
            first = log.bounds().first
            try:
                return call(log, *args, **options)
            except NotFound:
                if log.bounds().first == first:
                    raise

    return repeated


@checked
class WalReading(LogReading, ABC):
    """The reading half of a write-ahead log. Changes nothing; shows only durable records; safe in threads."""

    def __init__(self, folder: str, log_id: UUID, catalog: Catalog, *, env: Env) -> None:
        self.folder = folder
        self._log_id = log_id
        self._catalog = catalog
        self.env = env

    @abstractmethod
    def view(self) -> View:
        """The durable, retained range now."""

    @abstractmethod
    def _frames(self, since: int, end: int) -> Iterator[WalSpan]:
        """The frames with these offsets, in order."""

    @property
    def url(self) -> str:
        """The address by which other processes of this machine read it."""
        return f"wal://{quote(str(Path(self.folder).absolute()))}"

    @property
    def log_id(self) -> UUID:
        """The log's identity."""
        return self._log_id

    @property
    def value(self) -> Codec | None:
        """The codec of the log's values, in its newest version, as stored now; None if values are plain bytes.

        ``UnsupportedVersion`` for a format of a newer release: its values can still be read as bytes.
        """
        return newest(self.value_versions, self.folder)

    @property
    def value_versions(self) -> tuple[ValueVersion, ...]:
        """All versions of the value format, as stored now; none if values are plain bytes."""
        return read_log_json(self.folder, disk=self.env.disk).values

    @property
    def content_type(self) -> str | None:
        """The media type of the values, as recorded when the log was created; None: unspecified."""
        return read_log_json(self.folder, disk=self.env.disk).content_type

    def check_value(self, value: Codec | None) -> None:
        """``InvalidInput`` unless the log has recorded the codec, in any version; None is always right."""
        check_recorded(self.value_versions, value, self.folder)

    def bounds(self) -> Bounds:
        """The first retained and the next offset; all of them are durable."""
        return self.view().bounds

    def end(self) -> Cursor:
        """The cursor after the last durable record."""
        view = self.view()
        return Cursor(self._log_id, view.bounds.next, view.term)

    @_again_if_trimmed
    def cursor_at(self, offset: int) -> Cursor:
        """The cursor after everything below ``offset``, with term and fingerprint if the record there is retained."""
        bounds = self.bounds()
        if not bounds.first < offset <= bounds.next:
            return Cursor(self._log_id, offset)
        frame = next(self._frames(offset - 1, offset)).frame
        return Cursor(self._log_id, offset, frame.term, frame.fingerprint)

    @_again_if_trimmed
    def position_of(self, start: Start) -> int:
        """The offset at which a new consumer with this start begins; does not check whether it is retained."""
        bounds, now = self.bounds(), self.env.clock.now()
        return resume.position_of(start, self._log_id, bounds, lambda time: self._written_since(time, bounds, now))

    def append_at(self, offset: int) -> StoredAppend:
        """The frame with the record at an offset; ``CursorExpired`` if it is not retained. Reads the frame."""
        spans = self.plan(Cursor(self._log_id, offset), Limit(batches=1))
        if not spans:
            raise NotReady(f"The log ends at offset {offset}, and has no record there yet.")
        batch = spans[0].batch()
        return StoredAppend(batch.first, batch.next, batch.append)

    def plan(self, since: Cursor, limit: Limit = NO_LIMIT) -> list[WalSpan]:
        """The spans to fetch after a cursor; the cost is proportional to the result, anywhere in the log.

        ``Diverged`` also if the record below the cursor has another term or fingerprint than the cursor; 0 means
        unknown, and is not checked. If that record is trimmed, only the impossible is refused: a term above that of the
        record after it.
        """
        view = self._checked(since)
        try:
            return self._plan(since, view.bounds, limit)
        except NotFound:
            view = self._checked(since)  # raises if it was trimmed meanwhile
            return self._plan(since, view.bounds, limit)

    def _checked(self, since: Cursor) -> View:
        view = self.view()
        resume.check_cursor(since, Cursor(self._log_id, 0), view.bounds)
        if since.term > view.term:
            raise _diverged(since, f"the log is in term {view.term}")
        return view

    def _plan(self, since: Cursor, bounds: Bounds, limit: Limit) -> list[WalSpan]:
        looks_back = bool(since.term or since.fingerprint is not None) and since.next > bounds.first
        frames = _agreeing(since, self._frames(since.next - looks_back, bounds.next))
        return [held.part(first, upto) for held, first, upto in plan_entries(frames, since.next, limit)]

    @_again_if_trimmed
    def term_at(self, offset: Signed) -> int | None:
        """The term of the record at an offset; None if it is not retained, or not there yet.

        Also known for the last record before the log's start, unless that is of term 0.
        """
        bounds = self.bounds()
        if offset == bounds.first - 1:
            return self._catalog.term_before(bounds.first)
        is_there = bounds.first <= offset < bounds.next
        return next(self._frames(offset, offset + 1)).frame.term if is_there else None

    @_again_if_trimmed
    def end_of_term(self, term: int) -> int:
        """The first retained offset with a record of a higher term, or the log's end if there is none.

        Terms never decrease along a log: all retained records below it are of this term or of a lower one. The cost
        does not depend on the length of the log.
        """
        bounds, newest_term = self.view()
        if bounds.first == bounds.next or newest_term <= term:
            return bounds.next
        return self._catalog.end_of_term(term, bounds.first, bounds.next)

    @_again_if_trimmed
    def bytes_behind(self, position: int) -> int:
        """Bytes stored from the frame with an offset on; below the first retained offset, from there.

        Reads little more than the files' sizes.
        """
        bounds = self.bounds()
        at = max(position, bounds.first)
        return 0 if at >= bounds.next else self._catalog.bytes_behind(next(self._frames(at, at + 1)).frame)

    @_again_if_trimmed
    def _retention_start(self, retention: Retention, consumed: int | None, now: int) -> int:
        """The first offset that a policy retains; ``consumed`` is the floor of the consumers."""
        bounds = self.bounds()
        return retention_start(
            retention,
            bounds,
            consumed,
            written_since=lambda time: self._written_since(time, bounds, now),
            newest=lambda size: self._catalog.newest(size, bounds.first, bounds.next),
            now=now,
        )

    def _written_since(self, time: int, bounds: Bounds, now: int) -> int | None:
        latest = (now + TOLERANCE) // 1000
        return self._catalog.written_since(time // 1000, bounds.first, bounds.next, now=latest)


@final
@dataclass(frozen=True, slots=True)
class WalListing:
    """Satisfies :class:`~strandline.log.slots.slot_lag.Listing`; reads one frame per position."""

    log: WalReading
    bounds: Bounds
    now: int

    def bytes_from(self, position: int) -> int:
        """Bytes stored from the frame with an offset on."""
        return self.log.bytes_behind(position)

    def written_at(self, position: int) -> int | None:
        """When the frame with this offset was written, in microseconds; None at the end."""
        span = next(iter(self.log.plan(self.log.cursor_at(position), Limit(batches=1))), None)
        return None if span is None else span.frame.timestamp * 1000

    def policy_start(self, retention: Retention, consumed: int | None) -> int:
        """The first offset that a policy retains."""
        return self.log._retention_start(retention, consumed, self.now)  # noqa: SLF001 - of the same package


def _agreeing(since: Cursor, frames: Iterator[WalSpan]) -> Iterator[WalSpan]:
    """The frames from a cursor on; ``Diverged`` if the first of them, which may end there, is of another history."""
    for held in frames:
        term = held.frame.term
        if held.first < since.next:
            if since.term not in (0, term):
                raise _diverged(since, f"the record before it, at offset {since.next - 1}, is of term {term}")
            check_fingerprint(since, held)
        elif term < since.term:
            raise _diverged(since, f"the record there is of term {term}")
        if held.next > since.next:
            yield held
        break
    yield from frames


def _diverged(since: Cursor, but: str) -> Diverged:
    return Diverged(
        f"The cursor is at offset {since.next} in term {since.term}, and {but}: the consumer has applied other records "
        "than this log holds. It has to go back to the common prefix, or to bootstrap again."
    )


@bound_to_process(keep=("log_id",))
@final
@checked
class WalReader(WalReading, Closing):
    """A log as other processes on the machine see it: up to the mark that its writer publishes after each sync.

    Changes nothing, takes no lock, and shows only durable records. After the machine stopped without the log being
    closed, ``NotReady`` until it was opened for writing: only then its end is known. Its slots can be
    read; calls that change the log raise ``Unsupported``.
    """

    def __init__(self, folder: Address, *, env: Env = SYSTEM, boot: UUID | None = None) -> None:
        """Read the log in this folder.

        ``NotALog`` if there is none, ``Diverged`` if the spool from which it was migrated was written since.
        """
        folder = as_folder(folder)
        log_id = read_identity(folder, disk=env.disk)
        refuse_changed_spool(folder, disk=env.disk)
        super().__init__(
            folder, log_id, Catalog(folder, log_id, firsts_in(env.disk.scan(folder)), disk=env.disk), env=env
        )
        self._boot = boot_id() if boot is None else boot
        self._waiter = HeadPoller()
        self._seen = 0
        """The log's end when the mark was last read."""
        self._origin = Origin(f"The log in {folder}", advice="open it again there")

    def __repr__(self) -> str:
        return f"WalReader({self.folder!r}, log_id={self._log_id})"

    def close(self) -> None:
        """Does nothing: there is nothing to close. Other logs have something to close, so all have this method."""

    def view(self) -> View:
        """The durable, retained range now, as published by the writer."""
        for _ in range(MARK_READS):
            mark = read_mark(self.folder, self._log_id, disk=self.env.disk)
            if mark is None:
                continue
            if not mark.clean and mark.boot != self._boot:
                break  # a crash of the machine may have set it back
            if mark.next < self._seen:
                self._catalog.reset()
            elif mark.active not in self._catalog.firsts[-1:]:
                self._catalog.list_files()
            self._seen = mark.next
            return View(Bounds(mark.start, mark.next, mark.sealed), mark.term)
        raise NotReady(
            f"The end of the log in {self.folder} is not known, since the machine stopped while it was open: "
            "open it for writing once, which repairs it."
        )

    def _frames(self, since: int, end: int) -> Iterator[WalSpan]:
        return (WalSpan.of(frame, None, self.env.disk) for frame in self._catalog.frames(since, end))

    def wait(self, past: Cursor, timeout: Timeout) -> bool:
        """Block until a record past the cursor is durable (True), or until the timeout (False); polls."""
        return self._waiter.wait(self.bounds, past, timeout, self.env.clock)

    @property
    def slots(self) -> ReadOnlySlots:
        """The slots as last written; their positions may be higher by now."""
        kept = partial(read_slots_file, self.folder, self._log_id, disk=self.env.disk)
        return ReadOnlySlots(lambda: kept().slots, self._refusal)

    @property
    def _refusal(self) -> str:
        return f"The log in {self.folder} was opened for reading: only the process that writes it may change it."

    def append(self, *_: object, **__: object) -> NoReturn:
        """``Unsupported``, as every change: it was opened for reading."""
        raise Unsupported(self._refusal)

    evolve_value = producer = seal = append
