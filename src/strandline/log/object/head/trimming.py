"""Trimming and generations: pure edits of the head."""

from __future__ import annotations

from dataclasses import dataclass, replace

from strandline.errors import InvalidInput, StrandlineError
from strandline.log.object.head.edits import StaleUpload
from strandline.log.object.head.index import references_of
from strandline.model.cursor import SECOND
from strandline.model.head import Cut, Head, Trimmed
from strandline.model.times import TOLERANCE


class Outdated(StrandlineError):
    """The log changed in a way that matters since a trim was planned: plan it again. Handled by the collector."""


@dataclass(frozen=True, slots=True)
class Trim:
    """A planned trim: what it cuts off, where that is written down, and which slots were asked."""

    cut: Cut
    location: str
    generation: int
    membership: int


def plan_cut(head: Head, upto: int) -> Cut:
    """What goes if a log is trimmed up to an offset, which must be the first of an entry, or the log's end."""
    if not head.floor < upto <= head.next_offset:
        raise InvalidInput(f"Cannot trim up to {upto}: the log holds {head.floor} up to {head.next_offset}.")
    return Cut(
        since=head.floor,
        upto=upto,
        entries=tuple(entry for entry in head.tail if entry.next <= upto),
        chunks=tuple((level, reference) for level, reference in references_of(head) if reference.first < upto),
    )


def apply_trim(head: Head, trim: Trim, now: int) -> Head:
    """The head with its floor moved; ``Outdated`` if slots came or were moved, or if it would forget an object."""
    cut = trim.cut
    if head.membership != trim.membership:
        raise Outdated("A slot was created, moved or dropped since the slots were read.")
    if cut.upto <= head.floor:
        return head  # someone else trimmed as far, or further
    if trim.generation < head.min_generation:
        raise StaleUpload(f"{trim.location} is of generation {trim.generation}, below {head.min_generation}.")
    if cut.since != head.floor or plan_cut(head, cut.upto) != cut:
        raise Outdated("The head lists the same batches in another way since the trim was planned.")
    return replace(
        head,
        floor=cut.upto,
        tail=tuple(entry for entry in head.tail if entry.next > cut.upto),
        levels=tuple(tuple(item for item in level if item.next > cut.upto) for level in head.levels),
        trimmed=(*head.trimmed, Trimmed(trim.location, cut_size(cut), now)),
    )


def cut_size(cut: Cut) -> int:
    """About how many bytes a cut lets go of: all of them, but for chunks of which it takes only a part."""
    whole = sum(reference.size for _, reference in cut.chunks if reference.next <= cut.upto)
    return whole + sum(entry.size for entry in cut.entries)


# --- generations -------------------------------------------------------------------------------------------------


def begin_collection(head: Head, now: int, *, listed: int = 0) -> Head:
    """The head after which no object of an older generation can be listed any more.

    Uploads that began since the last collection stay good; those that began before it have to be repeated.
    A trim of a time ahead of ``now`` was made by a clock that was wrong: its grace period begins anew. Nothing is
    listed before ``listed`` from now on, whatever the clocks of producers say.
    """
    return replace(
        head,
        listed=max(head.listed, listed),
        generation=head.generation + 1,
        min_generation=head.generation,
        collected=now,
        trimmed=tuple(replace(gone, at=now) if gone.at > now + TOLERANCE else gone for gone in head.trimmed),
    )


def is_due(collected: int, now: int, pause: float) -> bool:
    """Whether a round may begin; one that seems to have begun in the future was begun by a clock that was wrong."""
    return pause <= 0 or not -TOLERANCE <= now - collected < pause * SECOND


def end_collection(head: Head, swept: int, done: frozenset[str]) -> Head:
    """The head after the objects below generation ``swept`` were looked through and some cuts were deleted."""
    trimmed = tuple(gone for gone in head.trimmed if gone.location not in done)
    if trimmed == head.trimmed and swept <= head.swept_generation:
        return head
    return replace(head, trimmed=trimmed, swept_generation=max(swept, head.swept_generation))
