"""Pull consumer of a NATS stream: pulls messages, checks their numbers, and waits for them."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from strandline.errors import InvalidInput, NotFound, StorageError, StrandlineError, TransientStorageError
from strandline.kv.nats.connection import NANOSECONDS, MessageHeaders, NatsConnection

_WINDOW_BYTES: Final = 16 << 20
_HEARTBEAT: Final = 5.0
_EXPIRES: Final = 60.0
_FORGOTTEN_AFTER: Final = 600.0
"""Seconds without a pull after which the server removes the consumer."""
_MOST_REFUSALS: Final = 20

# Position of the stream sequence, then the consumer sequence, in a message's reply subject: in the plain form
# $JS.ACK.<stream>.<consumer>.<deliveries>.<sequence>.<number>.<time>.<pending>, and in that with domain and account.
_PLAIN_TOKENS: Final = 9
_PLAIN: Final = 5
_WITH_DOMAIN: Final = 7


class StreamMessage(NamedTuple):
    """A message of the stream."""

    sequence: int
    subject: str
    headers: MessageHeaders | None
    data: bytes
    raw: Any
    """The library's message."""


class MessageFeed:
    """The messages of a pull consumer, in order and without a gap; ``MessagesLost`` if one was lost.

    The consumer has no acknowledgements: messages sent into a lost connection are lost. So the consumer sequence of
    each message is checked, and that in the server's heartbeats. The library has such a consumer, too. It takes a
    message with a header ``Status`` for an answer of the server, and drops it.
    """

    def __init__(
        self,
        connection: NatsConnection,
        stream: str,
        filters: Sequence[str],
        start: Mapping[str, Any],
        *,
        window: int,
        values: bool = True,
    ) -> None:
        """Create the consumer and start to pull; at most ``window`` messages are in flight or queued."""
        self._connection = connection
        self._window = window
        self._clock = connection.env.clock
        self._stream = stream
        self._name = name = connection.env.chance.uuid().hex
        self._arrived = threading.Event()
        self._waiting: deque[Any] = deque()
        self._number = 0
        self._received = 0
        self._received_before = 0
        self._received_at = self._clock.monotonic()
        self._generation = connection.generation
        self._credit = 0
        self._pulls = 0
        self._pulled_at = 0
        self._refusals = 0
        self._one_by_one = False
        self._inbox = connection.inbox()
        self._subscription = connection.listen(f"{self._inbox}.*", self._receive, self._arrived.set)
        config = {
            **start,
            "name": name,
            "filter_subjects": list(filters),
            "ack_policy": "none",
            "mem_storage": True,
            "num_replicas": 1,
            "headers_only": not values,
            "inactive_threshold": int(_FORGOTTEN_AFTER * NANOSECONDS),
        }
        body = {"stream_name": stream, "action": "create", "config": config}
        try:
            connection.ask(f"CONSUMER.CREATE.{stream}.{name}", f"Watching {stream}", body)
            self.pull()
        except BaseException:
            self.close()
            raise

    async def _receive(self, message: Any) -> None:
        self._waiting.append(message)
        self._received += 1
        if not self._arrived.is_set():
            self._arrived.set()

    def pull(self) -> None:
        """Pull more messages, up to the window."""
        if self._generation != self._connection.generation:  # pulls are lost with their connection
            self._generation = self._connection.generation
            self._credit = 0
        room = self._window - max(0, self._credit) - len(self._waiting)
        if room <= 0 or (self._credit > 0 and room < self._window // 2):
            return
        body: dict[str, Any] = {
            "batch": room,
            "max_bytes": _WINDOW_BYTES,
            "expires": int(_EXPIRES * NANOSECONDS),
            "idle_heartbeat": int(_HEARTBEAT * NANOSECONDS),
        }
        if self._one_by_one:
            body["batch"] = 1
            del body["max_bytes"]
            self._one_by_one = False
        self._pulls += 1
        self._pulled_at = self._number + len(self._waiting)
        self._credit = max(0, self._credit) + body["batch"]
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._name}"
        self._connection.post(subject, body, f"{self._inbox}.{self._pulls}")

    def next(self, most: int) -> list[StreamMessage]:
        """The received messages, up to ``most``, without waiting."""
        waiting, number = self._waiting, self._number
        taken: list[StreamMessage] = []
        while waiting and len(taken) < most:
            message = waiting.popleft()
            tokens = message.reply.split(".")
            if len(tokens) < _PLAIN_TOKENS:
                self._count(number)
                self._handle_status(message.headers or {})
                continue
            at = _PLAIN if len(tokens) == _PLAIN_TOKENS else _WITH_DOMAIN
            number += 1
            if int(tokens[at + 1]) != number:
                raise self._lost()
            taken.append(StreamMessage(int(tokens[at]), message.subject, message.headers, message.data, message))
        self._count(number)
        return taken

    def _count(self, number: int) -> None:
        if number != self._number:
            self._refusals = 0
        self._credit -= number - self._number
        self._number = number

    def _handle_status(self, headers: Mapping[str, str]) -> None:
        status, words = headers.get("Status"), str(headers.get("Description", "")).strip()
        if status == "100":  # a heartbeat
            if int(headers.get("Nats-Last-Consumer", 0)) > self._number:
                raise self._lost()
            return
        left = headers.get("Nats-Pending-Messages")
        self._credit = 0 if left is None else self._credit - int(left)
        if status == "408":  # the pull expired
            return
        if status == "503" or "Deleted" in words:
            raise ConsumerLost(
                f"NATS removed the consumer of a watch of {self._stream}: resume from the applied cursor."
            )
        # The next message exceeds the remaining bytes of the pull, or the whole pull.
        self._one_by_one = "MaxBytes" in words and self._number <= self._pulled_at
        self._refusals += 1
        if status == "400" or self._refusals > _MOST_REFUSALS:
            raise StorageError(f"NATS refuses to deliver {self._stream}: {status} {words}.")

    def _lost(self) -> MessagesLost:
        return MessagesLost(f"Changes of {self._stream} were lost on the way: resume from the applied cursor.")

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, timeout: float) -> None:
        """Wait until a message has arrived since :meth:`ready`, or the connection is back."""
        self._clock.wait(self._arrived, timeout)

    def ready(self) -> None:
        """Reset :meth:`wait`."""
        self._arrived.clear()

    def check(self) -> None:
        """Raise if the connection stays lost; after missed heartbeats, check the consumer and pull again."""
        if self._connection.closed:
            raise InvalidInput(f"The bucket was closed under a watch of {self._stream}: connect again.")
        lost = self._connection.lost_for()
        if lost > self._connection.timeout:
            raise TransientStorageError(
                f"There has been no connection to NATS for {lost:.0f} s: resume the watch of {self._stream} from the "
                "applied cursor."
            )
        now = self._clock.monotonic()
        if self._received != self._received_before or lost:
            self._received_before, self._received_at = self._received, now
        if now - self._received_at < 2.5 * _HEARTBEAT:
            return
        try:
            self._connection.ask(f"CONSUMER.INFO.{self._stream}.{self._name}", f"Watching {self._stream}")
        except NotFound as error:
            raise ConsumerLost(
                f"The server has no consumer any more for a watch of {self._stream}: resume from the applied cursor."
            ) from error
        self._received_at = now
        self._credit = 0
        self.pull()

    def close(self) -> None:
        """Delete the consumer, if the connection still allows."""
        self._waiting.clear()
        with contextlib.suppress(StrandlineError):
            self._connection.unlisten(self._subscription, self._arrived.set)
            self._connection.ask(f"CONSUMER.DELETE.{self._stream}.{self._name}", "Closing a watch")


class MessagesLost(TransientStorageError):
    """Messages were lost on the way: another consumer has to read from there on."""


class ConsumerLost(MessagesLost):
    """The consumer is gone: the server was restarted, or the bucket was deleted."""
