"""Decisions of the data source and the pipelines: pure functions over cursors, bounds and spans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote
from uuid import UUID

from strandline.errors import CursorExpired, InvalidInput
from strandline.log.contract import LogReading
from strandline.log.slots.resume import check_cursor, position_of
from strandline.model.addresses import split_address
from strandline.model.cursor import Bounds, Cursor, Limit, Start

if TYPE_CHECKING:
    from strandline.tier.read.cold_reader import ColdPiece


def cursor_at(position: Start, log: LogReading, bounds: Bounds) -> Cursor:
    """The cursor of a position, retained or not, in a log with these bounds; the log is asked for a time only."""
    if isinstance(position, datetime):
        return Cursor(log.log_id, log.position_of(position))
    offset = position_of(position, log.log_id, bounds, lambda _: None)
    return position if isinstance(position, Cursor) else Cursor(log.log_id, offset)


def resume_point(cursor: Cursor, log_id: UUID, bounds: Bounds, *, fail_on_data_loss: bool) -> tuple[Cursor, int]:
    """Where a reader resumes, and how many records it skips; ``Diverged``, or ``CursorExpired`` if it may skip none."""
    try:
        check_cursor(cursor, Cursor(log_id, 0), bounds)
    except CursorExpired as error:
        if fail_on_data_loss:
            raise CursorExpired(
                f"Offsets {cursor.next} to {bounds.first - 1} are needed but no longer retained (the log begins at "
                f"{bounds.first}): rebuild what follows it from a new checkpoint with startingOffset=earliest, or "
                "accept the loss with failOnDataLoss=false. A slot would have pinned them."
            ) from error
        return cursor.at(bounds.first), bounds.first - cursor.next
    return cursor, 0


def trimmed_meanwhile(first: int, bounds: Bounds, url: str) -> CursorExpired | None:
    """The error for a planned offset that cannot be read because the log was trimmed since; else None."""
    if first >= bounds.first:
        return None
    return CursorExpired(
        f"Offsets {first} to {bounds.first - 1} of {url} were trimmed after this read was planned (the log begins "
        f"at {bounds.first} now): read again. The option 'hold' pins the records of a batch read, a slot those of a "
        "stream."
    )


def narrower(first: Limit, second: Limit) -> Limit:
    """The narrower of two limits, in each dimension."""
    pairs = zip(astuple(first), astuple(second), strict=True)
    return Limit(*(min((most for most in pair if most is not None), default=None) for pair in pairs))


@dataclass(frozen=True, slots=True)
class TierBoundary:
    """The boundary of a read of both tiers: ``cold`` from ``since`` up to the cut, the hot tier up to ``end``."""

    since: Cursor
    cold: tuple[ColdPiece, ...]
    """In order and without a gap, each offset once."""
    end: int

    @property
    def cut(self) -> int:
        """The first offset that is not read from segments."""
        return self.cold[-1].next if self.cold else self.since.next


@dataclass(frozen=True, slots=True)
class PlannedScan:
    """Objects of segments that are read together, and the range of their offsets that counts; None: unbounded."""

    paths: tuple[str, ...]
    first: int | None
    next: int | None


def scans(pieces: Sequence[ColdPiece]) -> list[PlannedScan]:
    """The fewest scans that read each offset of the pieces once, though segments may overlap.

    A scan has one range for all of its objects. So an object with offsets that are read from another one can only
    begin or end a scan.
    """
    runs: list[list[ColdPiece]] = []
    for piece in pieces:
        if runs and not piece.cut_before and not runs[-1][-1].cut_behind:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [
        PlannedScan(
            tuple(piece.path for piece in run),
            run[0].first if run[0].cut_before else None,
            run[-1].next if run[-1].cut_behind else None,
        )
        for run in runs
    ]


_GLOBS: Final = str.maketrans({letter: f"\\{letter}" for letter in "{}[]*?\\"})


def spark_path(store: str, path: str) -> str | None:
    """Spark's address of an object in a store; None if Spark's readers may not reach it by such an address.

    >>> spark_path("s3://bucket/cold", "a.parquet")
    's3a://bucket/cold/a.parquet'
    >>> spark_path("az://container/cold", "a.parquet")
    """
    parts = split_address(store)
    match parts.scheme:
        case "file":
            # Spark uses names literally, except for glob characters.
            place = f"file://{unquote(parts.path).rstrip('/')}"
        case "s3" | "s3a" if store.isascii() and "%" not in store:
            place = f"s3a://{store.partition('://')[2].rstrip('/')}"
        case _:
            return None
    return f"{place}/{path}".translate(_GLOBS)


def encode_offset(cursor: Cursor) -> dict[str, Any]:
    """A cursor in Spark's form. Spark compares the JSON text, so the order of the keys never changes."""
    offset = {"log": str(cursor.log_id), "next": cursor.next, "term": cursor.term}
    return offset if cursor.fingerprint is None else {**offset, "fingerprint": f"{cursor.fingerprint:016x}"}


def decode_offset(offset: Mapping[str, Any]) -> Cursor:
    """The inverse of :func:`encode_offset`; ``InvalidInput`` for an offset that this source never wrote."""
    try:
        fingerprint = offset.get("fingerprint")
        known = None if fingerprint is None else int(fingerprint, 16)
        return Cursor(UUID(offset["log"]), int(offset["next"]), int(offset.get("term", 0)), known)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidInput(
            f"The checkpoint holds {offset!r}, which is no position in a log: start with a new checkpoint."
        ) from error
