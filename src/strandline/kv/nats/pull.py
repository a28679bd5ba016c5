"""A pull consumer of a JetStream stream: its messages in order, and none left out."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from strandline.errors import StorageError

if TYPE_CHECKING:
    from strandline.kv.nats.connection import NatsConnection

_NANOSECONDS: Final = 1_000_000_000
_MESSAGE: Final = "$JS.ACK."
"""How the reply subject of a stream's message begins; answers of the server itself have none."""
_REQUEST_BYTES: Final = 16 << 20
"""Bytes of messages that one request asks for."""
_TOO_LARGE: Final = "409"
_NOTHING_NOW: Final = ("", "404", "408")
"""Statuses without messages, of a consumer that is there; any other is that of one that is gone."""


class PullConsumer:
    """Reads a stream from a sequence on. Nothing is acknowledged, and the stream is not changed. One thread.

    The library has such a consumer, too. It takes a message with a header ``Status`` for an answer of the server, and
    drops it. And messages that a broken connection has swallowed count as delivered: here their numbers show the gap.
    """

    def __init__(self, nats: NatsConnection, stream: str, since: int, *, idle: float) -> None:
        """Create the consumer, which the server removes after ``idle`` seconds without a call."""
        self._nats = nats
        self._what = f"Reading stream {stream}"
        self._inbox = nats.inbox()
        self._subscription = nats.listen_queued(self._inbox)
        config = {
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": since,
            "ack_policy": "none",
            "replay_policy": "instant",
            "inactive_threshold": int(idle * _NANOSECONDS),
        }
        try:
            made = nats.ask(f"CONSUMER.CREATE.{stream}", self._what, {"stream_name": stream, "config": config})
        except BaseException:
            self._unsubscribe()
            raise
        self._name = f"{stream}.{made['name']}"
        self._delivered = 0
        self.has_gap = False
        """Whether messages were lost on their way, or the consumer is gone: another one has to read from there on."""

    def fetch(self, count: int, timeout: float) -> list[Any]:
        """The next messages, up to a gap; none if none came in time."""
        if self.has_gap:
            return []
        arrived, status = self._asked({"batch": count, "max_bytes": _REQUEST_BYTES, "no_wait": True}, timeout)
        if not arrived:
            wait = {"no_wait": True} if status == _TOO_LARGE else {"expires": int(timeout * _NANOSECONDS)}
            arrived, status = self._asked({"batch": 1, **wait}, timeout)
            self.has_gap = not arrived and status not in _NOTHING_NOW
        found = []
        for message in arrived:
            number = int(message.metadata.sequence.consumer)
            if number != self._delivered + 1:
                self.has_gap = True
                break
            self._delivered = number
            found.append(message)
        return found

    def _asked(self, request: dict[str, Any], timeout: float) -> tuple[list[Any], str]:
        """The messages that answer a request, and the status that ends it; that of an earlier one may end it early."""
        return self._nats.pulled(self._subscription, f"CONSUMER.MSG.NEXT.{self._name}", request, self._inbox, timeout)

    def close(self) -> None:
        """Remove the consumer; one that is gone already is fine."""
        self._unsubscribe()
        with contextlib.suppress(StorageError):
            self._nats.ask(f"CONSUMER.DELETE.{self._name}", "Ending a consumer")

    def _unsubscribe(self) -> None:
        with contextlib.suppress(StorageError):
            self._nats.run(self._subscription.unsubscribe(), "Unsubscribing")


def is_message(message: Any) -> bool:
    """Whether this is a message of a stream, and not an answer of the server."""
    return str(message.reply or "").startswith(_MESSAGE)
