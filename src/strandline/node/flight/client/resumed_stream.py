"""A stream of records that continues at another node of the log when a node is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeAlias
from uuid import UUID

import pyarrow as pa

from strandline.errors import NotReady, TransientStorageError
from strandline.formats.node.ticket import ReadTicket
from strandline.log.read.reading import pauses
from strandline.model.cursor import Cursor
from strandline.node.flight.client.channel import Channel
from strandline.node.flight.client.node_channels import NodeChannels
from strandline.node.flight.client.remote_span import streamed_with_terms
from strandline.node.flight.wire.streams import schema_of_columns
from strandline.storage.clock import Clock

TermBatch: TypeAlias = tuple[pa.RecordBatch, int]
"""Records and their term."""

_OFFSET: Final = "offset"


def resumed_stream(
    nodes: NodeChannels, log_id: UUID, cursor: Cursor, ticket: ReadTicket, clock: Clock
) -> Iterator[pa.RecordBatch]:
    """The batches from a cursor on, as the ticket asks for them, without a gap and without a record twice.

    ``Diverged`` if the records that it has given are not in the log any more.
    """
    end = ticket.upto
    columns = None if ticket.columns is None else tuple(dict.fromkeys((*ticket.columns, _OFFSET)))
    schema = schema_of_columns(columns)

    def begin(channel: Channel) -> tuple[TermBatch | None, Iterator[TermBatch]]:
        batches = streamed_with_terms(channel, ReadTicket(cursor, end, ticket.follow, columns), schema, clock)
        return next(batches, None), batches

    waiting: Iterator[float] | None = None
    while end is None or cursor.next < end:
        try:
            found, batches = nodes.on_reader(begin)
            while found is not None:
                batch, term = found
                cursor, waiting = Cursor(log_id, batch.column(_OFFSET)[-1].as_py() + 1, term), None
                yield batch if ticket.columns is None else batch.select(ticket.columns)
                found = next(batches, None)
        except (TransientStorageError, NotReady):
            waiting = waiting or pauses(nodes.failover_timeout, clock)
            pause = next(waiting, 0.0)
            if not pause:
                raise
            clock.sleep(pause)
        else:
            return
