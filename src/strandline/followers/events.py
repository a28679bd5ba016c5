"""Events and actions of the follower engine, as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeAlias

from strandline.kv.contract import Ended, Listed
from strandline.model.arguments import Positive, checked
from strandline.model.cursor import Cursor

SourceDelivery: TypeAlias = Any
"""A delivery of a source; opaque to the engine. During a resync it must have ``keys``."""


@checked
@dataclass(frozen=True, slots=True)
class Batching:
    """When a batch is applied: at ``records`` or ``bytes``, or ``window`` seconds after its first record.

    ``bytes`` are those in memory. For a table they are estimated from what was read before, since only workers read
    the records, and a commit takes a quarter more at most. A batch of the log is never divided. ``batches`` bounds the
    batches of the log that are applied together, too.

    The default window is a second for ``follow`` and ten milliseconds for a watch. Once ``follow`` has had nothing to
    do for a window, it applies the next records within 50 milliseconds. A watch queues at most ``queue`` received
    updates before batching; a stop discards them.
    """

    records: Positive = 1_000_000
    bytes: Positive = 64 << 20
    window: float | None = None
    queue: Positive = 256
    batches: Positive | None = None


class Signal(Enum):
    """Events without data."""

    NOTHING = auto()
    """A wait, a report or an export has ended, successfully or not."""
    OPENED = auto()
    """The stream is open after the requested cursor."""
    STREAM_FAILED = auto()
    """The stream failed: received updates are still applied and stored."""
    APPLIED = auto()
    """The batch has been applied."""
    STORED = auto()
    """The write is stored, or there is no store."""
    STORE_FAILED = auto()
    """The write failed, or its outcome is unknown."""


@dataclass(frozen=True, slots=True)
class Began:
    """The follower resumes at this cursor; None requests everything.

    ``unsettled``: the store's state does not belong to the cursor, since a resync was not finished, or everything is
    requested and the store is not empty.
    """

    cursor: Cursor | None
    unsettled: bool = False


@dataclass(frozen=True, slots=True)
class Expired:
    """The stream can no longer serve the cursor.

    ``beginning`` is the stream's beginning, for a store that reloads everything without a reader to compare with.
    """

    beginning: Cursor | None = None


@dataclass(frozen=True, slots=True)
class Received:
    """A chunk of the stream, from ``since`` (if known) up to ``upto``."""

    chunk: SourceDelivery
    count: int
    upto: Cursor
    since: Cursor | None = None
    size: int = 0
    batches: int = 1


@dataclass(frozen=True, slots=True)
class VanishedKeys:
    """Deletes of the vanished keys, which are in the store but not in the stream, in chunks."""

    chunks: Sequence[SourceDelivery]


Event = Signal | Began | Expired | Received | Listed | Ended | VanishedKeys


@dataclass(frozen=True, slots=True)
class AppliedRange:
    """Chunks and the cursor after them, in one atomic write."""

    chunks: Sequence[SourceDelivery]
    since: Cursor | None
    upto: Cursor


@dataclass(frozen=True, slots=True)
class BeginResync:
    """Set the durable resync flag, with the stream's identity: the state belongs to no cursor from now on."""


@dataclass(frozen=True, slots=True)
class ResyncWrite:
    """Chunks of a resync; the cursor stays."""

    chunks: Sequence[SourceDelivery]


@dataclass(frozen=True, slots=True)
class EndResync:
    """Clear the resync flag and set the cursor, in one atomic write."""

    cursor: Cursor


Write = AppliedRange | BeginResync | ResyncWrite | EndResync


@dataclass(frozen=True, slots=True)
class Open:
    """Open the stream after this cursor; None means a full watch: the current values, then changes."""

    cursor: Cursor | None


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive the next chunk after ``since``, of about this size; wait at most ``seconds``."""

    since: Cursor | None
    records: int
    bytes: int
    seconds: float
    batches: int | None = None


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply these chunks."""

    chunks: Sequence[SourceDelivery]


@dataclass(frozen=True, slots=True)
class StoreBatch:
    """Write this to the store; it was applied before."""

    write: Write


@dataclass(frozen=True, slots=True)
class ReportCursor:
    """Report the cursor, which the store has stored."""

    cursor: Cursor


@dataclass(frozen=True, slots=True)
class FindVanishedKeys:
    """Compare the store's keys in scope with those that a full watch has ``given``, or else that the reader lists."""

    given: frozenset[bytes] | None = None


@dataclass(frozen=True, slots=True)
class Export:
    """Serve one export request; everything applied is in the store."""

    request: Any


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait for some seconds, or until the stop."""

    seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The store failed too often in a row: end with an error."""

    failures: int


@dataclass(frozen=True, slots=True)
class Finish:
    """End the follower. ``doubtful``: the last write failed, so the cursor is read from the store."""

    cursor: Cursor | None
    doubtful: bool = False


Action = Open | Receive | Apply | StoreBatch | ReportCursor | FindVanishedKeys | Export | Pause | GiveUp | Finish
