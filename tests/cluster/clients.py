"""Clients of a simulated cluster: writers that repeat what they do not know the outcome of, and readers of any node."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from strandline.errors import CursorExpired, InvalidInput, NotReady, Sealed, StrandlineError, TransientStorageError
from strandline.log.contract import Log
from strandline.model.cursor import Cursor, Limit
from strandline.model.head import WriterId
from strandline.model.records import record_batch
from strandline.node.lead.commit_watermark import CommitHandle
from strandline.node.messages import Reached
from strandline.node.node import Node
from tests.cluster.history import Acknowledged, HistoryEntry, Read, Refused, Shown

_PATIENCE: Final = 2.0
"""Seconds after which a writer gives up on a primary, and tries the other nodes."""


@dataclass(slots=True)
class Asked:
    """An append that a node was asked for."""

    node: str
    life: int
    term: int
    handle: CommitHandle
    since: float


@dataclass(slots=True)
class ClientWriter:
    """Numbers its appends, and repeats each until it is acknowledged; several may be under way at one node."""

    name: str
    number: int = 0
    """Of the next new append."""
    open: dict[int, Asked | None] = field(default_factory=dict)
    """What was not acknowledged yet; None if its outcome is unknown."""
    is_last: bool = False
    """Whether it begins nothing new."""
    seals: int | None = None
    """The number of the append with which it seals the log, if it does; it begins nothing behind that."""
    refused: Refused | None = None
    """What it was told when it heard that the log was sealed, which it takes for final."""
    withdrawn: set[int] = field(default_factory=set)
    """The numbers that it gave up for that."""

    @property
    def writer(self) -> WriterId:
        """Its id."""
        return WriterId(UUID(int=int(self.name[1:]) + 1))

    def parts(self, number: int) -> int:
        """How many records an append has: always the same for the same number."""
        return 1 + number * 7 % 3

    def next_number(self) -> int | None:
        """What to ask for now: the first of unknown outcome, or a new one."""
        for number, asked in self.open.items():
            if asked is None:
                return number
        if self.is_last or len(self.open) > 2 or (self.seals is not None and self.number > self.seals):
            return None
        self.open[self.number] = None
        self.number += 1
        return self.number - 1

    def submit(self, name: str, node: Node, life: int, now: float) -> str:
        """Ask a node to append the next; returns what it said."""
        for earlier, asked in self.open.items():
            if asked is not None and (asked.node, asked.life) != (name, life):
                self.open[earlier] = None  # it may have to be repeated here, and first
        number = self.next_number()
        if number is None:
            return ""
        count = self.parts(number)
        values = [HistoryEntry(self.name, number, part, count).encode() for part in range(count)]
        batch = record_batch(timestamps=[0] * count, ops=[0] * count, keys=[None] * count, values=values)
        try:
            primary = node.primary
            handle = primary.submit(batch, append=(self.writer, number), seal=number == self.seals)
        except Sealed as error:
            self.refused, self.is_last = Refused(name, -1 if error.end is None else error.end), True
            self.withdrawn |= {each for each in self.open if each >= number}
            self.open = {each: found for each, found in self.open.items() if each < number}
            return f"{self.name}:{number} at {name}: {error}"
        except (StrandlineError, InvalidInput) as error:
            self.give_up(number)
            return f"{self.name}:{number} at {name}: {type(error).__name__} {error}"
        self.open[number] = Asked(name, life, primary.term, handle, now)
        return f"{self.name}:{number} at {name} in term {primary.term}"

    def give_up(self, number: int) -> None:
        """The outcome of this one, and of all behind it, is not known."""
        for later in self.open:
            if later >= number:
                self.open[later] = None

    def poll(self, number: int, asked: Asked, now: float) -> Acknowledged | str:
        """Look what became of an append."""
        try:
            # The first look makes the log commit what is queued, since no thread does.
            commit = asked.handle.result(0.0)
        except StrandlineError as error:
            self.give_up(number)
            return f"{self.name}:{number} at {asked.node}: {type(error).__name__} {error}"
        if isinstance(commit.outcome, Reached):
            del self.open[number]
            receipt = commit.receipt
            is_last = number == self.seals
            return Acknowledged(asked.node, asked.term, self.name, number, receipt.first, self.parts(number), is_last)
        if now - asked.since > _PATIENCE:
            self.give_up(number)
            return f"{self.name}:{number} at {asked.node} timed out"
        return ""


def read(name: str, node: Node, upto: int | None = None, last: int | None = None) -> Read | None:
    """Read what is committed on a node (the ``last`` records only, if said); None if it has nothing to show."""
    try:
        seen = node.reading()
        bounds = seen.bounds()
        end = bounds.next if upto is None else min(upto, bounds.next)
        first = bounds.first if last is None else max(bounds.first, end - last)
        return Read(name, first, entries(seen, first, end))
    except (NotReady, CursorExpired, TransientStorageError):
        return None


def shown(name: str, node: Node) -> Shown | None:
    """Where the log ends for readers of a node; None if it says that it cannot tell now."""
    leads = node.is_primary
    try:
        bounds = node.reading().bounds()
        return Shown(name, bounds.next, leads, bounds.sealed)
    except NotReady:
        return None


def entries(log: Log, first: int, end: int) -> tuple[HistoryEntry, ...]:
    """The records of a range."""
    found: list[HistoryEntry] = []
    while first + len(found) < end:
        # Planned and fetched here, since reading ahead takes a thread.
        spans = log.plan(Cursor(log.log_id, first + len(found)), Limit(upto=end))
        batches = [batch for span in spans for batch in span.fetch(["value"])]
        found += [HistoryEntry.decode(value) for batch in batches for value in batch.column(0).to_pylist()]
    return tuple(found)
