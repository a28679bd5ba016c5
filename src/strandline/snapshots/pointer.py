"""Rules of the snapshot pointer: it never moves back, and no snapshot that it may name is deleted. Pure.

Exporters and trims run concurrently on any machine, and crash at any moment. The pointer alone decides whether a
payload may be deleted: it is not listed, and its generation can no longer be. Clocks only decide when.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final

from strandline.errors import Diverged, StrandlineError
from strandline.model.cursor import Cursor
from strandline.model.snapshot import Artifact, Pointer, Superseded

_LOCATION: Final = re.compile(r"payloads/([0-9]{16})/[0-9a-z-]{1,160}")


class StalePayload(StrandlineError):
    """The payload's generation may have been deleted meanwhile: upload it again. Handled by the exporter."""


def location_of(generation: int, cursor: Cursor, sha256: str) -> str:
    """The path of a payload, from its cursor and the hash of its manifest; paths sort by generation."""
    return f"payloads/{generation:016d}/{cursor.next:020d}-{cursor.term}-{cursor.log_id.hex}-{sha256}"


def generation_of(location: str) -> int | None:
    """The generation in a payload's path; None for any other path."""
    name = _LOCATION.fullmatch(location)
    return None if name is None else int(name[1])


def follows(cursor: Cursor, current: Artifact | None, *, replacing: bool = False, lost: str | None = None) -> bool:
    """Whether a snapshot at this cursor may take the place of the published one.

    If that is older; if it is of another log, and ``replacing`` (else ``Diverged``); or if it is at the location
    ``lost``: the log was restored from a copy, and does not have the records of that snapshot any more.
    """
    if current is None or current.location == lost:
        return True
    known = current.cursor
    if cursor.log_id == known.log_id:
        # A snapshot of an older term that reaches further has records that the newer term replaced.
        return cursor.next > known.next and cursor.term >= known.term
    if not replacing:
        raise Diverged(
            f"A snapshot of log {cursor.log_id} cannot follow one of log {known.log_id} at {current.location}: publish "
            "it elsewhere, or with replace=True if that log is given up."
        )
    return True


def point(pointer: Pointer, artifact: Artifact, *, replacing: bool = False, lost: str | None = None) -> Pointer:
    """The pointer moved to an artifact; unchanged if it names one that the artifact does not follow.

    ``StalePayload`` if the artifact's objects may have been deleted, ``Diverged`` if the published one is of another
    log, unless ``replacing``.
    """
    current = pointer.current
    if not follows(artifact.cursor, current, replacing=replacing, lost=lost):
        return pointer
    generation = generation_of(artifact.location)
    if generation is None or generation < pointer.min_generation:
        raise StalePayload(f"{artifact.location} is of a generation below {pointer.min_generation}.")
    left = () if current is None else (Superseded(current.location, artifact.published),)
    return replace(
        pointer,
        # Later uploads get a new generation: a dead earlier upload can be given up without affecting running ones.
        generation=pointer.generation + 1,
        current=artifact,
        superseded=(*pointer.superseded, *left),
    )


def give_up(pointer: Pointer, generation: int) -> Pointer:
    """The pointer that can never name a payload of this or an older generation."""
    if generation < pointer.min_generation:
        return pointer
    return replace(pointer, min_generation=generation + 1, generation=max(pointer.generation, generation + 1))


def forget(pointer: Pointer, gone: Collection[str]) -> Pointer:
    """The pointer without superseded payloads whose objects were deleted."""
    left = tuple(item for item in pointer.superseded if item.location not in gone)
    return pointer if left == pointer.superseded else replace(pointer, superseded=left)


@dataclass(frozen=True, slots=True)
class SnapshotSweep:
    """The payloads that a trim may delete: superseded long enough ago, or never to be named by the pointer."""

    superseded: tuple[str, ...]
    unlisted: tuple[str, ...]


def abandoned(pointer: Pointer, newest: dict[str, int], *, before: int) -> int | None:
    """The highest generation of payloads that the pointer does not name and that were abandoned before a time.

    ``newest`` has the last write time of each payload: a running exporter keeps writing, so its payload is not old. A
    superseded payload counts as abandoned when it was superseded: otherwise a slower exporter of the same payload would
    point at deleted objects.
    """
    current = None if pointer.current is None else pointer.current.location
    superseded = {item.location: item.at for item in pointer.superseded}
    found = [
        generation
        for location, modified in newest.items()
        if location != current and max(modified, superseded.get(location, modified)) <= before
        if (generation := generation_of(location)) is not None
    ]
    return max(found, default=None)


def plan_sweep(pointer: Pointer, there: Iterable[str], *, before: int) -> SnapshotSweep:
    """The payloads to delete, after the pointer's minimum generation was raised; never one that it names."""
    current = None if pointer.current is None else pointer.current.location
    listed = {current, *(item.location for item in pointer.superseded)}
    return SnapshotSweep(
        superseded=tuple(
            item.location for item in pointer.superseded if item.at <= before and item.location != current
        ),
        unlisted=tuple(
            location
            for location in there
            if location not in listed
            and (generation := generation_of(location)) is not None
            and generation < pointer.min_generation
        ),
    )
