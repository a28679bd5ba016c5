"""Events and actions of the follower engine, as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeAlias

from strandline.kv.contract import Ended, Listed
from strandline.model.arguments import Positive, checked
from strandline.model.cursor import Cursor

Chunk: TypeAlias = Any
"""What a source gives at once; the engine only passes it on. During a resync it must have ``keys``."""


@checked
@dataclass(frozen=True, slots=True)
class Batching:
    """When received records are applied: at so many records or bytes, or so long after the first of them came.

    A window of None is the usual one: a second for ``follow``, ten milliseconds for a watch. A watch holds at most
    ``queue`` updates that it has received and not yet batched; a stop abandons those.
    """

    records: Positive = 1_000_000
    bytes: Positive = 64 << 20
    window: float | None = None
    queue: Positive = 256


class Signal(Enum):
    """Events that carry nothing."""

    NOTHING = auto()
    """A wait, a report or an export is over, however it ended."""
    OPENED = auto()
    """The stream is open, and gives what comes after the cursor that was asked for."""
    STREAM_FAILED = auto()
    """The stream raised an error and gives nothing more: what was received before is still applied and stored."""
    APPLIED = auto()
    """The batch has been applied."""
    STORED = auto()
    """The store has taken what it was given, or there is none."""
    STORE_FAILED = auto()
    """The store has not taken what it was given, or nobody knows."""


@dataclass(frozen=True, slots=True)
class Began:
    """The follower resumes at this cursor; None asks for everything.

    ``unsettled`` says that the store's content does not belong to that cursor: a resync was begun and not ended, or
    everything is asked for and the store is not empty.
    """

    cursor: Cursor | None
    unsettled: bool = False


@dataclass(frozen=True, slots=True)
class Expired:
    """The stream cannot serve the cursor any more.

    ``anew`` is the stream's beginning, for a store that takes everything anew with no reader to compare it with.
    """

    anew: Cursor | None = None


@dataclass(frozen=True, slots=True)
class Received:
    """A chunk of the stream, from ``since`` (where that is told) up to ``upto``."""

    chunk: Chunk
    count: int
    upto: Cursor
    since: Cursor | None = None
    size: int = 0


@dataclass(frozen=True, slots=True)
class Ghosts:
    """Removals of the keys that the store has and the stream has not, in chunks."""

    chunks: Sequence[Chunk]


Event = Signal | Began | Expired | Received | Listed | Ended | Ghosts


@dataclass(frozen=True, slots=True)
class AppliedRange:
    """Chunks with the cursor behind them, in one atomic write."""

    chunks: Sequence[Chunk]
    since: Cursor | None
    upto: Cursor


@dataclass(frozen=True, slots=True)
class BeginResync:
    """The durable flag, with the stream's identity: from here on the state belongs to no cursor."""


@dataclass(frozen=True, slots=True)
class Loose:
    """Chunks of a resync: they move no cursor."""

    chunks: Sequence[Chunk]


@dataclass(frozen=True, slots=True)
class EndResync:
    """The flag goes, and the cursor is this, in one atomic write."""

    cursor: Cursor


Write = AppliedRange | BeginResync | Loose | EndResync


@dataclass(frozen=True, slots=True)
class Open:
    """Open the stream after this cursor; None means the full watch: all that is current, then changes."""

    cursor: Cursor | None


@dataclass(frozen=True, slots=True)
class Receive:
    """Take the next chunk after ``since``, about so many records and bytes; wait for it no longer than ``seconds``."""

    since: Cursor | None
    records: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Apply:
    """Hand these chunks to whoever applies them."""

    chunks: Sequence[Chunk]


@dataclass(frozen=True, slots=True)
class StoreBatch:
    """Hand this to the store. It was applied before."""

    write: Write


@dataclass(frozen=True, slots=True)
class ReportCursor:
    """Say how far it got; the cursor is one that the store has taken."""

    cursor: Cursor


@dataclass(frozen=True, slots=True)
class FindGhosts:
    """Compare the store's keys in scope with those that the stream's owner lists as present."""


@dataclass(frozen=True, slots=True)
class ResyncSweep:
    """Compare the store's keys in scope with those that a full watch has given."""

    given: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class Export:
    """Serve one request for an export; the store holds everything that was applied."""

    request: Any


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait so many seconds, or until asked to stop."""

    seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The store has failed too often in a row."""

    failures: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Nothing is left to do. ``doubtful`` says that the store failed last: its own word is the cursor then."""

    cursor: Cursor | None
    doubtful: bool = False


Action = (
    Open | Receive | Apply | StoreBatch | ReportCursor | FindGhosts | ResyncSweep | Export | Pause | GiveUp | Finish
)
