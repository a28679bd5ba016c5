"""Positions of a consumer: handed out, acknowledged, durably acknowledged. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from strandline.errors import CorruptData, InvalidInput, OutOfOrderAck
from strandline.log.queue.contract import start_of
from strandline.model.head import Descriptor


@dataclass(frozen=True, slots=True)
class AckStep:
    """A planned acknowledgement.

    ``acknowledged`` is the next sequence after it. ``through`` is the batch that has to be acknowledged
    durably first; None if it need not be durable yet.
    """

    acknowledged: int
    through: Descriptor | None


class AckProgress:
    """The bookkeeping of one consumer, in positions: ``durable <= acknowledged <= read``, and each only grows.

    A batch that was set aside counts as acknowledged as soon as all before it are. A queue that counts batches numbers
    them one by one, a queue that counts records by the offset of the last.

    An acknowledgement takes two calls: one plans an :class:`AckStep` and changes nothing, :meth:`done` applies it after
    the caller has executed it. If that fails, the same call can be repeated.

    >>> from strandline.model.head import QueueEntry
    >>> progress = AckProgress(5, ack_every=2)
    >>> progress.hand_out([QueueEntry(5, "a"), QueueEntry(6, "b")])
    >>> step = progress.ack(5)
    >>> progress.done(step)
    >>> progress.ack(6).through
    QueueEntry(sequence=6, location='b', metadata=())
    >>> progress.read, progress.acknowledged, progress.durable
    (7, 6, 5)
    """

    __slots__ = ("_ack_every", "_aside", "_counted", "_handed_out", "_settled", "acknowledged", "durable", "read")

    def __init__(self, first: int, *, ack_every: int = 100) -> None:
        """Begin with everything below ``first`` acknowledged; each ``ack_every`` acknowledgements become durable."""
        self.read = first
        """The next position to deliver."""
        self.acknowledged = first
        """The next position to acknowledge."""
        self.durable = first
        """Everything below is acknowledged in the store."""
        self._ack_every = ack_every
        # Batches without a durable acknowledgement, by sequence, each with its number among all that were handed out: a
        # step names its last one. A signal may interrupt any method below between two calls: the attribute that counts
        # is set in one statement, and the rest is repeated later.
        self._handed_out: dict[int, tuple[int, Descriptor]] = {}
        self._counted = 0
        self._settled = 0
        """How many of those handed out are durably acknowledged."""
        self._aside: dict[int, int] = {}
        """Begin and end of batches that were set aside."""

    def hand_out(self, descriptors: Sequence[Descriptor]) -> None:
        """Move the read cursor past these batches, which must be the next ones; else nothing changes."""
        self._deliver(descriptors, {})

    def _deliver(self, descriptors: Sequence[Descriptor], aside: Mapping[int, int]) -> None:
        place = self.read
        for descriptor in descriptors:
            if start_of(descriptor) != place:
                raise CorruptData(
                    f"The queue gave batch {descriptor.sequence} ({descriptor.location}) where {place} is next: its "
                    "list of batches is damaged. Nothing was handed out."
                )
            place = descriptor.sequence + 1
        # Whatever is at or after the read cursor does not count: an interrupted call has left it.
        while self._handed_out and (last := next(reversed(self._handed_out))) >= self.read:
            del self._handed_out[last]
        self._aside = {start: end for start, end in self._aside.items() if start < self.read} | dict(aside)
        counted = self._counted
        for number, descriptor in enumerate(descriptors, counted):
            self._handed_out[descriptor.sequence] = (number, descriptor)
        self._counted = counted + len(descriptors)
        self.read = place  # last, in one statement: only now they are handed out

    def take_back(self, descriptor: Descriptor) -> None:
        """Deliver the last delivered batch again, since it did not reach its reader; a no-op for any other."""
        start = start_of(descriptor)
        if descriptor.sequence == self.read - 1 and start >= self.acknowledged and start not in self._aside:
            self.read = start
            if self._handed_out.pop(descriptor.sequence, None) is not None:
                self._counted -= 1

    def check_aside(self, descriptor: Descriptor) -> None:
        """Refuse to set aside a batch that is acknowledged already, or beyond the next one to deliver."""
        if not self.acknowledged <= start_of(descriptor) <= self.read:
            raise InvalidInput(
                f"Batch {descriptor.sequence} cannot be set aside: {self.acknowledged} is the next to acknowledge, and "
                f"{self.read} the next to hand out. Nothing was changed."
            )

    def set_aside(self, descriptor: Descriptor) -> None:
        """Count a batch as acknowledged in its turn; if it is the next one, it also counts as delivered."""
        self.check_aside(descriptor)
        aside = {start_of(descriptor): descriptor.sequence + 1}
        if start_of(descriptor) == self.read:
            self._deliver([descriptor], aside)
        else:
            self._aside.update(aside)
        self._acknowledge(self.acknowledged)

    def ack(self, sequence: int) -> AckStep:
        """Plan to acknowledge the next batch; ``OutOfOrderAck`` if it is not the next, or was not delivered."""
        found = self._handed_out.get(sequence) if sequence < self.read else None
        if found is None or start_of(found[1]) != self.acknowledged:
            raise self._out_of_order(sequence)
        return self._step(sequence, durably=False)

    def ack_through(self, sequence: int) -> AckStep:
        """Plan to acknowledge everything through a batch, durably; ``OutOfOrderAck`` as :meth:`ack`."""
        if not self.acknowledged <= sequence < self.read or sequence not in self._handed_out:
            raise self._out_of_order(sequence)
        return self._step(sequence, durably=True)

    def flush(self) -> AckStep | None:
        """Plan to make every acknowledgement durable; None if all are."""
        if self.acknowledged == self.durable:
            return None
        return AckStep(self.acknowledged, self._handed_out[self.acknowledged - 1][1])

    def done(self, step: AckStep) -> None:
        """Apply an executed step. Another one, or a batch set aside, may have come first: nothing goes back."""
        self._acknowledge(max(self.acknowledged, step.acknowledged))
        if step.through is None:
            return
        self.durable = max(self.durable, step.through.sequence + 1)
        for sequence in list(takewhile(lambda sequence: sequence < self.durable, self._handed_out)):
            number, _ = self._handed_out[sequence]
            self._settled = max(self._settled, number + 1)
            del self._handed_out[sequence]

    def _step(self, sequence: int, *, durably: bool) -> AckStep:
        acknowledged = self._past_aside(sequence + 1)
        number, through = self._handed_out[acknowledged - 1]
        durably = durably or number + 1 - self._settled >= self._ack_every
        return AckStep(acknowledged, through if durably else None)

    def _acknowledge(self, position: int) -> None:
        self.acknowledged = self._past_aside(position)
        if self._aside:
            self._aside = {start: end for start, end in self._aside.items() if start > self.acknowledged}

    def _past_aside(self, position: int) -> int:
        while position < self.read and position in self._aside:
            position = self._aside[position]
        return position

    def _out_of_order(self, sequence: int) -> OutOfOrderAck:
        waiting = (found for found in self._handed_out if self.acknowledged <= found < self.read)
        expected = next(waiting, self.acknowledged)
        if self.acknowledged == self.read:
            what = "it was not handed out yet: read it first"
        else:
            what = f"handed out are {expected} through {self.read - 1}"
        return OutOfOrderAck(
            f"Batch {sequence} cannot be acknowledged: the next one is {expected}, and {what}. Nothing was changed."
        )
