"""The producer of every log; and the shipper to logs that order appends themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple, Protocol

import pyarrow as pa

from strandline.errors import ExpectationFailed, InvalidInput, OutcomeUnknown, OutOfOrder, StrandlineError
from strandline.log.contract import Handle
from strandline.log.produce.producer import Producer
from strandline.log.produce.shipper import Draft, FinishedBatch, Limits, Shipper
from strandline.log.produce.typed import ValueEncoder
from strandline.log.read.value_format import named_codec
from strandline.model.arguments import Positive, checked
from strandline.model.head import MetadataRanges, Receipt, WriterId
from strandline.model.records import RECORD_SCHEMA
from strandline.storage.env import Env
from strandline.storage.retry import Backoff
from strandline.values.contract import Codec

RETRY_SECONDS: Final = 60.0
"""How long a producer repeats an append that may succeed later, before its handles raise the reason."""

_LARGEST: Final = 255 << 20
"""Bytes of one append: a frame of a write-ahead log holds 256 MiB."""

_FEW: Final = 64
"""An append of more Arrow batches than this combines them: each would be a page, or a message, of its own."""

_BACKOFF: Final = Backoff(base=0.02, ceiling=1.0)


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
    env: Env
    retry_seconds: float = RETRY_SECONDS
    _asked: set[int] = field(default_factory=set)
    """Numbers that were sent and may be listed."""

    def new_draft(self) -> RecordsDraft:
        """An empty draft."""
        return RecordsDraft()

    def seal(self, draft: RecordsDraft, *, number: int, expect: int | None = None) -> FinishedBatch[NumberedBatch]:
        """Make one table of a draft."""
        records = pa.Table.from_batches(draft.batches, RECORD_SCHEMA)
        if len(draft.batches) > _FEW:
            records = records.combine_chunks()
        return FinishedBatch((), NumberedBatch(records, number, expect))

    def upload(self, sealed: FinishedBatch[NumberedBatch]) -> FinishedBatch[NumberedBatch]:
        """Return the batch as it is: the log takes batches in order."""
        return sealed

    def enlist(self, batches: Sequence[FinishedBatch[NumberedBatch]]) -> list[Receipt]:
        """Append the batches in order; returns a receipt for each up to the first that failed.

        If the first fails and may succeed later, or its answer was lost, it is appended again, under the same number,
        for up to ``retry_seconds``.
        """
        began, attempt = self.env.clock.monotonic(), 0
        while True:
            try:
                return self._append(batches)
            except StrandlineError as error:
                is_late = self.env.clock.monotonic() - began >= self.retry_seconds
                if is_late or not (error.retryable or isinstance(error, OutcomeUnknown)):
                    raise
            self.env.clock.sleep(_BACKOFF.pause(attempt, self.env.chance.jitter()))
            attempt += 1

    def _append(self, batches: Sequence[FinishedBatch[NumberedBatch]]) -> list[Receipt]:
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
        if is_new and getattr(handle, "repeated", False):  # of a log that tells whether it had the number
            self._asked.discard(number)
            raise OutOfOrder(
                f"Number {number} of writer {self.writer} was listed by another process: another producer uses this "
                "writer id. Nothing was appended. Open a producer with an id of its own."
            )
        return handle


class Shipping(NamedTuple):
    """What a producer ships with: the shipper of one writer, and the number of its next batch."""

    shipper: Shipper[Any, Any]
    writer: WriterId
    number: int
    env: Env


def shipping_by(
    append: Appends,
    writer: WriterId | None,
    last_number: Callable[[WriterId], int | None],
    *,
    env: Env,
) -> Shipping:
    """Shipping to a log that orders appends itself, by its ``append``."""
    name = WriterId(env.chance.uuid()) if writer is None else writer
    last = None if writer is None else last_number(name)
    return Shipping(AppendShipper(append, name, env), name, 0 if last is None else last + 1, env)


@checked
class Produces(ABC):
    """A log to which producers can append; a kind of log defines only how its batches are shipped."""

    _limits: ClassVar[Limits] = Limits(batch_bytes=8 << 20, linger=0.01, uploads=1)
    """Those of a producer that names no others."""

    @abstractmethod
    def _shipping(self, writer: WriterId | None, compression: str | None) -> Shipping:
        """The shipping of a new producer, with a writer id of its own or the given one."""

    def producer(
        self,
        *,
        writer: WriterId | None = None,
        batch_bytes: Positive | None = None,
        linger: float | None = None,
        budget: Positive = 256 << 20,
        block: bool = True,
        value: Codec | None = None,
        uploads: Positive | None = None,
        compression: str | None = None,
    ) -> Producer:
        """A producer: many small appends become few batches, in the order of the calls, each listed once.

        It has a writer id of its own, or the given one, which then continues after its last number. A writer id is for
        one running producer at a time: of two that share one, the second to use a number gets ``OutOfOrder`` and
        appends nothing more. Close the producer before its log.

        Args:
            writer: The id of a former producer. A queue of version 1 remembers none.
            batch_bytes: Size at which a batch is closed: by default 8 MiB, of a log in an object store 64 MiB.
            linger: Seconds after its first record when a batch is closed: by default 0.01, in an object store 0.1.
            budget: Bytes that may be appended and not listed yet. Above it appending waits.
            block: If false, appending does not wait, but raises ``BufferFull``.
            value: The codec of typed values; by default the one that the log names, if it names one.
            uploads: Batches that are uploaded at a time, 8 by default. Only of a log in an object store.
            compression: Of a log in an object store: ``"none"``, ``"lz4"`` (the default), or ``"zstd"`` (the default
                of a queue of version 1).

        The producer of a node repeats an append that may succeed later for a minute: one that waits for the commit
        policy, whose answer was lost, or that no primary takes now. Then its handles raise the reason.
        """
        own = self._limits
        if own.uploads == 1 and (uploads is not None or compression is not None):
            raise InvalidInput("Only logs in object stores take uploads and compression: leave them out.")
        limits = Limits(
            own.batch_bytes if batch_bytes is None else batch_bytes,
            own.linger if linger is None else linger,
            budget,
            block,
            own.uploads if uploads is None else uploads,
        )
        shipper, name, number, env = self._shipping(writer, compression)
        values = ValueEncoder(value, partial(named_codec, self))
        return Producer(shipper, limits, writer=name, number=number, env=env, values=values)
