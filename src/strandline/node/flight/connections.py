"""Watches a server's connections: what each has sent that nobody has dealt with, and how long it keeps calls waiting.

Flight receives a message whole before anything of ours sees it, of whatever size and from whomever. So what is received
is bounded from beside: the kernel counts what comes over each connection, the server says what it has dealt with, and a
connection on which too much is in between is ended.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, final
from urllib.parse import unquote

from strandline.node.flight.limits import ServerLimits, Silence
from strandline.node.flight.sockets import AcceptedConnections, Traffic, address_of, can_watch
from strandline.storage.ambient import CLOCK, Clock

_LOGGER: Final = logging.getLogger(__name__)

_TURN: Final = 0.02
"""For so many seconds nobody looks: a sender that fills a network of 10 Gbit/s sends 25 MB meanwhile."""

REQUEST_BYTES: Final = 512
"""What a call, or a report, takes on the wire beside its content."""

_SLACK: Final = 16 << 20
"""What may be on its way behind the message that is being received."""

_GRACE: Final = 1.0

_SENT_SHARE: Final = 64
"""Who is sent so many bytes sends one, to say that it got them."""

_IDLE_BYTES: Final = 64
"""What an idle connection may send in a second, to say that it is there."""


class Watched(NamedTuple):
    """A connection as it is judged."""

    traffic: Traffic
    pending: int
    """Bytes that were received, and not dealt with."""
    known: bool
    """Whether a call on it was let in: until then nobody knows whose it is."""
    appends: int
    """How many appends are being received on it."""
    grace: bool
    """Whether an append may be on its way that was not begun yet, or was refused and has yet to hear of it."""
    age: float
    stuck: float
    """For so many seconds a call has waited for the other end to read, or to send what it has begun."""
    calls: int


def judge(
    watched: Sequence[Watched], limits: ServerLimits, silence: Silence, *, is_expecting: bool = False
) -> list[tuple[Watched, str]]:
    """The connections to end, and why.

    Which of them a call comes over is known only with its first message. So while calls are let in of which there is
    none yet (``is_expecting``), any connection may be sending an append.

    One that sent too much is ended by itself; if all of them together did, those go first that append nothing, and
    those with most. Strangers beyond their number go, the oldest first.
    """
    ended: dict[tuple[str, int], tuple[Watched, str]] = {}

    def end(each: Watched, why: str) -> None:
        ended.setdefault(each.traffic.peer, (each, why))

    for each in watched:
        if is_expecting and each.pending <= limits.message_bytes + _SLACK:
            pass
        elif not each.known and each.pending > limits.stranger_bytes:
            end(each, f"it sent {each.pending:,} bytes before it said who it is")
        elif each.known and each.pending > _allowance(each, limits):
            end(each, f"it sent {each.pending:,} bytes that belong to no message of a size that is allowed")
        if not each.known and each.age > limits.stranger_seconds:
            end(each, f"it did not say who it is for {each.age:.0f} s")
        elif each.stuck > limits.idle_seconds:
            end(each, f"a call on it kept the node waiting for {each.stuck:.0f} s")
        elif silence is Silence.CROWDED or (silence is Silence.SOME and not each.calls):
            end(each, "calls were begun, on it or on another one, that say nothing")
    # The oldest: who means well has said at once who it is.
    strangers = sorted((each for each in watched if not each.known), key=lambda each: each.age)
    for each in strangers[limits.strangers :]:
        end(each, f"{len(strangers)} connections did not say who they are")
    known = sorted((each for each in watched if each.known), key=lambda each: each.age, reverse=True)
    for each in [*known, *strangers][limits.connections :]:
        end(each, f"{len(watched)} connections are too many")
    # First those that append nothing now: what a refused append has sent counts, though nobody holds it any more.
    left = [each for each in watched if each.traffic.peer not in ended]
    left.sort(key=lambda each: (not each.appends, each.pending))
    total = sum(each.pending for each in left)
    while left and total > limits.receive_bytes:
        most = left.pop()
        total -= most.pending
        end(most, f"it has most of the {total + most.pending:,} bytes that are being received")
    return list(ended.values())


def _allowance(each: Watched, limits: ServerLimits) -> int:
    if each.appends or each.grace:
        return max(1, each.appends) * limits.message_bytes + _SLACK
    return limits.request_bytes


@final
class Connection:
    """What the server knows of one connection. Safe in threads."""

    def __init__(self, clock: Clock) -> None:
        """One that no call has come over yet."""
        self._clock = clock
        self._lock = threading.Lock()
        self.known = False
        self.appends = 0
        self.grace_until = float("-inf")
        """Until then an append may be on its way that was not begun yet, or was refused and has yet to hear of it."""
        self.calls = 0
        self._dealt = self._counted = 0
        """Bytes that were dealt with since they were last counted, and before."""
        self._waiting: dict[int, float] = {}
        """Since when each call waits for the other end."""
        self._next = 0

    def begin(self, size: int) -> None:
        """A call on it was let in, whose request had this size."""
        with self._lock:
            self.known = True
            self.grace_until = self._clock.monotonic() + _GRACE
            self.calls += 1
            self._dealt += size + REQUEST_BYTES

    def end(self) -> None:
        """A call that was let in is over."""
        with self._lock:
            self.calls -= 1

    def dealt_with(self, size: int) -> None:
        """A message of about this size was received, and is not Flight's any more."""
        with self._lock:
            self._dealt += size + REQUEST_BYTES

    def count_dealt(self) -> None:
        """What was dealt with until now counts for the next look."""
        with self._lock:
            self._counted, self._dealt = self._counted + self._dealt, 0

    def take_counted(self) -> int:
        """How much counts for this look."""
        with self._lock:
            counted, self._counted = self._counted, 0
            return counted

    @contextmanager
    def appending(self) -> Iterator[None]:
        """An append is being received, within the block."""
        with self._lock:
            self.appends += 1
        try:
            yield
        finally:
            with self._lock:
                self.appends -= 1
                self.grace_until = self._clock.monotonic() + _GRACE

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The other end is waited for, within the block: to read what it asked for, or to send what it has begun."""
        with self._lock:
            number = self._next = self._next + 1
            self._waiting[number] = self._clock.monotonic()
        try:
            yield
        finally:
            with self._lock:
                del self._waiting[number]

    def stuck(self, now: float) -> float:
        """For how many seconds a call has waited for the other end."""
        with self._lock:
            return max((now - since for since in self._waiting.values()), default=0.0)


class _Counted(NamedTuple):
    since: float
    pending: int
    received: int
    sent: int
    at: float


@final
class Connections:
    """All connections of a server, watched by a thread of their own until they are closed."""

    def __init__(
        self,
        limits: ServerLimits,
        *,
        silence: Callable[[], Silence] = lambda: Silence.NONE,
        is_expecting: Callable[[], bool] = lambda: False,
        clock: Clock = CLOCK,
    ) -> None:
        """``silence`` says whether there are calls which have said nothing for too long, and ``is_expecting`` whether
        there are any which have said nothing yet.
        """
        self._limits = limits
        self._is_expecting = is_expecting
        self._silence = silence
        self._clock = clock
        self._accepted: AcceptedConnections | None = None
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], Connection] = {}
        self._counted: dict[tuple[str, int], _Counted] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.ended = 0
        """How many were ended for what they did."""

    def watch(self, port: int) -> None:
        """Watch those to this port from now on, where the system can."""
        if can_watch():
            self._accepted = AcceptedConnections(port)
            self._thread = threading.Thread(target=self._run, name="strandline-flight-watch", daemon=True)
            self._thread.start()

    def of(self, peer: str) -> Connection:
        """The connection of a call, by what Flight calls the other end: ``ipv4:127.0.0.1:7450``."""
        key = parse_peer(peer)
        with self._lock:
            return self._known.setdefault(key, Connection(self._clock))

    def _run(self) -> None:
        accepted = self._accepted
        while accepted is not None and not self._stop.wait(_TURN):
            try:
                judged = self.judged(accepted.look)
            except OSError as error:  # the process has no descriptor left to look with
                _LOGGER.warning("The connections on port %d cannot be watched now: %s", accepted.port, error)
                continue
            for each, why in judged:
                self.ended += 1
                _LOGGER.warning("The connection of %s port %d was ended: %s.", *each.traffic.peer, why)
                accepted.shut(each.traffic)

    def judged(self, look: Callable[[], Collection[Traffic]]) -> list[tuple[Watched, str]]:
        """Count what came over each; returns which to end, and why."""
        with self._lock:
            known = list(self._known.values())
        # Before the look: what was dealt with until here is among what is counted there.
        for connection in known:
            connection.count_dealt()
        is_expecting = self._is_expecting()
        watched = self._count(look(), self._clock.monotonic())
        # Asked before and after: a call may be let in, or begin, while this looks.
        is_expecting |= self._is_expecting()
        return judge(watched, self._limits, self._silence(), is_expecting=is_expecting)

    def _count(self, found: Collection[Traffic], now: float) -> list[Watched]:
        with self._lock:
            there = {traffic.peer for traffic in found}
            # What the kernel does not tell of any more is over; a call may be quicker than the look at its connection.
            for gone in [peer for peer, known in self._known.items() if peer not in there and not known.calls]:
                self._counted.pop(gone, None)
                del self._known[gone]
            connections = {
                traffic.peer: self._known.setdefault(traffic.peer, Connection(self._clock)) for traffic in found
            }
        watched = []
        for traffic in found:
            connection = connections[traffic.peer]
            before = self._counted.get(traffic.peer) or _Counted(now, 0, 0, 0, now)
            came = traffic.received - before.received
            forgiven = (traffic.sent - before.sent) // _SENT_SHARE + int((now - before.at) * _IDLE_BYTES)
            pending = max(0, before.pending + came - connection.take_counted() - forgiven)
            self._counted[traffic.peer] = _Counted(before.since, pending, traffic.received, traffic.sent, now)
            watched.append(
                Watched(
                    traffic,
                    pending,
                    connection.known,
                    connection.appends,
                    now < connection.grace_until,
                    now - before.since,
                    connection.stuck(now),
                    connection.calls,
                )
            )
        return watched

    def close(self) -> None:
        """Watch no more; closing twice is fine."""
        self._stop.set()


def parse_peer(peer: str) -> tuple[str, int]:
    """Address and port of what gRPC calls the other end.

    >>> parse_peer("ipv4:127.0.0.1:7450"), parse_peer("ipv6:%5B::1%5D:7450")
    (('127.0.0.1', 7450), ('::1', 7450))
    """
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return address_of((host.strip("[]"), port if port.isdecimal() else 0))
