"""Segments of the cold tier and their events, as values: every valid value can be encoded.

``InvalidInput`` for values that cannot be encoded as an event or are inconsistent. Times are milliseconds since 1970,
UTC, as in the events.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final
from uuid import UUID

from strandline.errors import InvalidInput
from strandline.model.arguments import Natural, checked

_LONGEST_NAME: Final = (1 << 15) - 1
_NAME_SHOWN: Final = 249
_LARGEST_INT: Final = (1 << 31) - 1
_LARGEST_LONG: Final = (1 << 63) - 1


class SegmentState(Enum):
    """State of a segment; the values are those in the events."""

    COPY_STARTED = 0
    COPY_FINISHED = 1
    DELETE_STARTED = 2
    DELETE_FINISHED = 3

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


class PartitionDeleteState(Enum):
    """State of the deletion of a partition; the values are those in the events."""

    MARKED = 0
    STARTED = 1
    FINISHED = 2

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class TopicPartition:
    """A partition of a log, identified by topic id and number; the name is not compared."""

    name: str = field(compare=False)
    topic_id: UUID
    """The log's id."""
    partition: int

    def __post_init__(self) -> None:
        if type(self.name) is not str or type(self.topic_id) is not UUID or type(self.partition) is not int:
            raise InvalidInput("A partition is named by text, the UUID of its topic, and a whole number.")
        try:
            length = len(self.name.encode())
        except UnicodeEncodeError as error:
            raise InvalidInput(f"{self._short} cannot be the name of a topic: it is not valid Unicode.") from error
        if length > _LONGEST_NAME:
            raise InvalidInput(f"A topic's name cannot have {length} bytes: use at most {_LONGEST_NAME}.")
        if not 0 <= self.partition <= _LARGEST_INT:
            raise InvalidInput(f"There is no partition {self.partition} of {self._short}: use 0 to {_LARGEST_INT}.")

    def __str__(self) -> str:
        of = f"{self._short} ({self.topic_id})" if self.name else f"log {self.topic_id}"
        return f"partition {self.partition} of {of}"

    @property
    def _short(self) -> str:
        # Names are untrusted: a long one, or one with line breaks, must not spoil a message.
        return repr(self.name[:_NAME_SHOWN])


@dataclass(frozen=True, slots=True)
class SegmentId:
    """Identifies one copy of a range: another copy of the same range is another segment."""

    partition: TopicPartition
    id: UUID

    def __post_init__(self) -> None:
        if type(self.partition) is not TopicPartition or type(self.id) is not UUID:
            raise InvalidInput("A segment is named by its TopicPartition and a UUID.")

    def __str__(self) -> str:
        return f"{self.id} in {self.partition}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentMetadata:
    """Metadata of a segment. As an event it adds the segment."""

    segment: SegmentId
    start: int
    """Its first offset."""
    end: int
    """Its last offset, inclusive."""
    broker: int
    """The node that published its last event."""
    max_timestamp: int
    """Its newest record's time; -1 without one."""
    event_timestamp: int
    """Time of its last event."""
    terms: tuple[tuple[int, int], ...]
    """Each term with records in it, with the term's first offset, ascending."""
    size: int
    """In bytes."""
    custom_metadata: bytes | None = None
    """Opaque metadata of its storage; None differs from empty."""
    state: SegmentState = SegmentState.COPY_STARTED
    no_transaction_index: bool = False
    """Whether it was stored without a transaction index."""

    def __post_init__(self) -> None:
        _check_subject(self.segment, SegmentId, self.state, SegmentState)
        if not int is type(self.start) is type(self.end) is type(self.size) is type(self.max_timestamp):
            raise InvalidInput(f"Offsets, size and time of segment {self.segment} are whole numbers.")
        if not 0 <= self.start <= self.end <= _LARGEST_LONG:
            raise InvalidInput(
                f"Segment {self.segment} cannot hold the offsets {self.start} to {self.end}: the first is at least 0, "
                "the last is at least the first and below 2^63."
            )
        if not 0 <= self.size <= _LARGEST_INT:
            raise InvalidInput(
                f"Segment {self.segment} cannot have {self.size} bytes: use at least 0, and close it below 2 GiB."
            )
        _check_long(self.max_timestamp, "maximum timestamp", self.segment)
        _check_event(self.broker, self.event_timestamp, self.segment)
        _check_custom(self.custom_metadata, self.segment)
        self._check_terms()

    @checked
    def term_at(self, offset: int) -> int:
        """The term of one of its records."""
        return max(term for term, start in self.terms if start <= max(offset, self.terms[0][1]))

    def _check_terms(self) -> None:
        if not self.terms:
            raise InvalidInput(f"Segment {self.segment} has no terms: give the terms of its offsets.")
        if type(self.terms) is not tuple or not all(map(_is_pair, self.terms)):
            raise InvalidInput(f"The terms of segment {self.segment} are a tuple of pairs, term and first offset.")
        term_before, offset_before = -1, 0
        for term, offset in self.terms:
            if not term_before < term <= _LARGEST_INT:
                raise InvalidInput(
                    f"Segment {self.segment} has term {term} after {term_before}: terms ascend from 0, below 2^31."
                )
            if not offset_before <= offset <= _LARGEST_LONG:
                # A lookup in a term ends where the next term starts, so starts must ascend.
                raise InvalidInput(
                    f"Segment {self.segment} has term {term} start at {offset} and the one before it at "
                    f"{offset_before}: a later term cannot start earlier, nor any below 0 or above 2^63 - 1."
                )
            term_before, offset_before = term, offset


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentUpdate:
    """Event: a segment's next state. Broker, time and custom metadata replace the old ones."""

    segment: SegmentId
    broker: int
    event_timestamp: int
    state: SegmentState
    custom_metadata: bytes | None = None

    def __post_init__(self) -> None:
        _check_subject(self.segment, SegmentId, self.state, SegmentState)
        _check_event(self.broker, self.event_timestamp, self.segment)
        _check_custom(self.custom_metadata, self.segment)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionDelete:
    """Event: state of the deletion of a partition."""

    partition: TopicPartition
    broker: int
    event_timestamp: int
    state: PartitionDeleteState

    def __post_init__(self) -> None:
        _check_subject(self.partition, TopicPartition, self.state, PartitionDeleteState)
        _check_event(self.broker, self.event_timestamp, self.partition)


SegmentEvent = SegmentMetadata | SegmentUpdate | PartitionDelete


# Types are compared exactly, not derived from annotations as in other public calls: a replay makes millions of these.


def _check_subject(subject: object, kind: type, state: object, states: type) -> None:
    if type(subject) is not kind or type(state) is not states:
        raise InvalidInput(f"An event has a {kind.__name__} and a {states.__name__}.")


def _is_pair(pair: object) -> bool:
    return type(pair) is tuple and len(pair) == 2 and int is type(pair[0]) is type(pair[1])  # noqa: PLR2004 - a pair


def _check_event(broker: int, timestamp: int, what: SegmentId | TopicPartition) -> None:
    if type(broker) is not int or type(timestamp) is not int:
        raise InvalidInput(f"Broker and time of an event of {what} are whole numbers.")
    if not -_LARGEST_INT - 1 <= broker <= _LARGEST_INT:
        raise InvalidInput(f"An event of {what} cannot come from broker {broker}: its number has 32 bits.")
    _check_long(timestamp, "event timestamp", what)


def _check_long(number: int, name: str, what: SegmentId | TopicPartition) -> None:
    if not -_LARGEST_LONG - 1 <= number <= _LARGEST_LONG:
        raise InvalidInput(f"The {name} of {what} cannot be {number}: it is in milliseconds and has 64 bits.")


def _check_custom(custom: bytes | None, segment: SegmentId) -> None:
    if custom is not None and not isinstance(custom, bytes):
        raise InvalidInput(f"The custom metadata of segment {segment} is bytes or None.")
    if custom is not None and len(custom) >= _LARGEST_INT:
        raise InvalidInput(
            f"Segment {segment} cannot have {len(custom)} bytes of custom metadata: keep it below 2 GiB."
        )


COLD_FILE: Final = "cold.json"
"""Name of the description of the cold tier, beside the log."""
COLD_FOLDER: Final = "cold"
"""Default folder of segments, beside the log."""


@dataclass(frozen=True, slots=True)
class ColdTier:
    """The description of a log's cold tier, stored in ``cold.json`` beside the log."""

    log_id: UUID
    store: str
    """The address of the store with the segments."""
    events: str
    """The address of the topic with their events."""
    partitions: Natural
    """Partitions of that topic."""
    name: str = ""
    """The log's name in the events."""
    start: Natural = 0
    """Announced start: no new slot may be below it. Expiry announces it before it reads the slots."""
    gone: Natural = 0
    """Decided start: everything below it is deleted. Segments between it and ``start`` may stay."""
    announced: Natural = 0
    """Number of announcements: only the last announcer may decide."""

    def __post_init__(self) -> None:
        if self.partitions < 1 or not 0 <= self.gone <= self.start or self.announced < 0:
            raise InvalidInput(f"A cold tier has a partition or more and begins at 0 or later: {self}.")
        if not self.store or not self.events:
            raise InvalidInput("A cold tier needs the addresses of its store and of its events.")
