"""The contract of every log."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, final, runtime_checkable
from uuid import UUID

import pyarrow as pa

from strandline.errors import Unsupported
from strandline.log.produce.producer import Producer
from strandline.log.read.reading import read_spans
from strandline.model.cursor import NO_LIMIT, Bounds, Cursor, Limit, Span, Start
from strandline.model.head import Receipt, WriterId
from strandline.model.records import RecordSource
from strandline.model.retention import SlotState
from strandline.values.contract import Codec


@runtime_checkable
class Handle(Protocol):
    """An append under way."""

    def done(self) -> bool:
        """Whether the outcome is known."""

    def result(self, timeout: float | None = None) -> Receipt:
        """Block until the records are durable and listed, or raise why not; ``TimeoutError`` if neither yet."""

    def __await__(self) -> Generator[object, None, Receipt]:
        """Await the result, as :meth:`result` blocks for it."""


@final
@dataclass(frozen=True, slots=True)
class Settled:
    """The handle of an append whose outcome is known already."""

    receipt: Receipt
    repeated: bool = False
    """Whether the log had an append of this writer and number before, so that this one added nothing."""

    def done(self) -> bool:
        """True."""
        return True

    def result(self, timeout: float | None = None) -> Receipt:
        """The receipt."""
        return self.receipt

    def __await__(self) -> Generator[object, None, Receipt]:
        yield from ()
        return self.receipt


@runtime_checkable
class Slot(Protocol):
    """A claimed slot: this holder's durable position in a log."""

    @property
    def name(self) -> str:
        """The slot's name within its log."""

    @property
    def epoch(self) -> int:
        """The fencing number of this claim."""

    def state(self) -> SlotState:
        """The stored state, also if another holder has claimed the slot."""

    def advance(self, to: Cursor) -> None:
        """Durably move the position up to a cursor; a lower one changes nothing.

        ``Fenced`` if another holder has claimed the slot since, ``SlotInvalid`` if it was invalidated: both change
        nothing. Repeating after a failure is safe.
        """

    def touch(self) -> None:
        """Heartbeat: durably record that the holder is alive. Raises as ``advance`` does."""


@runtime_checkable
class Slots(Protocol):
    """The slots of one log: positions of consumers, which pin what is still needed. Every change is durable."""

    def create(self, name: str, position: int, *, lifetime: float | None = None) -> SlotState:
        """Create a slot that pins everything from ``position`` on.

        With a ``lifetime`` the slot is dropped after that time, unless its consumer claims or touches it: a
        newcomer that is killed before it has stored anything does not pin the log for good.
        ``AlreadyExists`` if there is one, ``CursorExpired`` if the position is no longer retained.
        """

    def claim(self, name: str, holder: str) -> Slot:
        """Become the slot's holder; the same holder again is idempotent, another one is fenced. ``NotFound``."""

    def reset(self, name: str, position: int) -> SlotState:
        """Move a slot, back or ahead, and make it valid again: the only way to repair an invalid one.

        Its epoch grows, so that its holder is fenced, and it has no holder then. ``CursorExpired`` if the position is
        no longer retained, ``NotFound``: both change nothing.
        """

    def drop(self, name: str) -> None:
        """Remove a slot: what only it pinned may be deleted. ``NotFound``."""

    def touch(self, name: str, epoch: int) -> None:
        """Keep a slot alive that was created and not claimed yet; raises as :meth:`Slot.touch` does."""

    def flush(self) -> None:
        """Write positions that are only in memory so far."""

    def get(self, name: str) -> SlotState:
        """One slot, or ``NotFound``."""

    def list(self) -> Sequence[SlotState]:
        """All slots, by name."""

    def floor(self) -> int | None:
        """The lowest position that a valid slot, or one being created, still needs; None without any."""


@runtime_checkable
class LogReading(Protocol):
    """The reading half of a log. Subclasses inherit :meth:`start` and :meth:`read`, which use the other methods.

    Reading changes nothing and claims nothing. All calls may block on storage and raise ``StorageError``.
    """

    @property
    def log_id(self) -> UUID:
        """The log's identity; cursors carry it."""

    @property
    def counts_batches(self) -> bool:
        """Whether offsets count batches, whose records all have the same one: those of a queue of version 1.

        Such a log has one slot, which only its own consumer moves.
        """
        return False

    @property
    def content_type(self) -> str | None:
        """The media type of the values, as recorded when the log was created; None: unspecified."""
        return None

    def bounds(self) -> Bounds:
        """The first retained and the next offset, and whether the log was sealed there."""

    def ended(self, at: int) -> bool:
        """Whether a reader with everything below ``at`` has all that there will ever be: the log was sealed there.

        As of the last look at the log, so that asking costs no request: a wait that found nothing has looked.
        """
        return self.bounds().ended(at)

    def start(self) -> Cursor:
        """The cursor of a new consumer that reads everything that is retained."""
        return Cursor(self.log_id, self.bounds().first)

    def cursor_at(self, offset: int) -> Cursor:
        """The cursor of a consumer that has applied everything below ``offset``, which the log reaches.

        Includes term and fingerprint of the record before it, if the log has them and still retains that record.
        """

    def position_of(self, start: Start) -> int:
        """The offset at which a new consumer with this start begins; ``Diverged`` for a cursor of another log.

        ``"beginning"`` is offset 0, ``"retained"`` the first retained offset, ``"now"`` the end. A time means the
        first batch that was listed then or later. Does not check whether the offset is retained.
        """

    def plan(self, since: Cursor, limit: Limit = NO_LIMIT) -> Sequence[Span]:
        """The spans to fetch after a cursor, in order and without a gap; ``[]`` if there are none now.

        ``CursorExpired`` if the log no longer retains the cursor's position, ``Diverged`` if the cursor is of another
        log or past the end, or if its fingerprint does not match the batch before it.
        """

    def read(
        self, since: Start | None = None, *, upto: int | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Batches with offsets, in order, from ``since`` (all that is retained) up to ``upto`` (the end as of now).

        ``since`` is an offset, a cursor, a time or a word: ``"beginning"``, ``"retained"`` or ``"now"``. Raises as
        :meth:`plan` does; ``NotReady`` if the log does not reach ``upto`` yet.
        """
        cursor = self.start() if since is None else cursor_of(self, since)
        # Not by its bounds: where a cold tier begins may be unknown now.
        end = self.position_of("now") if upto is None else upto
        if cursor.next >= end:
            self.plan(cursor, Limit(batches=1))  # refuses a cursor past the end or of another log
        for _, batches in read_spans(self.plan, cursor, end, columns):
            yield from batches


def cursor_of(log: LogReading, start: Start) -> Cursor:
    """The cursor of a reader that begins at an offset, a cursor, a time or a word."""
    return start if isinstance(start, Cursor) else log.cursor_at(log.position_of(start))


@runtime_checkable
class Log(LogReading, Protocol):
    """One total order of records, numbered densely from 0."""

    def append(
        self, batch: RecordSource, *, writer: WriterId, number: int, expect: int | None = None, seal: bool = False
    ) -> Handle:
        """Append a batch, whole or not at all.

        The same writer and number again is a no-op, whatever the outcome of the first try, also after the log was
        sealed. Numbers of a writer begin at 0 and are listed strictly in order, else ``OutOfOrder``. With ``expect``,
        ``ExpectationFailed`` unless the log ends exactly there. With ``seal`` the same atomic step seals the log behind
        the batch. ``Sealed`` if the log was sealed before.
        """

    def seal(self) -> Cursor:
        """Durably end the log, and return the cursor of its end: no record is ever appended there.

        An append that runs at the same time is below the end, or is ``Sealed``. Repeating it is safe, also after a lost
        answer. Reading, slots and trimming go on. Nothing can unseal a log.
        """

    def producer(
        self,
        *,
        batch_bytes: int = ...,
        linger: float = ...,
        budget: int = ...,
        block: bool = ...,
        value: Codec | None = ...,
    ) -> Producer:
        """A producer: many small appends become few batches, in the order of the calls, each listed once.

        A batch is closed at ``batch_bytes``, ``linger`` seconds after its first record, or by a flush. When ``budget``
        bytes are not yet listed, appending blocks, or raises ``BufferFull`` if ``block`` is false. ``value`` is the
        codec of typed values; by default the one that the log names, if it names one.
        """

    def end(self) -> Cursor:
        """The cursor of a new consumer that reads only records from now on."""

    def wait(self, past: Cursor, timeout: float) -> bool:
        """Block until the log reaches past the cursor (True), or until the timeout (False).

        False at once at the end of a sealed log: check :meth:`ended` before waiting again.
        """

    @property
    def slots(self) -> Slots:
        """The log's slots."""


READING: Final = ("bounds", "end", "plan", "position_of", "wait")


def require(log: object, what: str, *calls: str, slots: bool = False) -> None:
    """Refuse an object that is no log, or lacks methods, before it is used.

    ``Unsupported`` unless it has these methods, and slots if they are needed; ``what`` names the use in the error.
    """
    missing = [name for name in calls if not callable(getattr(log, name, None))]
    if slots and not isinstance(getattr(log, "slots", None), Slots):
        missing.append("slots")
    if missing:
        raise Unsupported(
            f"A {type(log).__name__} cannot be {what}: it has no {', '.join(missing)}. Use a log that strandline.open "
            "returns, the log of a WriteAheadLog (wal.log), or for reading the reading() of a node."
        )
