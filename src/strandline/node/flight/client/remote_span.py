"""Spans and streams of a node's log: read over Flight, from any node of the log."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias, final
from uuid import UUID

import pyarrow as pa

from strandline.errors import CorruptData, Diverged, InvalidInput, NotReady, StrandlineError, TransientStorageError
from strandline.formats.node.ticket import ReadTicket, encode_ticket
from strandline.formats.node.wire import Flag
from strandline.log.read.reading import pauses
from strandline.model.cursor import Cursor, Span
from strandline.model.json_values import fingerprint_of
from strandline.node.flight.client.channel import TIMEOUT, Channel
from strandline.node.flight.client.node_channels import FAILOVER_TIMEOUT, NodeChannels, near_first
from strandline.node.flight.client.stream_receiver import Receiver, read_part, size_of
from strandline.node.flight.security import ClientSecurity
from strandline.node.flight.wire.streams import schema_of_columns
from strandline.node.messages import PlannedSpan
from strandline.storage.clock import CLOCK
from strandline.storage.env import SYSTEM, Env

TermBatch: TypeAlias = tuple[pa.RecordBatch, int]
"""Records and their term."""

_OFFSET: Final = "offset"
_JOINED_BYTES: Final = 64 << 20
"""Spans up to this size are read in one call: each further call costs about 8 ms, and calls do not overlap."""


@final
@dataclass(frozen=True, slots=True)
class RemoteSpan:
    """Offsets ``first`` up to ``next`` of a node's log. Picklable: it carries the nodes' addresses and a ticket.

    The ticket is signed by a node, allows reading what was planned and nothing else, and expires, after an hour by
    default. A token is not carried; a client's certificate is, where nodes accept no connection without one.

    Committed records never change, so that any node of the log serves the same.
    """

    urls: tuple[str, ...]
    """Where to read it, in this order; a node on the machine that reads comes first."""
    log_id: UUID
    first: int
    next: int
    size: int
    term: int
    fingerprint: int | None
    """None for records of the cold tier."""
    ticket: str | None = field(default=None, repr=False)
    security: ClientSecurity | None = field(default=None, repr=False)
    timeout: float = TIMEOUT
    failover_timeout: float = FAILOVER_TIMEOUT

    def join(self, following: Span) -> RemoteSpan | None:
        """Both spans as one, if they are adjacent, of the same term and small; otherwise None."""
        size = self.size + following.size
        if not isinstance(following, RemoteSpan) or following.first != self.next or size > _JOINED_BYTES:
            return None
        both = replace(self, next=following.next, size=size, fingerprint=following.fingerprint)
        return both if replace(following, first=self.first, size=size) == both else None

    def fetch(self, columns: Sequence[str] | None = None) -> list[pa.RecordBatch]:
        """Read the span's records with their offsets; ``CursorExpired`` if they were trimmed.

        With several addresses, a node that cannot serve it is left for the next one, and while none can, all are asked
        again for up to ``failover_timeout`` seconds.
        """
        schema = schema_of_columns(columns)  # an unknown column is refused here
        ticket = ReadTicket(
            Cursor(self.log_id, self.first), self.next, columns=None if columns is None else tuple(columns)
        )
        if len(self.urls) == 1:
            return self._fetched(self.urls[0], ticket, schema)
        return self._fetched_anywhere(lambda url: self._fetched(url, ticket, schema))

    def _fetched_anywhere(self, fetch: Callable[[str], list[pa.RecordBatch]]) -> list[pa.RecordBatch]:
        waiting = pauses(self.failover_timeout, CLOCK)
        while True:
            failures: list[StrandlineError] = []
            for url in near_first(self.urls):
                try:
                    return fetch(url)
                except (CorruptData, InvalidInput):
                    raise
                except StrandlineError as error:
                    # A lagging replica answers Diverged: a record is lost only if all nodes answer so.
                    failures.append(error)
            unknown = next((error for error in failures if error.retryable), None)
            pause = 0.0 if unknown is None else next(waiting, 0.0)
            if not pause:
                raise unknown or failures[0]
            CLOCK.sleep(pause)

    def _fetched(self, url: str, ticket: ReadTicket, schema: pa.Schema) -> list[pa.RecordBatch]:
        channel = _channel(os.getpid(), url, self.security, self.timeout)
        found = list(streamed_with_terms(channel, ticket, schema, SYSTEM, signed=self.ticket))
        other = next((term for _, term in found if term not in (0, self.term)), None)
        if other is not None:
            raise Diverged(
                f"Offsets {self.first} to {self.next - 1} of {url} were planned in term {self.term}, and are of term "
                f"{other} there: a forced promotion or a restored folder lost the others. Plan the read again."
            )
        batches = [batch for batch, _ in found]
        if sum(batch.num_rows for batch in batches) != self.next - self.first:
            raise CorruptData(f"{url} gave other records than offsets {self.first} to {self.next - 1}.")
        return batches


def planned_span(
    log_id: UUID, row: PlannedSpan, urls: tuple[str, ...], ticket: str | None, nodes: NodeChannels
) -> RemoteSpan:
    """The span of a row of a plan; ``urls`` begin with the node that planned it."""
    try:
        fingerprint = fingerprint_of(row.fingerprint)
    except ValueError as error:
        raise CorruptData(f"{urls[0]} planned a span that cannot be read: {error}.") from error
    # No token, in whose place the ticket is sent, but the certificate that the connection needs.
    security = None if nodes.security is None else replace(nodes.security, token=None, reread=None)
    return RemoteSpan(
        urls, log_id, row.first, row.next, row.size, row.term, fingerprint,
        ticket, security, nodes.timeout, nodes.failover_timeout,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _channel(process: int, url: str, security: ClientSecurity | None, timeout: float) -> Channel:
    """The connection that all spans of a node share in this process."""
    del process  # a forked child has connections of its own
    return Channel(url, security=security, timeout=timeout)


def streamed_with_terms(
    channel: Channel, ticket: ReadTicket, schema: pa.Schema, env: Env, *, signed: str | None = None
) -> Iterator[TermBatch]:
    """The batches of a stream as they come, each with the term of its records; 0 from a node of an earlier version."""
    url, encoded = channel.url, encode_ticket(ticket)

    def begin() -> AbstractContextManager[Any]:
        return contextlib.nullcontext(channel.get(encoded, schema, timeout=None, signed=signed))

    def accept(chunk: Any) -> tuple[TermBatch, int] | None:
        part, note = read_part(chunk, url)
        return None if note.flags & Flag.HEARTBEAT or not part.num_rows else ((part, note.term), size_of(part))

    turn = channel.timeout
    receiver = Receiver(begin, accept, url=url, what="reading", silence=turn, env=env)
    with contextlib.closing(receiver):
        while True:
            batches = receiver.take(turn)
            yield from batches
            if not batches and receiver.done:
                return


def resumed_stream(
    nodes: NodeChannels, log_id: UUID, cursor: Cursor, ticket: ReadTicket, env: Env
) -> Iterator[pa.RecordBatch]:
    """The batches from a cursor on, as the ticket asks for them, without a gap and without a record twice.

    ``Diverged`` if the records that it has given are not in the log any more.
    """
    end = ticket.upto
    columns = None if ticket.columns is None else tuple(dict.fromkeys((*ticket.columns, _OFFSET)))
    schema = schema_of_columns(columns)

    def begin(channel: Channel) -> tuple[TermBatch | None, Iterator[TermBatch]]:
        batches = streamed_with_terms(channel, ReadTicket(cursor, end, ticket.follow, columns), schema, env)
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
            waiting = waiting or pauses(nodes.failover_timeout, env.clock)
            pause = next(waiting, 0.0)
            if not pause:
                raise
            env.clock.sleep(pause)
        else:
            return
