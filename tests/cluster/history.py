"""What happened in a cluster, as values, and the checker over it: one event after another, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias


class Broken(AssertionError):
    """A history that must not be."""


class HistoryEntry(NamedTuple):
    """One record, as its content tells: piece ``part`` of ``parts`` of a writer's numbered append."""

    writer: str
    number: int
    part: int
    parts: int

    def encode(self) -> bytes:
        """The record's value."""
        return f"{self.writer}:{self.number}:{self.part}:{self.parts}".encode()

    @classmethod
    def decode(cls, value: bytes) -> HistoryEntry:
        """The entry that a value stands for."""
        writer, number, part, parts = value.decode().split(":")
        return cls(writer, int(number), int(part), int(parts))


class Acknowledged(NamedTuple):
    """A client was told that its append is committed."""

    node: str
    term: int
    writer: str
    number: int
    first: int | None
    """Where; None if the node does not know any more."""
    records: int
    sealed: bool = False
    """Whether the log was to be sealed with it."""


class SealAcknowledged(NamedTuple):
    """A client was told that the log is sealed, and that this is committed."""

    node: str
    term: int
    at: int


class Refused(NamedTuple):
    """A client was told that nothing was appended, since the log was sealed."""

    node: str
    at: int


class Read(NamedTuple):
    """Somebody read these committed records, next to each other from an offset on."""

    node: str
    first: int
    entries: tuple[HistoryEntry, ...]


class Shown(NamedTuple):
    """A node lets its readers see the log, and this is where it ends for them."""

    node: str
    end: int
    leads: bool
    """Whether it is the primary at that moment."""
    sealed: bool = False
    """Whether it shows that the log was sealed there."""


class TermsSeen(NamedTuple):
    """A node remembers these terms."""

    node: str
    seen: int
    adopted: int
    led: int


class Promised(NamedTuple):
    """A node has reported to a candidate of this term, and so follows no lower one any more."""

    node: str
    term: int


class Wiped(NamedTuple):
    """A node lost its disk, and begins anew."""

    node: str


@dataclass(frozen=True, slots=True)
class Final:
    """What every node holds after all is well again and has been for long."""

    logs: Mapping[str, tuple[int, tuple[HistoryEntry, ...]]]
    """By node: its first offset, and everything from there on."""
    primaries: tuple[str, ...]
    troubles: Mapping[str, str]
    """What nodes do that neither lead nor follow."""
    committed: int
    """The extent of the primary's log, if all of it is committed."""
    sealed: tuple[str, ...] = ()
    """The nodes that show that the log was sealed."""


Event: TypeAlias = Acknowledged | SealAcknowledged | Refused | Read | Shown | TermsSeen | Promised | Wiped | Final


@dataclass(slots=True)
class Checker:
    """Takes a history event by event and raises :class:`Broken` at the first that must not be.

    Everything acknowledged is in the log exactly once, where it was said to be. What was read by anybody stays. No
    append is there twice or in part, and a writer's appends are in order. Acknowledgements never go back to a lower
    term. No node shows less than it has shown before, over restarts too, and no primary less than was acknowledged. No
    node forgets a term. In the end all hold the same, one leads, and the others follow.

    Once a seal was acknowledged or shown, or an append refused for it, it has one offset for good: nothing is
    acknowledged or read from there on, a node that has shown it does so from then on, and in the end all do.
    """

    known: dict[int, HistoryEntry] = field(default_factory=dict)
    """What is at an offset, by whoever has read it."""
    acknowledged: dict[tuple[str, int], Acknowledged] = field(default_factory=dict)
    last: tuple[str, int] | None = None
    """Who has acknowledged last, and in which term."""
    terms: dict[str, TermsSeen] = field(default_factory=dict)
    promised: dict[str, int] = field(default_factory=dict)
    shown: dict[str, int] = field(default_factory=dict)
    """Where the log ended for the readers of each node."""
    told: int = 0
    """Where what was acknowledged ends."""
    seal: int | None = None
    """Where the log was sealed, once anybody was told."""
    seal_told: bool = False
    """Whether a client was told."""
    show_seal: set[str] = field(default_factory=set)
    """The nodes that have shown the seal."""

    def take(self, event: Event) -> None:
        """Go on with this event."""
        match event:
            case Acknowledged():
                self._take_acknowledged(event)
            case Read(node, first, entries):
                self._take_read(node, first, entries)
            case SealAcknowledged(node, term, at):
                self._check_term_of(node, term, event)
                self._take_seal(node, at)
                self.seal_told = True
            case Refused(node, at):
                self._take_seal(node, at)
                self.seal_told = True
            case Shown(node, end, leads, _):
                self._take_shown(node, end, leads=leads)
                self._take_shown_seal(event)
            case TermsSeen(node):
                before = self.terms.get(node, event)
                if any(now < then for now, then in zip(event[1:], before[1:], strict=True)):
                    raise Broken(f"{node} forgot terms: {before} became {event}")
                if event.seen < self.promised.get(node, 0):
                    raise Broken(f"{node} promised term {self.promised[node]}, and forgot: {event}")
                self.terms[node] = event
            case Promised(node, term):
                self.promised[node] = max(term, self.promised.get(node, 0))
            case Wiped(node):
                self.terms.pop(node, None)
                self.promised.pop(node, None)
                self.shown.pop(node, None)
                self.show_seal.discard(node)
            case Final():
                self._take_final(event)

    def _take_acknowledged(self, event: Acknowledged) -> None:
        self._check_term_of(event.node, event.term, event)
        if event.first is not None:
            self.told = max(self.told, event.first + event.records)
            for part in range(event.records):
                self._place(
                    event.node, event.first + part, HistoryEntry(event.writer, event.number, part, event.records)
                )
            if event.sealed:
                self._take_seal(event.node, event.first + event.records)
        self.seal_told = self.seal_told or event.sealed
        self.acknowledged.setdefault((event.writer, event.number), event)

    def _check_term_of(self, node: str, term: int, event: Acknowledged | SealAcknowledged) -> None:
        last = self.last
        if last is not None and term < last[1]:
            raise Broken(f"{node} acknowledged in term {term} after {last[0]} had in term {last[1]}: {event}")
        self.last = node, term

    def _take_seal(self, node: str, at: int) -> None:
        if self.seal not in (None, at):
            raise Broken(f"{node} has the log sealed at {at}, and it was sealed at {self.seal} before")
        self.seal = at
        above = max([self.told - 1, *self.known])
        if above >= at:
            raise Broken(f"{node} has the log sealed at {at}, and there is a record at {above}")

    def _take_shown_seal(self, event: Shown) -> None:
        node, end, leads, sealed = event
        if sealed:
            self._take_seal(node, end)
            self.show_seal.add(node)
        elif node in self.show_seal:
            raise Broken(f"{node} has shown the seal at {self.seal}, and shows none at {end} now")
        elif leads and self.seal_told:
            raise Broken(f"{node} leads and shows no seal at {end}, and one was acknowledged")

    def _take_read(self, node: str, first: int, entries: Iterable[HistoryEntry]) -> None:
        for offset, entry in enumerate(entries, first):
            self._place(node, offset, entry)

    def _take_shown(self, node: str, end: int, *, leads: bool) -> None:
        before = self.shown.get(node, 0)
        if end < before:
            raise Broken(f"{node} has shown everything below {before}, and shows only what is below {end} now")
        if leads and end < self.told:
            raise Broken(f"{node} leads and shows what is below {end}, and all below {self.told} was acknowledged")
        self.shown[node] = end

    def _place(self, node: str, offset: int, entry: HistoryEntry) -> None:
        if self.seal is not None and offset >= self.seal:
            raise Broken(f"offset {offset} is {entry} on {node}, and the log was sealed at {self.seal}")
        found = self.known.setdefault(offset, entry)
        if found != entry:
            raise Broken(f"offset {offset} is {entry} on {node}, and was {found} before; both were committed")

    def _take_final(self, event: Final) -> None:
        if event.troubles or len(event.primaries) != 1:
            raise Broken(f"in the end {event.primaries or 'nobody'} led, and others were {dict(event.troubles)}")
        (primary,) = event.primaries
        first, entries = event.logs[primary]
        end = first + len(entries)
        for node, (begin, held) in event.logs.items():
            common = max(begin, first)
            if begin + len(held) != end or held[common - begin :] != entries[common - first :]:
                raise Broken(f"in the end {node} holds something else than {primary}: {_parting(event, node, primary)}")
        if event.committed != end + bool(event.sealed):
            raise Broken(f"in the end only {event.committed} of {end} records were committed, with the seal as one")
        if event.sealed and set(event.sealed) != set(event.logs):
            raise Broken(f"in the end only {event.sealed} of {sorted(event.logs)} show that the log was sealed")
        if event.sealed:
            self._take_seal(primary, end)
        elif self.seal is not None or self.seal_told:
            raise Broken(f"in the end nobody shows the seal at {self.seal}, and one was acknowledged or shown")
        self._take_read(primary, first, entries)
        if sorted(self.known) != list(range(end)):
            strange = sorted(set(self.known) ^ set(range(end)))[:9]
            raise Broken(f"the log ends at {end} in the end, and something else is known of the offsets {strange}")
        self._check_whole(end)

    def _check_whole(self, end: int) -> None:
        """Every append whole, once, and in its writer's order; every acknowledged one among them."""
        last: dict[str, int] = {}
        placed: dict[tuple[str, int], int] = {}
        offset = 0
        while offset < end:
            entry = self.known[offset]
            expected = [HistoryEntry(entry.writer, entry.number, part, entry.parts) for part in range(entry.parts)]
            if [self.known.get(offset + part) for part in range(entry.parts)] != expected:
                raise Broken(f"the append at offset {offset} is not whole: {entry}")
            if entry.number != last.get(entry.writer, -1) + 1:
                raise Broken(
                    f"number {entry.number} of {entry.writer} is at offset {offset}, behind its number "
                    f"{last.get(entry.writer)}"
                )
            last[entry.writer] = entry.number
            placed[entry.writer, entry.number] = offset
            offset += entry.parts
        for (writer, number), told in self.acknowledged.items():
            at = placed.get((writer, number))
            if at is None or (told.first is not None and told.first != at):
                raise Broken(f"{told} was acknowledged, and is at {at} in the end")


def _parting(event: Final, one: str, other: str) -> str:
    (begin, held), (first, entries) = event.logs[one], event.logs[other]
    for offset in range(max(begin, first), max(begin + len(held), first + len(entries))):
        pair = [log[offset - at] if offset - at < len(log) else None for at, log in ((begin, held), (first, entries))]
        if pair[0] != pair[1]:
            return f"at offset {offset} {pair[0]} against {pair[1]}"
    return f"it holds {begin} to {begin + len(held)}, against {first} to {first + len(entries)}"


def check(events: Iterable[Event]) -> Checker:
    """Check a whole history."""
    checker = Checker()
    for event in events:
        checker.take(event)
    return checker


__all__ = [
    "Acknowledged",
    "Broken",
    "Checker",
    "Event",
    "Final",
    "HistoryEntry",
    "Promised",
    "Read",
    "Refused",
    "SealAcknowledged",
    "Shown",
    "TermsSeen",
    "Wiped",
    "check",
]
