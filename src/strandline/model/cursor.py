"""Positions in a log: cursors, bounds, limits and the spans of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Annotated, Final, Literal, Protocol, runtime_checkable
from uuid import UUID

import pyarrow as pa

from strandline.errors import InvalidInput
from strandline.model.arguments import Natural, Positive, checked, shown, whole

LARGEST_FINGERPRINT: Final = (1 << 64) - 1


@checked
@dataclass(frozen=True, slots=True)
class Cursor:
    """Everything below ``next`` has been applied, nothing at or above it has.

    ``fingerprint`` identifies the batch with the record before ``next``, as :func:`batch_fingerprint` computes it. A
    log that was restored from a copy and then grew differently has another batch there, and refuses the cursor. None:
    unknown, not compared. Cursors are equal whatever their fingerprints.

    >>> cursor = Cursor(UUID(int=7), 42, fingerprint=255)
    >>> str(cursor)
    '00000000-0000-0000-0000-000000000007/0/42/00000000000000ff'
    >>> Cursor.parse(str(cursor)) == cursor
    True
    """

    log_id: UUID
    next: Natural
    term: Natural = 0
    fingerprint: Annotated[int, whole(0, LARGEST_FINGERPRINT)] | None = field(default=None, compare=False)

    def at(self, offset: int) -> Cursor:
        """The same log and term, another position; without a fingerprint."""
        return self if offset == self.next else Cursor(self.log_id, offset, self.term)

    def within_batch(self, offset: int) -> Cursor:
        """Another position after a record of the same batch."""
        return Cursor(self.log_id, offset, self.term, self.fingerprint)

    def __str__(self) -> str:
        text = f"{self.log_id}/{self.term}/{self.next}"
        return text if self.fingerprint is None else f"{text}/{self.fingerprint:016x}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """The inverse of ``str``; anything else is :class:`InvalidInput`."""
        try:
            log_id, term, offset, *rest = text.split("/")
            if len(rest) > 1:
                raise ValueError("it has more parts than a cursor")  # noqa: TRY301 - one sentence for all
            return cls(UUID(log_id), int(offset), int(term), int(rest[0], 16) if rest else None)
        except ValueError as error:
            raise InvalidInput(
                f"{shown(text)} is no cursor; expected 'log-id/term/offset', or 'log-id/term/offset/fingerprint'."
            ) from error


def batch_fingerprint(*identity: object) -> int:
    """64 bits that distinguish a batch from any other at its offset in another history of the log.

    >>> f"{batch_fingerprint('batches/7.batch', 3):016x}"
    'a6e0b18bddff4561'
    """
    text = "/".join(map(str, identity))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


Start = Literal["beginning", "retained", "now"] | int | datetime | Cursor
"""Where a new consumer begins: at the log's very first record (``CursorExpired`` if that was trimmed), at the first
retained record, at the end, at an offset, at a listing time, or at a cursor, such as that of its snapshot.

A consumer with one state per key needs the beginning or a snapshot: the retained records lack the keys that were not
written since the log was trimmed."""


_DIGITS: Final = 19
"""Most digits of an offset."""


def parse_start(text: str) -> Start:
    """A position in a log: ``beginning``, ``retained``, ``now``, an offset, or a time of listing.

    >>> parse_start("now"), parse_start("42"), str(parse_start("2026-01-15T05:29Z"))
    ('now', 42, '2026-01-15 05:29:00+00:00')
    """
    match text:
        case "beginning" | "retained" | "now":
            return text
        case _ if text.isdecimal() and len(text) <= _DIGITS:
            return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInput(
            f"{text!r} is neither 'beginning', 'retained' nor 'now', nor an offset, nor a time such as "
            "2026-01-15T05:29:00Z."
        ) from error
    if moment.tzinfo is None:
        raise InvalidInput(f"The time {text!r} has no time zone: write {moment.isoformat()}Z if it is UTC.")
    return moment


SECOND: Final = 1_000_000
"""A second in the log's unit of time."""
MILLISECOND: Final = 1_000


def microseconds(time: datetime) -> int:
    """A time in the log's unit: microseconds since the epoch. ``InvalidInput`` for one without a time zone."""
    if time.tzinfo is None:
        raise InvalidInput(f"The time {time} has no time zone: add one, such as UTC.")
    return (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The offsets of a log: ``first`` up to and without ``next`` (the high-water mark)."""

    first: int
    next: int
    sealed: bool = False
    """Whether the log was sealed at ``next``: it never has more records."""

    def __repr__(self) -> str:
        return f"Bounds(first={self.first}, next={self.next}{', sealed=True' if self.sealed else ''})"

    @property
    def extent(self) -> int:
        """``next``, and one more if the log was sealed there: to nodes, a seal counts as one more record.

        So what decides whether a record is durable, committed, or on a candidate decides the same of a seal.
        """
        return self.next + self.sealed

    def ended(self, at: int) -> bool:
        """Whether a reader that has everything below ``at`` has all that the log will ever hold."""
        return self.sealed and at >= self.next

    @property
    def count(self) -> int:
        """Number of retained records."""
        return self.next - self.first


@checked(own=("allows",))
@dataclass(frozen=True, slots=True)
class Limit:
    """Limit of a plan. Sizes never split a batch: a plan has at least one batch, if the log has one.

    ``upto`` is an exact end offset, which may split a batch.
    """

    records: Positive | None = None
    bytes: Positive | None = None
    batches: Positive | None = None
    upto: int | None = None

    @property
    def is_bounded_by_offset_only(self) -> bool:
        """Whether a plan may have any size."""
        return self.records is None and self.bytes is None and self.batches is None

    def allows(self, *, records: int, size: int, batches: int) -> bool:
        """Whether a plan of this total size is within the limit."""
        return (
            (self.records is None or records <= self.records)
            and (self.bytes is None or size <= self.bytes)
            and (self.batches is None or batches <= self.batches)
        )


NO_LIMIT = Limit()


@dataclass(frozen=True, slots=True)
class RecordRange:
    """Ranges of timestamps and keys of a span, known without reading it; None if unknown. Both ends are included."""

    oldest: int | None = None
    newest: int | None = None
    """Timestamps in microseconds."""
    lowest_key: bytes | None = None
    highest_key: bytes | None = None


@runtime_checkable
class DescribedSpan(Protocol):
    """A span that knows something of its records, so that a reader with bounds can skip it."""

    def record_range(self) -> RecordRange:
        """The timestamps and keys of its records."""


class OffsetRange(Protocol):
    """A stored batch, or a piece of a plan: which offsets it holds, and how many bytes."""

    @property
    def first(self) -> int:
        """The offset of its first record."""

    @property
    def next(self) -> int:
        """One past the offset of its last record."""

    @property
    def size(self) -> int:
        """Its stored bytes."""


@runtime_checkable
class Span(OffsetRange, Protocol):
    """A picklable, stateless piece of a plan: offsets ``first`` up to and without ``next``.

    Safe in threads, other processes and Spark executors. Fetching twice gives equal batches. A span may also have

    - ``term``, of all its records, and ``fingerprint``, by which its batch is told from any other one at its offset;
    - ``parts()``, the same as smaller spans in order, if it is too large to fetch at once; it may block;
    - ``join(following)``, both as one span, if they can be fetched in one call; else None;
    - ``numbers_batches``, true if its offset numbers a batch, and is that of all its records.
    """

    def fetch(self, columns: Sequence[str] | None = None) -> list[pa.RecordBatch]:
        """Read and check the span: batches of :data:`~strandline.model.records.READ_SCHEMA`, in offset order.

        ``columns`` selects columns, in this order. Raises ``CorruptData`` or ``NotFound`` naming the
        object; may block on the store.
        """
