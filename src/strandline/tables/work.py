"""The task of a worker, in a thread or on an executor: fetch the spans of its part, and write it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import pyarrow as pa

from strandline.errors import InvalidInput, NotReady
from strandline.log.contract import Log
from strandline.log.read.decoded_sizes import DecodedSizes
from strandline.log.read.planning import cursor_after, divided
from strandline.log.read.reading import AHEAD_BYTES, fetch_in_order
from strandline.model.cursor import Cursor, Limit, Span
from strandline.storage.task_pool import TaskPool
from strandline.tables.files.layout import FEW_SHARES
from strandline.tables.maintain.range_pin import RebuildPin
from strandline.tables.written import Written

if TYPE_CHECKING:
    from strandline.tables.files.part import TablePart


def assigned(parts: Sequence[TablePart], spans: Sequence[Span]) -> list[tuple[TablePart, Sequence[Span]]]:
    """The spans of each part: all of them for a part by keys, its own for a part by offsets."""
    if parts[0].takes == "keys":
        return [(part, spans) for part in parts]
    return list(zip(parts, divided(spans, len(parts)), strict=True))


def is_shuffled(parts: Sequence[TablePart]) -> bool:
    """Whether there are too many parts by keys for each to fetch all records: their rows are shuffled."""
    return parts[0].takes == "keys" and len(parts) > FEW_SHARES


def is_exchanged(parts: Sequence[TablePart]) -> bool:
    """Whether each of a few parts by keys would have to decode all records, since only a row tells its key."""
    return parts[0].takes == "keys" and 1 < len(parts) <= FEW_SHARES and not parts[0].shape.has_record_keys


class RangeTooLarge(MemoryError):
    """The records of a range, up to some offset, take more memory than a commit may: it has to be divided."""

    def __init__(self, first: int, end: int, decoded: int) -> None:
        super().__init__(first, end, decoded)
        self.first, self.next, self.decoded = first, end, decoded

    def __str__(self) -> str:
        return f"The records at offsets {self.first} to {self.next - 1} take {self.decoded:,} bytes in memory."


def written(part: TablePart, spans: Sequence[Span], most: int | None = None) -> Written:
    """Fetch the spans and write the part, wherever this runs."""
    return part.write(records_of(spans, most))


def records_of(spans: Sequence[Span], most: int | None = None) -> Iterator[pa.RecordBatch]:
    """The records of some spans, in order, fetched ahead.

    ``RangeTooLarge`` if they take more than ``most`` bytes, and a quarter more than that: what was expected of them is
    an estimate. One span is given whatever it takes.
    """
    ahead = AHEAD_BYTES if most is None else min(AHEAD_BYTES, most)
    decoded = 0
    for span, batches in fetch_in_order(spans, ahead=ahead):
        decoded += sum(batch.nbytes for batch in batches)
        if most is not None and decoded > most + most // 4 and len(spans) > 1:
            raise RangeTooLarge(spans[0].first, span.next, decoded)
        yield from batches
        batches.clear()  # not kept longer than needed


class Workers(Protocol):
    """A pool of workers that writes the parts of a range."""

    @property
    def sizes(self) -> DecodedSizes:
        """What spans take in memory, as far as it is known from the ranges before."""

    def works_here(self, spans: Sequence[Span]) -> bool:
        """Whether a range is written in this process, since that is quicker."""

    def tasks(self, spans: Sequence[Span]) -> int:
        """Number of workers for a range."""

    def run(
        self, parts: Sequence[TablePart], spans: Sequence[Span], title: str, most: int | None = None
    ) -> Sequence[Written]:
        """Write all parts; reports in their order. Raises the first error, or ``RangeTooLarge`` far above ``most``."""


class InProcess:
    """Writes the parts one after the other in this process."""

    def __init__(self) -> None:
        self.sizes = DecodedSizes()

    def works_here(self, spans: Sequence[Span]) -> bool:
        """Always."""
        return True

    def tasks(self, spans: Sequence[Span]) -> int:
        """One: a second worker of this process would wait for the first."""
        return 1

    def run(
        self, parts: Sequence[TablePart], spans: Sequence[Span], title: str, most: int | None = None
    ) -> Sequence[Written]:
        """Write all parts here."""
        return [written(part, own, most) for part, own in assigned(parts, spans)]


IN_PROCESS: Final = InProcess()


@dataclass(frozen=True, slots=True)
class Rebuild:
    """The range of a log that becomes all rows of a table, and what writes and verifies them."""

    log: Log
    upto: int | None
    """None: the end of the log when the range is planned."""
    start: Cursor | None
    """None: where the table began."""
    workers: Workers
    pool: TaskPool
    """Compares the new rows with the log before they replace the old ones."""
    is_verified: bool
    """Whether they are compared."""
    pin: RebuildPin
    """Keeps the range in the log until the rows are committed, and what comes behind it for the follower."""

    def planned(self, began: int) -> tuple[Cursor, Sequence[Span], Cursor]:
        """The cursor at which the new rows begin, the spans, and the cursor at their end.

        ``began`` is the offset at which the table began. ``CursorExpired`` if the log no longer has the start.
        Called when the state of the table that is replaced is known: a follower that commits later is a conflict, and
        one that has committed before is not ahead of the log's end, so that no table goes back behind its slot.
        """
        upto = self.log.end().next if self.upto is None else self.upto
        beginning = self.log.cursor_at(began) if self.start is None else self.start
        if beginning.next > upto:
            raise InvalidInput(
                f"A table that begins at offset {beginning.next} cannot be built up to offset {upto}: name an "
                "earlier start, or a later end."
            )
        self.pin.hold(beginning)  # before it is planned: from here on nothing of it is trimmed
        spans = self.log.plan(beginning, Limit(upto=upto))
        end = cursor_after(beginning, spans[-1]) if spans else beginning
        if end.next != upto:
            raise NotReady(
                f"The log ends at offset {end.next}, before {upto}: name an earlier end, or try again later."
            )
        self.pin.hold_behind(end)
        return beginning, spans, end
