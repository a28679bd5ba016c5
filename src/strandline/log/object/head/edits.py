"""Edits of the head: pure functions from a head to the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from strandline.errors import AlreadyExists, ExpectationFailed, InvalidInput, NotFound, Sealed, StrandlineError
from strandline.log.object.head.index import references_of
from strandline.log.slots.rules import check_position
from strandline.log.writers.numbered import check_number, forget_silent, is_repeated
from strandline.log.writers.source import check_source_number, remembered
from strandline.model.cursor import SECOND, Bounds
from strandline.model.head import (
    ChunkRef,
    Cut,
    Entry,
    Head,
    MetadataRange,
    Pin,
    Receipt,
    Trimmed,
    WriterId,
    WriterState,
    proof_of,
)
from strandline.model.times import TOLERANCE

CHUNK: Final = 64
"""Number of entries, or references, in one chunk."""

SPILL_AT: Final = 96
"""The head keeps at most this many entries, and as many references of each level, before the oldest spill."""


class StaleUpload(StrandlineError):
    """The object was uploaded so early that a trimmer may delete it: upload it again. The log handles this itself."""


@dataclass(frozen=True, slots=True)
class BatchListing:
    """An uploaded batch to list.

    ``born`` is the log's next sequence when the writer took its id: an unknown writer that is younger than every
    forgotten one is certainly new.
    """

    location: str
    generation: int
    count: int
    size: int
    oldest: int
    newest: int
    writer: WriterId
    number: int
    born: int
    metadata: Sequence[MetadataRange] = ()
    expect: int | None = None
    seal: bool = False
    """Whether the same edit seals the log behind the batch."""


def bounds_of(head: Head) -> Bounds:
    """The offsets of the log."""
    return Bounds(head.floor, head.next_offset, head.sealed)


def seal_log(head: Head) -> Head:
    """The head that lists no more batches; unchanged if it was sealed before."""
    return head if head.sealed else replace(head, sealed=True)


def begin_deletion(head: Head, membership: int) -> Head:
    """The head of a log that is neither read nor changed any more; ``Outdated`` if its slots changed meanwhile."""
    if head.deleting:
        return head
    if head.membership != membership:
        raise Outdated("A slot was created, moved or dropped since the slots were read.")
    return replace(head, deleting=True)


def list_batches(head: Head, listings: Sequence[BatchListing], now: int) -> Head:
    """The head with one writer's batches listed in order; batches that are listed already are skipped."""
    for new in listings:
        check_source_number(new.writer, new.number)
        writer, number = remembered(new.writer, new.number)
        last = head.writers.get(writer)
        if is_repeated(new.writer, new.number, last):
            continue
        _check_open(head)
        check_number(new.writer, new.number, last, known=head.writers, forgotten=new.born < head.writers_floor)
        _check_end(head, new.expect)
        head = _with_entries(head, [new], now)
        if new.seal:
            head = seal_log(head)
        entry, proof = head.tail[-1], proof_of(new.writer)
        state = WriterState(number, entry.sequence, entry.first, entry.count, entry.listed, proof)
        head = _remember(head, writer, state)
    return head


@dataclass(frozen=True, slots=True)
class Group:
    """Uploaded batches of several processes, which advance the position in one source together."""

    writer: WriterId
    """The writer id of the source, with the advance."""
    number: int
    """The position before them."""
    listings: Sequence[BatchListing]
    expect: int | None = None


def receipt_of(head: Head, writer: WriterId, number: int, count: int) -> Receipt:
    """The receipt of an append that is listed. The listed batch counts, not the content of a repeated append."""
    known, last_number = remembered(writer, number)
    last = head.writers.get(known)
    if last is not None and last.number == last_number:
        return Receipt(last.first, last.count)
    found = (entry for entry in reversed(head.tail) if entry.number == number and entry.writer == writer)
    entry = next(found, None)
    return Receipt(None, count) if entry is None else Receipt(entry.first, entry.count)


def refuse_if_sealed(head: Head, writer: WriterId, number: int) -> None:
    """``Sealed`` for an append to a sealed log, unless it was listed before."""
    known, last_number = remembered(writer, number)
    last = head.writers.get(known)
    if last is None or last_number > last.number:
        _check_open(head)


def list_group(head: Head, group: Group, now: int) -> Head:
    """The head with all batches of a group listed in order; unchanged if the position is past them already."""
    check_source_number(group.writer, group.number)
    writer, number = remembered(group.writer, group.number)
    last = head.writers.get(writer)
    if not group.listings or (last is not None and number <= last.number):
        return head
    _check_open(head)
    check_number(group.writer, group.number, last, known=head.writers)
    _check_end(head, group.expect)
    first = head.next_offset
    head = _with_entries(head, group.listings, now)
    entry = head.tail[-1]
    return _remember(head, writer, WriterState(number, entry.sequence, first, entry.next - first, entry.listed))


def _check_open(head: Head) -> None:
    if head.sealed:
        raise Sealed.at(head.next_offset, f"Log {head.log_id}")


def _check_end(head: Head, expect: int | None) -> None:
    if expect is not None and expect != head.next_offset:
        raise ExpectationFailed(
            f"The append expected the log to end at {expect}, and it ends at {head.next_offset}; nothing was appended."
        )


def _with_entries(head: Head, listings: Sequence[BatchListing], now: int) -> Head:
    """The head with more entries; ``StaleUpload`` if an object may be gone."""
    listed = max(head.listed, now)  # listing times never decrease: seeking by time is a binary search
    entries: list[Entry] = []
    sequence, first = head.next_sequence, head.next_offset
    for new in listings:
        if new.generation < head.min_generation:
            raise StaleUpload(f"{new.location} is of generation {new.generation}, below {head.min_generation}.")
        entries.append(
            Entry(
                sequence=sequence,
                location=new.location,
                first=first,
                count=new.count,
                size=new.size,
                oldest=new.oldest,
                newest=new.newest,
                listed=listed,
                writer=new.writer,
                number=new.number,
                metadata=new.metadata,
            )
        )
        sequence, first = sequence + 1, first + new.count
    return replace(head, next_offset=first, next_sequence=sequence, listed=listed, tail=(*head.tail, *entries))


def set_back(head: Head, now: int) -> Head:
    """The head without listing times ahead of ``now``: they become ``now``, and later listings continue from there.

    The times stay in order, so that seeking by time stays a search. Chunks do not change: readers limit their times to
    that of the reference.
    """
    if head.listed <= now:
        return head
    return replace(
        head,
        listed=now,
        tail=tuple(replace(entry, listed=min(entry.listed, now)) for entry in head.tail),
        levels=tuple(
            tuple(
                replace(item, listed_first=min(item.listed_first, now), listed_last=min(item.listed_last, now))
                for item in level
            )
            for level in head.levels
        ),
        writers={name: replace(last, listed=min(last.listed, now)) for name, last in head.writers.items()},
    )


def _remember(head: Head, writer: WriterId, state: WriterState) -> Head:
    writers = {**head.writers, writer: state}
    floor = forget_silent(writers)
    return replace(head, writers=writers, writers_floor=max(head.writers_floor, floor))


@dataclass(frozen=True, slots=True)
class Spill:
    """Items that leave the head for a chunk of their own, and the reference that takes their place."""

    level: int
    items: tuple[Entry, ...] | tuple[ChunkRef, ...]
    reference: ChunkRef


def plan_spills(head: Head) -> list[Spill]:
    """The items to write as chunks so that the head stays small; usually none."""
    spills = []
    while (spill := _next_spill(head)) is not None:
        spills.append(spill)
        head = apply_spills(head, [spill])
    return spills


def _next_spill(head: Head) -> Spill | None:
    rows: list[tuple[Any, ...]] = [head.tail, *head.levels]
    for level, items in enumerate(rows):
        if len(items) > SPILL_AT:
            return Spill(level, items[:CHUNK], reference_to(items[:CHUNK], head.generation))
    return None


def reference_to(items: Sequence[Entry | ChunkRef], generation: int) -> ChunkRef:
    """The reference to a chunk with these items."""
    starts, _, listed_first, _ = _order_of(items[0])
    _, ends, _, listed_last = _order_of(items[-1])
    size = sum(item.size for item in items)
    return ChunkRef(generation, starts, ends, items[0].first, items[-1].next, size, listed_first, listed_last)


def _order_of(item: Entry | ChunkRef) -> tuple[int, int, int, int]:
    """Its first sequence, the one after its last, and the times of its first and last listing."""
    if isinstance(item, Entry):
        return item.sequence, item.sequence + 1, item.listed, item.listed
    return item.first_sequence, item.next_sequence, item.listed_first, item.listed_last


def apply_spills(head: Head, spills: Sequence[Spill]) -> Head:
    """The head with its oldest items replaced by references, as far as they are unchanged since they were written."""
    for spill in spills:
        if spill.reference.generation < head.min_generation:
            continue  # the chunk was written before a trim, which may have deleted it
        count, level = len(spill.items), spill.level
        rows: list[tuple[Any, ...]] = [head.tail, *head.levels, ()]
        if rows[level][:count] == spill.items:
            rows[level] = rows[level][count:]
            rows[level + 1] = (*rows[level + 1], spill.reference)
            head = replace(head, tail=rows[0], levels=tuple(rows[1:] if rows[-1] else rows[1:-1]))
    return head


def pin_slot(head: Head, name: str, position: int, retained_from: int | None = None, sole: str | None = None) -> Head:
    """The head in which a slot being created pins its position until its own cell is written.

    ``retained_from`` is where the cold tier begins. ``sole``: a prefix that no other slot's name may have.
    """
    other = None if sole is None else next((known for known in head.slots if known.startswith(sole)), None)
    if name in head.slots or other is not None:
        raise AlreadyExists(f"There is a slot {name if name in head.slots else other!r} already: claim or reset it.")
    return _pinned(head, name, position, retained_from)


def repin_slot(head: Head, name: str, position: int, retained_from: int | None = None) -> Head:
    """The head in which a slot being reset pins its new position until its own cell is written."""
    if name not in head.slots:
        raise NotFound(f"There is no slot {name!r}: create it first.")
    return _pinned(head, name, position, retained_from)


def _pinned(head: Head, name: str, position: int, retained_from: int | None) -> Head:
    check_position(position, bounds_of(head), retained_from)
    membership = head.membership + 1
    pending = head.slots.get(name)
    # Another process may reset the slot at the same time: until one of them is done, both positions may be needed.
    lowest = position if pending is None else min(position, pending.position)
    return replace(head, membership=membership, slots={**head.slots, name: Pin(lowest, membership)})


def settle_slot(head: Head, name: str, mark: int) -> Head:
    """The head in which the slot's own cell pins; unchanged if the slot was pinned again since."""
    pin = head.slots.get(name)
    if pin is None or pin.mark != mark:
        return head
    return replace(head, slots={**head.slots, name: None})


def unlist_slot(head: Head, name: str) -> Head:
    """The head without a slot; its position pins nothing any more."""
    if name not in head.slots:
        return head
    slots = {known: pin for known, pin in head.slots.items() if known != name}
    return replace(head, membership=head.membership + 1, slots=slots)


class Outdated(StrandlineError):
    """The log changed since a trim was planned: plan it again. The trimmer handles this itself."""


@dataclass(frozen=True, slots=True)
class Trim:
    """A planned trim: the cut, the location of its record, and the membership of the slots that were read."""

    cut: Cut
    location: str
    generation: int
    membership: int


def plan_cut(head: Head, upto: int) -> Cut:
    """What a trim up to an offset removes; the offset must be the first of an entry, or the log's end."""
    if not head.floor < upto <= head.next_offset:
        raise InvalidInput(f"Cannot trim up to {upto}: the log holds {head.floor} up to {head.next_offset}.")
    return Cut(
        since=head.floor,
        upto=upto,
        entries=tuple(entry for entry in head.tail if entry.next <= upto),
        chunks=tuple((level, reference) for level, reference in references_of(head) if reference.first < upto),
    )


def apply_trim(head: Head, trim: Trim, now: int) -> Head:
    """The head with its floor moved; ``Outdated`` if slots were created or moved, or if an object would be lost."""
    cut = trim.cut
    if head.membership != trim.membership:
        raise Outdated("A slot was created, moved or dropped since the slots were read.")
    if cut.upto <= head.floor:
        return head  # another trimmer trimmed as far, or further
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
    """About how many bytes a cut removes: all of them, except in chunks of which it removes only a part."""
    whole = sum(reference.size for _, reference in cut.chunks if reference.next <= cut.upto)
    return whole + sum(entry.size for entry in cut.entries)


def begin_trim_round(head: Head, now: int, *, listed: int = 0) -> Head:
    """The head after which no object of an older generation can be listed any more.

    Uploads that began since the last round stay valid; older ones have to be repeated.
    A trim with a time ahead of ``now`` was made by a wrong clock: its grace period starts again. Nothing is
    listed before ``listed`` from now on, whatever the clocks of producers say.
    """
    return replace(
        head,
        listed=max(head.listed, listed),
        generation=head.generation + 1,
        min_generation=head.generation,
        trim_began=now,
        trimmed=tuple(replace(gone, at=now) if gone.at > now + TOLERANCE else gone for gone in head.trimmed),
    )


def is_due(began: int, now: int, pause: float) -> bool:
    """Whether a round may begin. A round that began in the future was begun by a wrong clock, and does not count."""
    return pause <= 0 or not -TOLERANCE <= now - began < pause * SECOND


def end_trim_round(head: Head, swept: int, done: frozenset[str]) -> Head:
    """The head after the objects below generation ``swept`` were examined, and some cuts were deleted."""
    trimmed = tuple(gone for gone in head.trimmed if gone.location not in done)
    if trimmed == head.trimmed and swept <= head.swept_generation:
        return head
    return replace(head, trimmed=trimmed, swept_generation=max(swept, head.swept_generation))
