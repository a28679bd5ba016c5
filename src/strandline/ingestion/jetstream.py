"""A stream of NATS JetStream as the source of an ingest."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final, final
from uuid import UUID, uuid5

import pyarrow as pa

from strandline.errors import InvalidInput, NotFound, StorageError, TransientStorageError
from strandline.ingestion.streams import MessageStream, Taken, message_batch
from strandline.kv.nats.connection import NatsConnection
from strandline.kv.nats.feed import MessageFeed, MessagesLost, StreamMessage
from strandline.kv.nats.watch import removal
from strandline.model.addresses import split_address
from strandline.model.arguments import Duration, checked
from strandline.model.cursor import Bounds, microseconds
from strandline.model.records import Op
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import Origin, bound_to_process

_LOGGER: Final = logging.getLogger(__name__)
_NAMESPACE: Final = UUID("0e2f4f3b-6a9a-5f3e-9a41-4f0b8c1d2e33")
_AT_ONCE: Final = 1000
_POLL: Final = 0.5


def parse_nats(address: str) -> tuple[str, str]:
    """Server and stream of an address.

    >>> parse_nats("nats://one:4222/orders")
    ('nats://one:4222', 'orders')
    """
    place = split_address(address)
    stream = place.path.strip("/")
    if not place.netloc or not stream or any(letter in stream for letter in "/.*> \t"):
        raise InvalidInput(f"{address!r} names no stream: write nats://host:port/stream.")
    return f"{place.scheme}://{place.netloc}", stream


@bound_to_process()
@final
class JetStreamSource(MessageStream):
    """A stream, read in order: the subject is the key, the data the value, headers and time are kept.

    A message that marks the removal of a key, written by a client of a bucket or by the server, is a deletion. Of a
    header block that cannot be read whole, the record has the headers that can be; such messages are counted.
    Positions are the stream's sequences. Nothing is acknowledged: an ingest does not change the stream.
    """

    @checked
    def __init__(
        self, address: str, *, config: Mapping[str, Any] | None = None, timeout: Duration = 10.0, env: Env = SYSTEM
    ) -> None:
        """Open ``nats://host:port/stream``; ``config`` are options of the client, such as ``user_credentials``."""
        server, self._stream = parse_nats(address)
        self._env = env
        self._timeout = timeout
        super().__init__()
        self._nats = NatsConnection([server], timeout=timeout, env=env, options=config or {})
        self.name = f"Stream {self._stream}"
        self._feed: MessageFeed | None = None
        self._incarnation = ""
        self._at = -1
        self._broken_upto = 0
        self._early: list[StreamMessage] = []
        """Messages that were read, but not taken yet."""
        try:
            self.bounds()
        except NotFound as error:
            self._nats.close()
            raise NotFound(f"There is no stream {self._stream} at {server}: check its name.") from error
        except BaseException:
            self._nats.close()
            raise
        self._log_id = uuid5(_NAMESPACE, f"{self._nats.cluster}/{self._stream}")
        self._origin = Origin(self.name, self)

    def __repr__(self) -> str:
        return f"JetStreamSource({self._stream!r})"

    @property
    def log_id(self) -> UUID:
        """The identity of the stream, by its name and that of the servers' cluster."""
        return self._log_id

    def bounds(self) -> Bounds:
        """The first retained and the next sequence."""
        state = self._nats.state(self._stream, f"Asking for stream {self._stream}")
        self._incarnation = str(state.identity)
        return Bounds(max(1, state.first), max(1, state.first, state.last + 1))

    def incarnation(self) -> str:
        """When the stream was created, as of the last look at its bounds."""
        return self._incarnation

    def take(self, since: int, *, upto: int, records: int, size: int) -> Taken:
        """The next messages from a sequence on, and the sequence behind them."""
        taken: list[StreamMessage] = []
        bytes_taken = 0
        deadline = self._env.clock.monotonic() + self._timeout
        try:
            if since != self._at:
                self._subscribe(since)
            while len(taken) < records and bytes_taken < size and self._at < upto:
                found = self._early or self._fetched()
                if not found:
                    if taken:
                        break
                    # That no message came in time does not mean that there is none.
                    following = self._nats.next_sequence(self._stream, self._at)
                    if following is None or following >= upto:
                        self._at = upto  # the rest was deleted
                    elif self._env.clock.monotonic() > deadline:
                        raise TransientStorageError(f"NATS sent no message of {self.name} in time: try again.")
                    continue
                self._early = [message for message in found if message.sequence >= upto]
                more = [message for message in found if self._at <= message.sequence < upto]
                taken += more
                bytes_taken += sum(len(message.data) for message in more)
                self._at = upto if self._early else found[-1].sequence + 1
        except StorageError:
            self._at = -1  # start again: the consumer may be gone
            raise
        self._count_broken(taken)
        following = min(self._at, upto)
        is_last = bool(taken) and taken[-1].sequence == following - 1
        mark = f"{taken[-1].sequence}/{_written(taken[-1])}" if is_last else ""
        return Taken(_batch(taken), following, mark)

    def _count_broken(self, taken: list[StreamMessage]) -> None:
        """Count messages with broken headers, each once, even if they are read again."""
        found = [message.sequence for message in taken if message.headers is not None and message.headers.is_broken]
        found = [sequence for sequence in found if sequence >= self._broken_upto]
        if found:
            self._broken_upto = found[-1] + 1
            self.broken_headers += len(found)
            _LOGGER.warning(
                "%s: the headers of %d messages from sequence %d on are broken; their records have those that can be "
                "read.", self.name, len(found), found[0],
            )  # fmt: skip

    def _subscribe(self, since: int) -> None:
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.close()
        self._early = []
        start = {"deliver_policy": "by_start_sequence", "opt_start_seq": since}
        self._feed, self._at = MessageFeed(self._nats, self._stream, [">"], start, window=_AT_ONCE), since

    def _fetched(self) -> list[StreamMessage]:
        """The messages that arrive within a moment."""
        feed = self._feed
        if feed is None:
            return []
        try:
            feed.ready()
            feed.pull()
            if not len(feed):
                feed.wait(_POLL)
            found = feed.next(_AT_ONCE)
            if not found:
                feed.check()
        except MessagesLost:
            self._subscribe(self._at)
            return []
        return found

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._nats.close()


def _written(message: StreamMessage) -> int:
    return microseconds(message.raw.metadata.timestamp)


def _batch(messages: list[StreamMessage]) -> pa.RecordBatch:
    headers = [message.headers for message in messages]
    return message_batch(
        {
            "offset": [message.sequence for message in messages],
            "timestamp": [_written(message) for message in messages],
            "op": [int(removal(each or {}) or Op.PUT) for each in headers],
            "key": [message.subject.encode(errors="surrogateescape") for message in messages],
            "value": [message.data for message in messages],
            "headers": [each.lines if each else None for each in headers],
        }
    )
