"""Producers of logs that order appends themselves: write-ahead logs, nodes, logs in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, NamedTuple, Protocol, runtime_checkable

import pyarrow as pa

from strandline.errors import ExpectationFailed, InvalidInput, OutcomeUnknown, OutOfOrder, StrandlineError
from strandline.log.contract import Handle, Receipt
from strandline.log.produce.limits import Limits
from strandline.log.produce.producer import Producer
from strandline.log.produce.shipper import Draft, Sealed, Shipper
from strandline.log.produce.typed import ValueEncoder
from strandline.model.head import MetadataRanges, WriterId
from strandline.model.records import RECORD_SCHEMA
from strandline.storage.clock import Chance, Clock
from strandline.storage.retry import Backoff

BATCH_BYTES: Final = 8 << 20
LINGER: Final = 0.01
BUDGET: Final = 256 << 20
RETRY_SECONDS: Final = 60.0
"""How long a producer repeats an append that may succeed later, before its handles raise the reason."""

_LARGEST: Final = 255 << 20
"""Bytes of one append: a frame of a write-ahead log holds 256 MiB."""

_FEW: Final = 64
"""An append of more Arrow batches than this combines them: each would be a page, or a message, of its own."""

_BACKOFF: Final = Backoff(base=0.02, ceiling=1.0)


@runtime_checkable
class Recognised(Protocol):
    """The handle of an append, for logs that report whether they recognised its number."""

    @property
    def repeated(self) -> bool:
        """Whether the log had an append of this writer and number before, so that this one adds nothing."""


class Appends(Protocol):
    """The append of a log."""

    def __call__(self, batch: pa.Table, *, writer: WriterId, number: int, expect: int | None = None) -> Handle:
        """Append a batch, whole or not at all; the same writer and number again adds nothing."""


@dataclass(slots=True)
class RecordsDraft(Draft):
    """A batch being built, as records in memory: the log encodes them."""

    batches: list[pa.RecordBatch] = field(default_factory=list)

    def add(self, batches: Iterable[pa.RecordBatch]) -> int:
        """Append record batches; returns the index of their first record."""
        start, added = self.count, list(batches)
        size = sum(batch.nbytes for batch in added)
        if size > AppendShipper.most_bytes:
            raise InvalidInput(
                f"A batch of {size:,} bytes is over the limit of {AppendShipper.most_bytes:,}: append it in parts."
            )
        self.batches += added
        self.count += sum(batch.num_rows for batch in added)
        self.size += size
        self.plain += size
        return start

    def attach(self, ranges: MetadataRanges) -> None:
        """Do nothing: the producer refuses metadata, and the records have the times of their calls."""


class NumberedBatch(NamedTuple):
    """A batch, the number of its append, and the end of the log that it expects."""

    records: pa.Table
    number: int
    expect: int | None


@dataclass(eq=False)
class AppendShipper(Shipper[RecordsDraft, NumberedBatch]):
    """One writer's shipper to a log by its ``append``: all that are ready are appended before the first is awaited."""

    most_metadata: ClassVar = 0
    most_bytes: ClassVar = _LARGEST
    most_record_bytes: ClassVar = _LARGEST - (1 << 20)  # the rest is for what Arrow adds

    append: Appends
    writer: WriterId
    clock: Clock
    chance: Chance
    retry_seconds: float
    _asked: set[int] = field(default_factory=set)
    """Numbers that were sent and may be listed."""

    def new_draft(self) -> RecordsDraft:
        """An empty draft."""
        return RecordsDraft()

    def seal(self, draft: RecordsDraft, *, number: int, expect: int | None = None) -> Sealed[NumberedBatch]:
        """Make one table of a draft."""
        records = pa.Table.from_batches(draft.batches, RECORD_SCHEMA)
        if len(draft.batches) > _FEW:
            records = records.combine_chunks()
        return Sealed((), NumberedBatch(records, number, expect))

    def upload(self, sealed: Sealed[NumberedBatch]) -> Sealed[NumberedBatch]:
        """Return the batch as it is: the log takes batches in order."""
        return sealed

    def enlist(self, batches: Sequence[Sealed[NumberedBatch]]) -> list[Receipt]:
        """Append the batches in order; returns a receipt for each up to the first that failed.

        If the first fails and may succeed later, or its answer was lost, it is appended again, under the same number,
        for up to ``retry_seconds``.
        """
        began, attempt = self.clock.monotonic(), 0
        while True:
            try:
                return self._append(batches)
            except StrandlineError as error:
                is_late = self.clock.monotonic() - began >= self.retry_seconds
                if is_late or not (error.retryable or isinstance(error, OutcomeUnknown)):
                    raise
            self.clock.sleep(_BACKOFF.pause(attempt, self.chance.jitter()))
            attempt += 1

    def _append(self, batches: Sequence[Sealed[NumberedBatch]]) -> list[Receipt]:
        sent: list[tuple[int, Handle]] = []
        failure: Exception | None = None
        for batch in batches:
            try:
                sent.append((batch.listing.number, self._send(batch.listing)))
            except Exception as error:  # noqa: BLE001 - raised, if it is the first
                failure = error
                break
        receipts: list[Receipt] = []
        for number, handle in sent:
            try:
                receipts.append(handle.result())
            except Exception as error:  # noqa: BLE001 - raised, if it is the first
                failure = error
                break
            self._asked.discard(number)
        if failure is not None and not receipts:
            raise failure
        return receipts

    def _send(self, batch: NumberedBatch) -> Handle:
        records, number, expect = batch
        is_new = number not in self._asked
        self._asked.add(number)  # before the append: afterwards only a success is certain
        try:
            handle = self.append(records, writer=self.writer, number=number, expect=expect)
        except ExpectationFailed:
            self._asked.discard(number)  # the next batch gets this number
            raise
        # Before the next batch is sent: that one must not be listed after a batch of another producer.
        if is_new and isinstance(handle, Recognised) and handle.repeated:
            self._asked.discard(number)
            raise OutOfOrder(
                f"Number {number} of writer {self.writer} was listed by another process: another producer uses this "
                "writer id. Nothing was appended. Open a producer with an id of its own."
            )
        return handle


def producer_by(
    append: Appends,
    limits: Limits,
    *,
    writer: WriterId | None,
    last_number: Callable[[WriterId], int | None],
    clock: Clock,
    chance: Chance,
    values: ValueEncoder | None = None,
    retry_seconds: float = RETRY_SECONDS,
) -> Producer:
    """A producer with a writer id of its own, or the given one, which then continues after its last number."""
    name = WriterId(chance.uuid()) if writer is None else writer
    last = None if writer is None else last_number(name)
    shipper = AppendShipper(append, name, clock, chance, retry_seconds)
    return Producer(shipper, limits, writer=name, number=0 if last is None else last + 1, clock=clock, values=values)
