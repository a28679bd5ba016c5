"""Names of batch objects, and edits of the manifest: pure functions from a manifest to the next one.

The format cannot store operations. So each edit recognises from the manifest alone that it was applied already, and
then returns the given manifest unchanged. This resolves lost answers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from strandline.errors import CorruptData, CursorExpired, Diverged, ExpectationFailed, Fenced, InvalidInput
from strandline.log.object.head.edits import StaleUpload
from strandline.log.slots.rules import check_position
from strandline.model.cursor import Bounds
from strandline.model.head import MetadataRange, QueueEntry, QueueManifest, WriterId
from strandline.storage.clock import Clock

SUFFIX: Final = ".batch"

_DIGITS: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_AS_PYTHON: Final = str.maketrans(_DIGITS, "0123456789ABCDEFGHIJKLMNOPQRSTUV")
"""The digits that ``int`` knows."""
_ULID_TEXT: Final = rf"[0-7][{_DIGITS}]{{25}}"
_ULID = re.compile(_ULID_TEXT)
_BATCH_NAME = re.compile(rf"{_ULID_TEXT}(?:{re.escape(SUFFIX)}|/[0-9a-f]{{16}})", re.IGNORECASE)
"""Names of batches below a data folder, of all known producers: ``<ULID>.batch``, and ``<run>/<ordinal>``."""
_TIME_DIGITS: Final = 10
_MARK_DIGITS: Final = 16
_MARK_BITS: Final = 80
_MAX_TIME: Final = (1 << 48) - 1
_ENCODED: Final = re.compile(r"""[^ -~]|[\\{^}%`\]">\[~<#|*?]""")
"""Characters that Rust's ``object_store`` encodes in a part of a path."""


def new_location(folder: str, now: int, writer: WriterId, number: int) -> str:
    """The path of a batch that is uploaded now (microseconds): ``<folder>/<ULID>.batch``.

    The 80 bits after the time are derived from writer and number instead of random. So all names that a batch
    ever had are known to belong to one batch, in any process and after any repeated upload.

    >>> from uuid import UUID
    >>> new_location("ingest", 1_700_000_000_000_000, WriterId(UUID(int=7)), 0)
    'ingest/01HF7YAT00ZRK3CGQKNXK2TJ3B.batch'
    """
    digest = hashlib.blake2b(writer.bytes + number.to_bytes(8, "little"), digest_size=_MARK_BITS // 8)
    time = min(max(now // 1000, 0), _MAX_TIME)
    mark = int.from_bytes(digest.digest(), "big")
    return f"{folder}/{_encoded(time, _TIME_DIGITS)}{_encoded(mark, _MARK_DIGITS)}{SUFFIX}"


def mark_of(location: str) -> str:
    """The common part of all names of one batch: the end of its ULID, or the whole location if it has none."""
    name = _ulid_in(location)
    return location if name is None else name[_TIME_DIGITS:]


def time_of(location: str) -> int | None:
    """Upload time of the batch, by its name (microseconds); None if that is no ULID.

    >>> time_of("ingest/01HF7YAT00ZRK3CGQKNXK2TJ3B.batch")
    1700000000000000
    """
    name = _ulid_in(location)
    return None if name is None else int(name[:_TIME_DIGITS].translate(_AS_PYTHON), 32) * 1000


def is_batch_name(name: str) -> bool:
    """Whether a producer names a batch so, relative to the data folder.

    >>> is_batch_name("01HF7YAT00ZRK3CGQKNXK2TJ3B.batch"), is_batch_name("01HF7YAT00ZRK3CGQKNXK2TJ3B/00000000000000ff")
    (True, True)
    >>> is_batch_name("README.md"), is_batch_name("eu/01HF7YAT00ZRK3CGQKNXK2TJ3B.batch")
    (False, False)
    """
    return _BATCH_NAME.fullmatch(name) is not None


def _ulid_in(location: str) -> str | None:
    name = location.rstrip("/").rpartition("/")[2].removesuffix(SUFFIX).upper()
    return name if _ULID.fullmatch(name) else None


def _encoded(number: int, digits: int) -> str:
    return "".join(_DIGITS[number >> 5 * place & 31] for place in reversed(range(digits)))


def stored_as(path: str) -> str:
    """The name under which implementations on Rust's ``object_store`` store an object: ``Path::from`` of that crate.

    It drops empty parts, and percent-encodes, part by part, control characters, everything but ASCII, the characters
    that S3 and Google Cloud Storage recommend to avoid, and parts that are ``.`` or ``..``.

    >>> stored_as("größe/a~b.batch"), stored_as("ingest/plain name.batch")
    ('gr%C3%B6%C3%9Fe/a%7Eb.batch', 'ingest/plain name.batch')
    >>> stored_as("/ingest//x.batch/"), stored_as("ingest/./x.batch"), stored_as("../x.batch")
    ('ingest/x.batch', 'ingest/%2E/x.batch', '%2E%2E/x.batch')
    """

    def encoded(found: re.Match[str]) -> str:
        return "".join(f"%{byte:02X}" for byte in found[0].encode(errors="surrogatepass"))

    parts = (part.replace(".", "%2E") if part in (".", "..") else _ENCODED.sub(encoded, part) for part in _parts(path))
    return "/".join(parts)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def names_of(location: str) -> tuple[str, ...]:
    """The names under which the object of a location may be: first :func:`stored_as`, then the one without encoding.

    Readers look for a batch under these names, and a trimmer keeps all of them.
    """
    return tuple(dict.fromkeys((stored_as(location), "/".join(_parts(location)))))


def checked_path(path: str, what: str) -> str:
    """The path; ``InvalidInput`` unless it is the same object in every store and for every implementation."""
    pieces = path.split("/")
    if "\0" in path or any(piece in ("", ".", "..") for piece in pieces):
        raise InvalidInput(f"{what}={path!r} cannot be a path in a store: write it as 'folder/name'.")
    strange = _ENCODED.search(path)
    if strange is not None:
        raise InvalidInput(
            f"{what}={path!r} holds {strange[0]!r}, which other implementations of the queue store percent-encoded, as "
            f"{stored_as(path)!r}, and some do not: they and this one would see two queues. Name it without."
        )
    return path


RESERVED_EPOCH: Final = (1 << 64) - 1
LAST_SEQUENCE: Final = (1 << 63) - 1
"""Sequences are used as offsets, which have 63 bits."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time on both clocks: one may stop while the machine sleeps, the other may be set."""

    monotonic: float
    wall: int

    @classmethod
    def of(cls, clock: Clock) -> Moment:
        """Now."""
        return cls(clock.monotonic(), clock.now())

    def since(self, earlier: Moment) -> float:
        """Seconds since then: the longer of the two clocks' answers."""
        return max(self.monotonic - earlier.monotonic, (self.wall - earlier.wall) / 1e6)


@dataclass(frozen=True, slots=True)
class QueueListing:
    """A batch to list. ``began`` is the start of its upload; None before that."""

    count: int
    number: int
    metadata: Sequence[MetadataRange] = ()
    expect: int | None = None
    location: str = ""
    began: Moment | None = None


def list_batches(
    manifest: QueueManifest, listings: Sequence[QueueListing], now: Moment, max_age: float
) -> QueueManifest:
    """The manifest with batches listed in order; batches that are listed already, under any name, are skipped.

    ``StaleUpload`` if an unlisted one was begun more than ``max_age`` seconds ago: a trimmer that
    has not seen it listed could delete it.
    """
    known = places_of(manifest, [new.location for new in listings])
    entries = list(manifest.entries)
    following = manifest.next_sequence
    for new in listings:
        if mark_of(new.location) in known:
            continue
        if new.expect is not None and new.expect != following:
            raise ExpectationFailed(
                f"The append expected the queue to end at {new.expect}, and it ends at {following}; nothing was "
                "appended."
            )
        if new.began is None or now.since(new.began) > max_age:
            raise StaleUpload(f"{new.location} was not listed within {max_age} s.")
        if following >= LAST_SEQUENCE:
            raise CorruptData(
                f"The queue continues at sequence {following:,}, the highest possible, which no queue reaches by "
                "appending: its manifest is damaged. Nothing was appended: restore it, or begin another queue."
            )
        entries.append(QueueEntry(following, new.location, new.metadata))
        following += 1
    if following == manifest.next_sequence:
        return manifest
    return replace(manifest, entries=tuple(entries), next_sequence=following)


def places_of(manifest: QueueManifest, locations: Sequence[str]) -> dict[str, int]:
    """The sequences of the listed ones of these batches, under any name, by their marks."""
    # A quick first test: names with the same mark have the same end, if they are written by this package.
    tails = tuple(location[-_MARK_DIGITS - len(SUFFIX) :] for location in locations)
    return {mark_of(entry.location): entry.sequence for entry in manifest.entries if entry.location.endswith(tails)}


def claim(manifest: QueueManifest, last_acked: int | None = None) -> QueueManifest:
    """The manifest with a new consumer, one epoch higher, and everything through ``last_acked`` acknowledged.

    Applied twice, it only skips an epoch: the last claim holds. ``CursorExpired`` if batches
    after ``last_acked`` are gone, ``Diverged`` if it is ahead of a non-empty queue.
    """
    claimed = replace(manifest, epoch=_next_epoch(manifest))
    if last_acked is None:
        return claimed
    first = first_listed(manifest)
    if last_acked + 1 < first:
        raise CursorExpired(
            f"Batch {last_acked + 1} is no longer listed (the queue begins at {first}): another consumer has "
            f"acknowledged it since. Open with last_acked=None to resume at {first}. Nothing was claimed."
        )
    if last_acked >= manifest.next_sequence and manifest.entries:
        raise Diverged(
            f"last_acked={last_acked} is ahead of the queue, which ends at {manifest.next_sequence}: acknowledging it "
            "would drop unread batches. Nothing was claimed."
        )
    return _without(claimed, last_acked)


def acknowledge(manifest: QueueManifest, *, epoch: int, through: int, location: str | None = None) -> QueueManifest:
    """The manifest without everything through a sequence; the same one if that is gone already.

    ``Fenced`` if another consumer has claimed the queue, ``Diverged`` if it never listed so much, or has another batch
    there than the one at ``location``, which the consumer has read.
    """
    check_epoch(manifest, epoch)
    found = entry_at(manifest, through)
    if location is not None and found is not None and found.location != location:
        raise Diverged(
            f"Batch {through} cannot be acknowledged: it is {found.location}, and the consumer has read {location}. "
            "The queue was restored from a copy, or replaced: open a new consumer."
        )
    if through >= manifest.next_sequence:
        raise Diverged(
            f"Batch {through} cannot be acknowledged: the queue ends at {manifest.next_sequence}. It was replaced."
        )
    return manifest if through < first_listed(manifest) else _without(manifest, through)


def reset(manifest: QueueManifest, position: int) -> QueueManifest:
    """The manifest without everything below a position, and without a consumer.

    ``CursorExpired`` or ``Diverged`` if the position is not within the queue.
    """
    check_position(position, bounds_of(manifest))
    return replace(_without(manifest, position - 1), epoch=_next_epoch(manifest))


def _next_epoch(manifest: QueueManifest) -> int:
    """The next epoch. The highest number of the format is reserved, and never written."""
    if manifest.epoch + 1 >= RESERVED_EPOCH:
        raise CorruptData(
            f"The queue is at epoch {manifest.epoch:,}, the highest possible, which no number of consumers "
            "reaches: its manifest is damaged. Nothing was claimed: restore it, or begin another queue."
        )
    return manifest.epoch + 1


def check_epoch(manifest: QueueManifest, epoch: int) -> None:
    """Refuse a consumer that is not the newest."""
    if manifest.epoch != epoch:
        raise Fenced(
            f"The queue was claimed by another consumer (epoch {manifest.epoch}) since; this one had epoch {epoch} and "
            "must stop."
        )


def first_listed(manifest: QueueManifest) -> int:
    """The first sequence that is not acknowledged, where a new consumer starts."""
    return manifest.entries[0].sequence if manifest.entries else manifest.next_sequence


def bounds_of(manifest: QueueManifest) -> Bounds:
    """The bounds of the queue, in sequences."""
    return Bounds(first_listed(manifest), manifest.next_sequence)


def entries_from(manifest: QueueManifest, since: int) -> tuple[QueueEntry, ...]:
    """The listed batches from a sequence on; ``CursorExpired`` if the first of them are gone."""
    first = first_listed(manifest)
    if since < first:
        raise CursorExpired(
            f"Batch {since} is no longer listed (the queue begins at {first}): it was acknowledged and is gone."
        )
    return manifest.entries[since - first :]


def entry_at(manifest: QueueManifest, sequence: int) -> QueueEntry | None:
    """The batch of a sequence, if it is listed."""
    place = sequence - first_listed(manifest)
    return manifest.entries[place] if 0 <= place < len(manifest.entries) else None


def _without(manifest: QueueManifest, through: int) -> QueueManifest:
    return replace(manifest, entries=manifest.entries[max(0, through + 1 - first_listed(manifest)) :])
