"""Follows a log into a sink of records: the follower fetches batches, and the sink stores them with its cursor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import pyarrow as pa

from strandline.errors import NotFound
from strandline.followers import events
from strandline.followers.table_route import Pieces
from strandline.log.contract import Log
from strandline.log.read.decoded_sizes import DecodedSizes
from strandline.log.read.planning import cursor_after
from strandline.log.read.reading import AHEAD_BYTES, fetch_in_order
from strandline.model.cursor import Cursor, Limit, Span
from strandline.model.records import READ_SCHEMA
from strandline.model.sink import Sink

Fetched: TypeAlias = tuple[Cursor, Sequence[pa.RecordBatch]]
"""The records of a span, and the cursor after them."""


def fetched(log: Log, since: Cursor, spans: Sequence[Span], limit: Limit, sizes: DecodedSizes) -> list[Fetched]:
    """The records of the first spans that can still be read, and that fit into memory.

    Records that moved to the cold tier since the plan are read from there.
    """
    while True:
        chunk: list[Fetched] = []
        upto, size = since, 0
        ahead = AHEAD_BYTES if limit.bytes is None else min(AHEAD_BYTES, limit.bytes)
        try:
            for span, part in fetch_in_order(spans, ahead=ahead, sizes=sizes):
                upto = cursor_after(upto, span)
                chunk.append((upto, part))
                size += sum(batch.nbytes for batch in part)
                if limit.bytes is not None and size >= limit.bytes:
                    return chunk  # stored, they took less
        except NotFound:
            if chunk:
                return chunk  # the rest is planned again
            # CursorExpired if it was trimmed; if it is planned at the same place again, it is lost.
            again = log.plan(since, limit)
            if not again or any(span == again[0] for span in spans):
                raise
            spans = again
        except MemoryError:
            if chunk:
                return chunk
            if len(spans) == 1:
                raise
            spans = spans[:1]
        else:
            return chunk


@dataclass(frozen=True, slots=True)
class RecordRoute:
    """Reads records from a log, and stores them as a table."""

    log: Log
    sink: Sink
    pieces: Pieces
    _sizes: DecodedSizes = field(default_factory=DecodedSizes)

    def receive(self, since: Cursor, limit: Limit) -> events.Received | None:
        """The next records, about as many as the limit says."""
        spans = self.log.plan(since, limit)
        if not spans:
            return None
        chunk = fetched(self.log, since, spans, limit, self._sizes)
        upto, size = chunk[-1][0], sum(batch.nbytes for _, part in chunk for batch in part)
        begins = since.at(spans[0].first)
        return events.Received(chunk, upto.next - since.next, upto, since=begins, size=size, batches=len(spans))

    def store(self, chunks: Sequence[events.SourceDelivery], since: Cursor, upto: Cursor) -> None:
        """Store a range; in several steps if it does not fit into memory."""
        fetched = [one for chunk in chunks for one in chunk]
        self.pieces.store(fetched, since, upto, after=lambda _, one: one[0], commit=self._apply)

    def _apply(self, fetched: Sequence[Fetched], since: Cursor, upto: Cursor) -> None:
        batches = [batch for _, part in fetched for batch in part]
        self.sink.apply(pa.Table.from_batches(batches, READ_SCHEMA), since=since, upto=upto)
