"""A node's log over Arrow Flight, as clients use it."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, final
from uuid import UUID

import pyarrow as pa

from strandline.errors import CorruptData, TransientStorageError
from strandline.formats.json.fields import Fields
from strandline.formats.node.ticket import ReadTicket, encode_ticket
from strandline.formats.node.wire import Flag
from strandline.log import slots as rules
from strandline.log.contract import LogReading
from strandline.log.planning import Gathering, behind
from strandline.log.produce.appending import BATCH_BYTES, BUDGET, LINGER, RETRY_SECONDS, producer_by
from strandline.log.produce.buffer import Limits
from strandline.log.produce.producer import Producer
from strandline.log.reading import HeadPoller, cursor_of
from strandline.log.writers import numbered
from strandline.model.addresses import AddressText
from strandline.model.arguments import Timeout, checked
from strandline.model.cursor import NO_LIMIT, Bounds, Cursor, Limit, Span, Start
from strandline.model.head import WriterId
from strandline.model.json_values import fingerprint_of
from strandline.model.records import RecordSource
from strandline.node.flight.append_stream import AppendCommand, as_messages, write_command
from strandline.node.flight.channel import TIMEOUT, Channel
from strandline.node.flight.errors import asking
from strandline.node.flight.remote_slots import RemoteSlots
from strandline.node.flight.security import ClientSecurity
from strandline.node.flight.stream_receiver import Receiver, read_part, size_of
from strandline.node.flight.streams import read_schema
from strandline.node.lead.policies import CommitPolicy, as_policy
from strandline.node.messages import Commit, NodeStatus, Plan, PlannedSpan, Topology, answer, read_commit
from strandline.storage.clock import CHANCE, CLOCK, Clock
from strandline.storage.closing import Closing
from strandline.storage.fork_check import Origin, bound_to_process

_JOINED_BYTES: Final = 8 << 20
"""A call for more brings nothing: several are made side by side."""


@final
@dataclass(frozen=True, slots=True)
class RemoteSpan:
    """Offsets ``first`` up to ``next`` of a node's log. Picklable: it carries the node's address and the credentials.

    Committed records never change, so that any node of the log serves the same.
    """

    url: str
    log_id: UUID
    first: int
    next: int
    size: int
    term: int
    fingerprint: int
    security: ClientSecurity | None = field(default=None, repr=False)
    timeout: float = TIMEOUT

    def join(self, following: Span) -> RemoteSpan | None:
        """Both in one call, if they are neighbours of the same term and small."""
        size = self.size + following.size
        if not isinstance(following, RemoteSpan) or following.first != self.next or size > _JOINED_BYTES:
            return None
        both = replace(self, next=following.next, size=size, fingerprint=following.fingerprint)
        return both if replace(following, first=self.first, size=size) == both else None

    def fetch(self, columns: Sequence[str] | None = None) -> list[pa.RecordBatch]:
        """Read the span's records with their offsets; ``CursorExpired`` if they were trimmed."""
        schema = read_schema(columns)  # an unknown column is refused here
        channel = _channel(os.getpid(), self.url, self.security, self.timeout)
        ticket = ReadTicket(
            Cursor(self.log_id, self.first), self.next, columns=None if columns is None else tuple(columns)
        )
        batches = list(_streamed(channel, ticket, schema, CLOCK))
        if sum(batch.num_rows for batch in batches) != self.next - self.first:
            raise CorruptData(f"{self.url} gave other records than offsets {self.first} to {self.next - 1}.")
        return batches


@functools.lru_cache(maxsize=16)
def _channel(process: int, url: str, security: ClientSecurity | None, timeout: float) -> Channel:
    """The connection that all spans of a node share in this process."""
    del process  # a forked child has connections of its own
    return Channel(url, security=security, timeout=timeout)


def _streamed(channel: Channel, ticket: ReadTicket, schema: pa.Schema, clock: Clock) -> Iterator[pa.RecordBatch]:
    url, encoded = channel.url, encode_ticket(ticket)

    @contextlib.contextmanager
    def begin() -> Iterator[Any]:
        reader = channel.get(encoded, timeout=None)
        if not reader.schema.equals(schema):
            reader.cancel()
            raise CorruptData(f"{url} streams {str(reader.schema.names)[:200]} instead of {schema.names}.")
        yield reader

    def accept(chunk: Any) -> tuple[pa.RecordBatch, int] | None:
        part, note = read_part(chunk, url)
        return None if note.flags & Flag.HEARTBEAT or not part.num_rows else (part, size_of(part))

    turn = channel.timeout
    receiver = Receiver(begin, accept, url=url, what="reading", silence=turn, clock=clock)
    with contextlib.closing(receiver):
        while True:
            batches = receiver.take(turn)
            yield from batches
            if not batches and receiver.done:
                return


@bound_to_process()
@final
@checked
class RemoteLog(LogReading, Closing):
    """A log on a node: append to it on its primary, and read it anywhere up to what is committed. Safe in threads.

    Satisfies :class:`~strandline.log.contract.Log`.
    """

    def __init__(
        self,
        url: AddressText,
        *,
        security: ClientSecurity | None = None,
        timeout: float = TIMEOUT,
        clock: Clock = CLOCK,
    ) -> None:
        """For the node at ``grpc://host:port`` or ``grpc+tls://host:port``; connects when it is first used."""
        self._channel = Channel(url, security=security, timeout=timeout)
        self._security = security
        self._clock = clock
        self._waiter = HeadPoller()
        self._log_id: UUID | None = None
        self._origin = Origin(f"The remote log {url}", self)

    @property
    def url(self) -> str:
        """The node's address."""
        return self._channel.url

    def __repr__(self) -> str:
        return f"RemoteLog({self.url!r})"

    def append(
        self,
        batch: RecordSource,
        *,
        writer: WriterId | None = None,
        number: int | None = None,
        expect: int | None = None,
        policy: str | CommitPolicy | None = None,
        timeout: float = 5.0,
    ) -> Commit:
        """Append a batch, whole or not at all, and wait up to ``timeout`` seconds for its policy.

        The same writer and number again is a no-op. With ``expect``, ``ExpectationFailed`` unless the log ends exactly
        there. ``TransientStorageError`` if no answer came: the records may be appended or not, and only a numbered
        append can be repeated without doubt.
        """
        url = self.url
        table = pa.Table.from_batches([batch]) if isinstance(batch, pa.RecordBatch) else batch
        command = write_command(AppendCommand(numbered(writer, number), as_policy(policy), timeout, expect))
        with asking(url, "an append"):
            data = self._channel.put(command, as_messages(table), table.schema, timeout + self._channel.timeout)
        if data is None:
            raise TransientStorageError(f"{url} did not answer an append: the records may be appended or not.")
        return read_commit(answer(data, url))

    def producer(
        self,
        *,
        writer: WriterId | None = None,
        batch_bytes: int = BATCH_BYTES,
        linger: float = LINGER,
        budget: int = BUDGET,
        block: bool = True,
        retry_seconds: float = RETRY_SECONDS,
    ) -> Producer:
        """A producer with a writer id of its own, or the given one, which then continues after its last number.

        Its records are listed when the commit policy of the primary is satisfied. A batch whose answer was lost, that
        waits for the policy, or that no primary takes now is sent again, under the same number, for ``retry_seconds``;
        then its handles raise the reason.
        """
        return producer_by(
            self.append,
            Limits(batch_bytes, linger, budget, block, uploads=1),
            writer=writer,
            last_number=self.last_number,
            clock=self._clock,
            chance=CHANCE,
            retry_seconds=retry_seconds,
        )

    def last_number(self, writer: WriterId) -> int | None:
        """The number of the writer's last append, as the primary knows; None if it does not know the writer."""
        return self._ask("last-number", writer=writer).maybe_natural("number")

    def read(
        self,
        since: Start | None = None,
        *,
        follow: bool = False,
        upto: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Batches with offsets, in order, from ``since`` (all that is retained) up to ``upto`` (the end as of now).

        ``since`` is an offset, a cursor, a time or a word: ``"beginning"``, ``"retained"`` or ``"now"``. With
        ``follow`` the stream goes on without an end. Raises as the node does, ``TransientStorageError`` if the
        connection broke: go on behind the last offset.
        """
        schema = read_schema(columns)
        cursor = None if since is None else cursor_of(self, since)
        ticket = ReadTicket(cursor, upto, follow, None if columns is None else tuple(columns))
        return _streamed(self._channel, ticket, schema, self._clock)

    def _ask(self, action: str, timeout: float | None = None, **fields: Any) -> Fields:
        return answer(self._channel.ask(action, fields, timeout=timeout), self.url)

    def bounds(self) -> Bounds:
        """The first retained and the next offset that readers see."""
        return self._look()[1]

    def _look(self) -> tuple[UUID, Bounds]:
        fields = self._ask("bounds")
        self._log_id = fields.uuid("log_id")
        return self._log_id, Bounds(fields.natural("first"), fields.natural("next"))

    @property
    def log_id(self) -> UUID:
        """The log's identity; asks the node once."""
        return self._look()[0] if self._log_id is None else self._log_id

    def end(self) -> Cursor:
        """The cursor at the end that readers see now."""
        log_id, bounds = self._look()
        return Cursor(log_id, bounds.next)

    def cursor_at(self, offset: int) -> Cursor:
        """The cursor at ``offset``, with term and fingerprint as far as the node still holds the record before it."""
        return self._ask("cursor-at", offset=offset).cursor("cursor")

    def position_of(self, start: Start) -> int:
        """The offset of a start; whether it is retained is not checked."""
        log_id, bounds = self._look()
        return rules.position_of(
            start, log_id, bounds, lambda time: self._ask("offset-at", time=time).natural("offset")
        )

    def plan(self, since: Cursor, limit: Limit = NO_LIMIT) -> Sequence[RemoteSpan]:
        """The spans after a cursor, in order and without a hole; any process can fetch them from the node."""
        planned: Gathering[RemoteSpan] = Gathering(limit)
        while True:
            rest = planned.rest
            found = self._ask(
                "plan", since=since, records=rest.records, bytes=rest.bytes, batches=rest.batches, upto=rest.upto
            ).record(Plan)
            spans = [self._span(since, row) for row in found.spans]
            if not planned.add(spans) or planned.is_full or found.is_whole or not spans:
                return planned.spans
            since = behind(since, spans[-1])

    def _span(self, since: Cursor, row: PlannedSpan) -> RemoteSpan:
        try:
            fingerprint = fingerprint_of(row.fingerprint) or 0
        except ValueError as error:
            raise CorruptData(f"{self.url} planned a span that cannot be read: {error}.") from error
        return RemoteSpan(
            self.url, since.log_id, row.first, row.next, row.size, row.term, fingerprint,
            self._security, self._channel.timeout,
        )  # fmt: skip

    def wait(self, past: Cursor, timeout: Timeout) -> bool:
        """Block until there is a record to read past the cursor (True), or until the timeout (False); polls."""
        return self._waiter.wait(self, past, timeout, self._clock)

    @property
    def slots(self) -> RemoteSlots:
        """The slots of consumers, which the primary has; ``NotReady`` on a node that does not lead."""
        return RemoteSlots(self._channel)

    def topology(self) -> Topology:
        """The replicas of the log with their offsets."""
        return self._ask("topology").record(Topology)

    def promote(self, *, force: bool = False, timeout: float = 60.0) -> Topology:
        """Make this node the primary, if nothing committed can be lost by that."""
        return self._ask("promote", timeout, force=force).record(Topology)

    def status(self) -> NodeStatus:
        """Role, position and health of this node."""
        return self._ask("status").record(NodeStatus)

    def rebootstrap(self) -> None:
        """Tell this node, a replica, to rebuild its copy of the log."""
        self._channel.call("rebootstrap", {})

    def unregister(self, replica: str, *, keep_slot: bool = False) -> None:
        """Tell this node, the primary, to unregister a replica; an unknown one is fine."""
        self._channel.call("unregister", {"name": replica, "term": 0, "keep_slot": keep_slot})

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._channel.close()
