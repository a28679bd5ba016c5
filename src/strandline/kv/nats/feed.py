"""The messages of one NATS consumer: pulled, counted, and waited for."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from strandline.errors import InvalidInput, NotFound, StorageError, StrandlineError, TransientStorageError
from strandline.kv.nats.connection import NANOSECONDS, Link

_WINDOW_BYTES: Final = 16 << 20
_HEARTBEAT: Final = 5.0
_EXPIRES: Final = 60.0
_FORGOTTEN_AFTER: Final = 600.0
"""Seconds without a pull after which the server lets go of a consumer whose process is gone."""
_MOST_REFUSALS: Final = 20

# Where a message's reply subject says its number in the stream and its number in the consumer: in the plain form
# $JS.ACK.<stream>.<consumer>.<deliveries>.<sequence>.<number>.<time>.<pending>, and in the one with domain and account.
_PLAIN_TOKENS: Final = 9
_PLAIN: Final = 5
_WITH_DOMAIN: Final = 7


class Message(NamedTuple):
    """A message of the stream."""

    sequence: int
    subject: str
    headers: Mapping[str, str] | None
    data: bytes


class Feed:
    """What a pull consumer delivers, in order and without a hole; ``TransientStorageError`` if any was lost.

    The consumer acknowledges nothing: it counts what it has sent, and what was sent into a lost connection is gone. So
    its numbers are checked, and the server's heartbeats, which tell the last one.
    """

    def __init__(self, link: Link, stream: str, *, window: int) -> None:
        """At most ``window`` messages are under way or wait here. Nothing is asked of the server yet."""
        self._link = link
        self._window = window
        self._clock = link.clock
        self._stream = stream
        self._name = ""
        self._inbox = ""
        self._subscription: Any = None
        self._arrived = threading.Event()
        self._waiting: deque[Any] = deque()
        self._number = 0
        self._heard = 0
        self._heard_before = 0
        self._heard_at = self._clock.monotonic()
        self._generation = link.generation
        self._credit = 0
        self._pulls = 0
        self._pulled_at = 0
        self._refusals = 0
        self._one_by_one = False

    def open(self, name: str, filters: Sequence[str], start: Mapping[str, Any], *, values: bool) -> None:
        """Make the consumer and begin to pull."""
        self._name = name
        self._inbox = self._link.inbox()
        self._subscription = self._link.listen(f"{self._inbox}.*", self._hear, self._arrived.set)
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
        body = {"stream_name": self._stream, "action": "create", "config": config}
        self._link.ask(f"CONSUMER.CREATE.{self._stream}.{name}", f"Watching {self._stream}", body)
        self.pull()

    async def _hear(self, message: Any) -> None:
        self._waiting.append(message)
        self._heard += 1
        if not self._arrived.is_set():
            self._arrived.set()

    # --- pulling ------------------------------------------------------------------------------------------------

    def pull(self) -> None:
        """Ask for more, so that there is always something under way but never more than the window."""
        if self._generation != self._link.generation:  # what a lost connection was asked for is lost with it
            self._generation = self._link.generation
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
        self._link.post(f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._name}", body, f"{self._inbox}.{self._pulls}")

    def next(self, most: int) -> list[Message]:
        """What has arrived, at most so much, without waiting."""
        waiting, number = self._waiting, self._number
        taken: list[Message] = []
        while waiting and len(taken) < most:
            message = waiting.popleft()
            tokens = message.reply.split(".")
            if len(tokens) < _PLAIN_TOKENS:
                self._count(number)
                self._understand(message.headers or {})
                continue
            at = _PLAIN if len(tokens) == _PLAIN_TOKENS else _WITH_DOMAIN
            number += 1
            if int(tokens[at + 1]) != number:
                raise self._lost()
            taken.append(Message(int(tokens[at]), message.subject, message.headers, message.data))
        self._count(number)
        return taken

    def _count(self, number: int) -> None:
        if number != self._number:
            self._refusals = 0
        self._credit -= number - self._number
        self._number = number

    def _understand(self, headers: Mapping[str, str]) -> None:
        """A word of the server about what it was asked for."""
        status, words = headers.get("Status"), str(headers.get("Description", "")).strip()
        if status == "100":  # a heartbeat
            if int(headers.get("Nats-Last-Consumer", 0)) > self._number:
                raise self._lost()
            return
        left = headers.get("Nats-Pending-Messages")
        self._credit = 0 if left is None else self._credit - int(left)
        if status == "408":  # its time is over
            return
        if status == "503" or "Deleted" in words:
            raise Forgotten(f"The server let go of a watch of {self._stream}: resume from the applied cursor.")
        # The next message does not fit into what is left of the bytes that were asked for, or not even into all.
        self._one_by_one = "MaxBytes" in words and self._number <= self._pulled_at
        self._refusals += 1
        if status == "400" or self._refusals > _MOST_REFUSALS:
            raise StorageError(f"NATS refuses to deliver {self._stream}: {status} {words}.")

    def _lost(self) -> TransientStorageError:
        return TransientStorageError(f"Changes of {self._stream} were lost on the way: resume from the applied cursor.")

    # --- waiting ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, timeout: float) -> None:
        """Wait until something has arrived since :meth:`ready`, or the connection has come back."""
        self._clock.wait(self._arrived, timeout)

    def ready(self) -> None:
        """From now on :meth:`wait` ends with what arrives."""
        self._arrived.clear()

    def check(self) -> None:
        """An error if the connection stays lost; if only the server has fallen silent, it is asked again."""
        if self._link.closed:
            raise InvalidInput(f"The bucket was closed under a watch of {self._stream}: connect again.")
        lost = self._link.lost_for()
        if lost > self._link.timeout:
            raise TransientStorageError(
                f"There has been no connection to NATS for {lost:.0f} s: resume the watch of {self._stream} from the "
                "applied cursor."
            )
        now = self._clock.monotonic()
        if self._heard != self._heard_before or lost:
            self._heard_before, self._heard_at = self._heard, now
        if now - self._heard_at < 2.5 * _HEARTBEAT:
            return
        try:
            self._link.ask(f"CONSUMER.INFO.{self._stream}.{self._name}", f"Watching {self._stream}")
        except NotFound as error:
            raise Forgotten(
                f"The server has forgotten a watch of {self._stream}: resume from the applied cursor."
            ) from error
        self._heard_at = now
        self._credit = 0
        self.pull()

    def close(self) -> None:
        """Let go of the consumer, as far as the connection still allows."""
        self._waiting.clear()
        with contextlib.suppress(StrandlineError):
            if self._subscription is not None:
                self._link.unlisten(self._subscription, self._arrived.set)
            self._link.ask(f"CONSUMER.DELETE.{self._stream}.{self._name}", "Closing a watch")


class Forgotten(TransientStorageError):
    """The consumer is gone: the server was started anew, or the bucket was removed."""
