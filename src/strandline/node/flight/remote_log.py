"""A node's log over Arrow Flight, as clients use it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, final
from uuid import UUID

import pyarrow as pa

from strandline.errors import CorruptData, TransientStorageError
from strandline.formats.json.fields import Fields
from strandline.formats.node.ticket import ReadTicket, encode_ticket
from strandline.formats.node.wire import Flag
from strandline.log.writers import numbered
from strandline.model.addresses import AddressText
from strandline.model.arguments import checked
from strandline.model.cursor import Bounds, Cursor
from strandline.model.head import WriterId
from strandline.model.records import RecordSource
from strandline.node.flight.append_stream import AppendCommand, as_messages, write_command
from strandline.node.flight.channel import TIMEOUT, Channel
from strandline.node.flight.errors import asking
from strandline.node.flight.security import ClientSecurity
from strandline.node.flight.stream_receiver import Receiver, read_part, size_of
from strandline.node.flight.streams import read_schema
from strandline.node.lead.policies import CommitPolicy, as_policy
from strandline.node.messages import Commit, NodeStatus, Topology, answer, read_commit
from strandline.storage.clock import CLOCK, Clock
from strandline.storage.closing import Closing
from strandline.storage.fork_check import Origin, bound_to_process


@bound_to_process()
@final
@checked
class RemoteLog(Closing):
    """A log on a node: append on its primary, read on any node up to the commit watermark. Safe in threads."""

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
        self._clock = clock
        self._origin = Origin(f"The remote log {url}", self)

    @property
    def url(self) -> str:
        """The node's address."""
        return self._channel.url

    def __repr__(self) -> str:
        return f"RemoteLog({self.url!r})"

    def append(
        self,
        records: RecordSource,
        *,
        writer: WriterId | None = None,
        number: int | None = None,
        policy: str | CommitPolicy | None = None,
        timeout: float = 5.0,
    ) -> Commit:
        """Append a batch, whole or not at all, and wait up to ``timeout`` seconds for its policy.

        The same writer and number again is a no-op. ``TransientStorageError`` if no answer arrived: the records may be
        appended or not, and only a numbered append can safely be repeated.
        """
        url = self.url
        table = pa.Table.from_batches([records]) if isinstance(records, pa.RecordBatch) else records
        command = write_command(AppendCommand(numbered(writer, number), as_policy(policy), timeout))
        with asking(url, "an append"):
            data = self._channel.put(command, as_messages(table), table.schema, timeout + self._channel.timeout)
        if data is None:
            raise TransientStorageError(f"{url} did not answer an append: the records may be appended or not.")
        return read_commit(answer(data, url))

    def read(
        self,
        since: Cursor | None = None,
        *,
        follow: bool = False,
        upto: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Batches with offsets from a cursor (or the beginning) up to the watermark; with ``follow``, without an end.

        Raises the node's errors, and ``TransientStorageError`` if the connection broke: resume behind the last offset.
        """
        url = self.url
        schema = read_schema(columns)
        ticket = encode_ticket(ReadTicket(since, upto, follow, None if columns is None else tuple(columns)))

        @contextlib.contextmanager
        def begin() -> Iterator[Any]:
            reader = self._channel.get(ticket, timeout=None)
            if not reader.schema.equals(schema):
                reader.cancel()
                raise CorruptData(f"{url} streams {str(reader.schema.names)[:200]} instead of {schema.names}.")
            yield reader

        def accept(chunk: Any) -> tuple[pa.RecordBatch, int] | None:
            part, note = read_part(chunk, url)
            return None if note.flags & Flag.HEARTBEAT or not part.num_rows else (part, size_of(part))

        turn = self._channel.timeout
        receiver = Receiver(begin, accept, url=url, what="reading", silence=turn, clock=self._clock)
        with contextlib.closing(receiver):
            while True:
                batches = receiver.take(turn)
                yield from batches
                if not batches and receiver.done:
                    return

    def _ask(self, action: str, timeout: float | None = None, **fields: Any) -> Fields:
        return answer(self._channel.ask(action, fields, timeout=timeout), self.url)

    def bounds(self) -> Bounds:
        """The first retained and the next offset that readers see."""
        fields = self._ask("bounds")
        return Bounds(fields.natural("first"), fields.natural("next"))

    @property
    def log_id(self) -> UUID:
        """The log's identity; asks the node."""
        return self._ask("bounds").uuid("log_id")

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
