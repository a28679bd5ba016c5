"""Handles of appends: a group of records shares one outcome, a handle is a place within it."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from strandline.log.contract import Receipt

if TYPE_CHECKING:
    from strandline.log.object.producer import Producer

Outcome = Future[Receipt]


def _part(whole: Receipt, index: int, count: int) -> Receipt:
    return Receipt(None if whole.first is None else whole.first + index, count)


class BatchHandle:
    """The handle of an append of many records: some of one batch."""

    __slots__ = ("_count", "_index", "_outcome")

    def __init__(self, outcome: Outcome, index: int, count: int) -> None:
        """Records ``index`` up to ``index + count`` of the batch with this outcome."""
        self._outcome = outcome
        self._index = index
        self._count = count

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._outcome.done()

    def result(self, timeout: float | None = None) -> Receipt:
        """Block until the records are durable and listed, or raise why they are not."""
        return _part(self._outcome.result(timeout), self._index, self._count)

    def __await__(self) -> Generator[object, None, Receipt]:
        whole = yield from asyncio.wrap_future(self._outcome).__await__()
        return _part(whole, self._index, self._count)


class RecordHandle:
    """The handle of one record; until the record is put in a batch it also carries the record."""

    __slots__ = ("_producer", "headers", "index", "key", "op", "outcome", "timestamp", "value")

    def __init__(
        self,
        producer: Producer,
        timestamp: int,
        op: int,
        key: bytes | None,
        value: bytes | None,
        headers: object,
    ) -> None:
        """A record that waits for its batch."""
        self._producer = producer
        self.timestamp = timestamp
        self.op = op
        self.key = key
        self.value = value
        self.headers = headers
        self.outcome: Outcome | None = None
        self.index = 0

    def _placed(self) -> Outcome:
        while self.outcome is None:  # another thread may be about to place it
            self._producer.place_pending()
        return self.outcome

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self.outcome is not None and self.outcome.done()

    def result(self, timeout: float | None = None) -> Receipt:
        """Block until the record is durable and listed, or raise why it is not."""
        return _part(self._placed().result(timeout), self.index, 1)

    def __await__(self) -> Generator[object, None, Receipt]:
        whole = yield from asyncio.wrap_future(self._placed()).__await__()
        return _part(whole, self.index, 1)


def settled(receipt: Receipt) -> BatchHandle:
    """A handle whose outcome is known already."""
    outcome: Outcome = Future()
    outcome.set_result(receipt)
    return BatchHandle(outcome, 0, receipt.count)
