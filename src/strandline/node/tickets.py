"""Signed tickets for the spans of a plan, and the keys that the nodes of one log share to sign them.

A primary makes a new key when it begins to lead, when a replica is unregistered, and on demand; its registered replicas
copy it. A span that one node planned can be read at any other, also after a failover. The first key signs. Former keys
verify for as long as a ticket is valid: a node that was removed knows them.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, final
from uuid import UUID

from strandline.errors import CorruptData, Fenced, NotFound, NotReady
from strandline.formats.node.ticket import (
    SpanTicket,
    TicketKey,
    decode_keys,
    encode_keys,
    sign_ticket,
    verify_ticket,
)
from strandline.model.cursor import SECOND
from strandline.storage.disk import replace_file
from strandline.storage.env import Env

_LOGGER: Final = logging.getLogger(__name__)

LIFETIME: Final = 3600.0
"""Default seconds during which the spans of a plan can be read."""

_SKEW: Final = 300.0
"""Most seconds by which the clock of the node that signed a ticket may be ahead; at most the lifetime of a ticket."""

_KEPT: Final = 32
"""Most keys that are known at a time."""


def rotated(known: Sequence[TicketKey], key: bytes, *, now: int, lifetime: int) -> tuple[TicketKey, ...]:
    """The keys after a new one was made: the former ones verify until the last ticket that they signed expires."""
    return (TicketKey(key), *_former(known, now=now, lifetime=lifetime))[:_KEPT]


def adopted(
    known: Sequence[TicketKey], listed: Sequence[TicketKey], *, now: int, lifetime: int
) -> tuple[TicketKey, ...]:
    """The keys of a replica whose primary lists these, the one that signs first.

    A former key is never prolonged: what the primary lists keeps its time here, also when that has passed.
    """
    signing, *others = listed
    times = {each.key: each.until for each in known}
    until = now + lifetime
    former = [
        TicketKey(each.key, min(time for time in (each.until, times.get(each.key), until) if time is not None))
        for each in others
    ]
    names = {each.key for each in listed}
    unlisted = _former([each for each in known if each.key not in names], now=now, lifetime=lifetime)
    return (TicketKey(signing.key), *former, *unlisted)[:_KEPT]


def _former(known: Sequence[TicketKey], *, now: int, lifetime: int) -> list[TicketKey]:
    timed = (each if each.until is not None else replace(each, until=now + lifetime) for each in known)
    return [each for each in timed if each.until is not None and each.until > now]


@final
class Tickets:
    """Issues and verifies tickets by the keys in one file. Safe in threads."""

    def __init__(self, path: str, *, env: Env) -> None:
        """Keys in the file at ``path``, which is read when they are first needed."""
        self.seconds = LIFETIME
        """How long a ticket is valid."""
        self._path = path
        self._env = env
        self._lock = threading.Lock()
        self._keys: tuple[TicketKey, ...] | None = None

    def keys(self) -> tuple[TicketKey, ...]:
        """The valid keys, the one that signs first; none on a replica that was not given any yet."""
        now = self._env.clock.now()
        latest = now + self._lifetime
        with self._lock:
            known = self._known()
            # A key that was rotated while the clock was ahead would verify until that time comes. One that has ended
            # is removed for good: it would verify again after the clock went back.
            timed = tuple(
                replace(each, until=latest) if (each.until or 0) > latest else each
                for each in known
                if each.until is None or each.until > now
            )
            if timed != known:
                self._store(timed)
            return timed

    def rotate(self) -> None:
        """Durably make a key that signs from now on; for a primary. Former keys verify for a ticket's lifetime."""
        words = (self._env.chance.uuid().bytes for _ in range(4))
        key = hashlib.sha256(b"".join(words)).digest()
        with self._lock:
            self._store(rotated(self._known(), key, now=self._env.clock.now(), lifetime=self._lifetime))

    def adopt(self, keys: Sequence[TicketKey]) -> None:
        """Durably take over the keys of the primary; this node's own verify for a ticket's lifetime."""
        with self._lock:
            known = self._known()
            merged = adopted(known, keys, now=self._env.clock.now(), lifetime=self._lifetime) if keys else known
            if merged != known:
                self._store(merged)

    def issue(self, log_id: UUID, first: int, upto: int, name: str) -> str | None:
        """The ticket to read offsets ``first`` up to ``upto``, for a caller of this name; None without a key."""
        keys = self.keys()
        if not keys:
            return None
        return sign_ticket(SpanTicket(log_id, first, upto, self._env.clock.now() + self._lifetime, name), keys[0].key)

    def verify(self, text: str) -> SpanTicket:
        """The content of a ticket; ``Fenced`` if no node of this log signed it so, or it is not valid now."""
        keys = self.keys()
        if not keys:
            raise NotReady("This node does not know the log's key for tickets yet: ask another node, or ask again.")
        ticket = verify_ticket(text, [each.key for each in keys])
        if ticket is None:
            raise Fenced(
                "The ticket was not signed by a node of this log, or was altered, or its key was replaced: plan the "
                "read again."
            )
        late = self._env.clock.now() - ticket.expires
        if late >= 0:
            raise Fenced(f"The ticket expired {late // SECOND} s ago: plan the read again.")
        if -late > self._lifetime + min(self._lifetime, int(_SKEW * SECOND)):
            raise Fenced(
                f"The ticket is valid for another {-late // SECOND} s, but this node accepts {self.seconds:g} s: plan "
                "the read again, and compare the clocks and the ticket_seconds of the nodes."
            )
        return ticket

    @property
    def _lifetime(self) -> int:
        return int(self.seconds * SECOND)

    def _known(self) -> tuple[TicketKey, ...]:
        if self._keys is None:
            stored: tuple[TicketKey, ...] = ()
            try:
                stored = decode_keys(self._env.disk.read(self._path), self._path)
            except NotFound:
                pass
            except CorruptData as error:
                _LOGGER.warning("Reads that were planned before are refused: %s", error)
            # Of an earlier version former keys have no time yet.
            former = _former(stored[1:], now=self._env.clock.now(), lifetime=self._lifetime)
            self._keys = (*stored[:1], *former)
            if self._keys != stored:
                self._store(self._keys)
        return self._keys

    def _store(self, keys: tuple[TicketKey, ...]) -> None:
        replace_file(self._env.disk, self._path, encode_keys(keys), temporary=f"{self._path}.new")
        self._keys = keys
