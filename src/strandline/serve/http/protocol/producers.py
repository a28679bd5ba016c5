"""Idempotent producers: epochs and sequences of clients, and what a log remembers of them. Decisions are pure.

A log remembers a producer as a client that numbers its appends (:func:`~strandline.log.writers.source.client_writer`):
its position counts the appends that were accepted, its proof holds the epoch and the sequence of the last one. So they
are stored in the same step as the records, whichever server appends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from strandline.errors import InvalidInput
from strandline.log.writers.source import advancing, client_writer
from strandline.model.arguments import shown
from strandline.model.head import SourceProof, WriterId, WriterState, proven

ID, EPOCH, SEQUENCE = "producer-id", "producer-epoch", "producer-seq"
KEY: Final = "idempotency-key"
"""A request with such a key is a producer with one append."""

_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,15}")
_LARGEST: Final = (1 << 53) - 1
_LONGEST_ID: Final = 256


@dataclass(frozen=True, slots=True)
class HttpProducer:
    """What a request says of its producer."""

    id: str
    epoch: int
    sequence: int
    space: str = "durable-streams"
    """What kind of name the id is: those of different kinds never meet."""

    @property
    def writer(self) -> WriterId:
        """The id under which a log remembers the producer."""
        return client_writer(f"{self.space}/{self.id}")

    def append_as(self, number: int) -> WriterId:
        """The writer id of this append, as the one of this number."""
        return proven(advancing(self.writer, 1), SourceProof(self.sequence, 0, self.epoch))


@dataclass(frozen=True, slots=True)
class Next:
    """The append is the next one of its producer, with this number in the log."""

    number: int


@dataclass(frozen=True, slots=True)
class Repeated:
    """The append was accepted before; ``sequence`` is the highest one of its epoch."""

    sequence: int


@dataclass(frozen=True, slots=True)
class FencedEpoch:
    """A producer with a higher epoch, the current one, has taken over."""

    epoch: int


@dataclass(frozen=True, slots=True)
class SequenceGap:
    """Sequences from ``expected`` on are missing."""

    expected: int


Refusal: TypeAlias = Repeated | FencedEpoch | SequenceGap
"""Why nothing is appended."""


def producer_of(headers: Mapping[str, str]) -> HttpProducer | None:
    """The producer in the headers of a request, whose names are in lower case; None without one.

    An ``Idempotency-Key`` is the producer of one append.

    ``InvalidInput`` unless there are all three headers or none, and for anything but whole numbers of 53 bits.

    >>> producer_of({"producer-id": "a", "producer-epoch": "1", "producer-seq": "0"})
    HttpProducer(id='a', epoch=1, sequence=0, space='durable-streams')
    >>> producer_of({"producer-id": "a", "producer-epoch": "1e3", "producer-seq": "0"})
    Traceback (most recent call last):
    strandline.errors.InvalidInput: Producer-Epoch is a whole number from 0 up to 9007199254740991, not '1e3'.
    """
    given = [name for name in (ID, EPOCH, SEQUENCE) if name in headers]
    once = headers.get(KEY)
    if once is not None:
        if given or not 0 < len(once) <= _LONGEST_ID:
            raise InvalidInput(f"An Idempotency-Key has 1 to {_LONGEST_ID} characters, and no producer beside it.")
        return HttpProducer(once, 0, 0, KEY)
    if not given:
        return None
    if len(given) < len((ID, EPOCH, SEQUENCE)):
        raise InvalidInput(
            "A producer has all of Producer-Id, Producer-Epoch and Producer-Seq: send the three together."
        )
    name = headers[ID]
    if not name.strip() or len(name) > _LONGEST_ID:
        raise InvalidInput(f"A Producer-Id has 1 to {_LONGEST_ID} characters.")
    return HttpProducer(name, _whole(headers, EPOCH, "Producer-Epoch"), _whole(headers, SEQUENCE, "Producer-Seq"))


def _whole(headers: Mapping[str, str], name: str, title: str) -> int:
    text = headers[name]
    if not _NUMBER.fullmatch(text) or int(text) > _LARGEST:
        raise InvalidInput(f"{title} is a whole number from 0 up to {_LARGEST}, not {shown(text)}.")
    return int(text)


def judge(producer: HttpProducer, last: WriterState | None) -> Next | Refusal:
    """Whether an append is the next one of its producer, by the last one that the log has.

    ``InvalidInput`` for a new epoch that does not begin at 0.

    >>> last = WriterState(5, 0, 0, 1, 0, SourceProof(next=4, term=0, fingerprint=2))
    >>> judge(HttpProducer("a", 2, 5), last), judge(HttpProducer("a", 2, 3), last), judge(HttpProducer("a", 3, 0), last)
    (Next(number=5), Repeated(sequence=4), Next(number=5))
    >>> judge(HttpProducer("a", 1, 9), last), judge(HttpProducer("a", 2, 7), last), judge(HttpProducer("a", 0, 1), None)
    (FencedEpoch(epoch=2), SequenceGap(expected=5), SequenceGap(expected=0))
    """
    if last is None or last.proof is None:
        return Next(0 if last is None else last.number) if producer.sequence == 0 else SequenceGap(0)
    epoch, sequence = last.proof.fingerprint, last.proof.next
    if producer.epoch < epoch:
        return FencedEpoch(epoch)
    if producer.epoch > epoch:
        if producer.sequence:
            raise InvalidInput(f"Epoch {producer.epoch} of a producer is new: it begins with Producer-Seq 0.")
        return Next(last.number)
    if producer.sequence <= sequence:
        return Repeated(sequence)
    return Next(last.number) if producer.sequence == sequence + 1 else SequenceGap(sequence + 1)
