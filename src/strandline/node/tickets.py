"""Signed tickets for the spans of a plan, and the keys that the nodes of one log share to sign them.

The primary makes a key, and replicas copy it: a span that one node planned can be read at any other, also after a
failover. The newest key signs. Earlier keys still verify, so that tickets outlast a change of the key.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Final, final
from uuid import UUID

from strandline.errors import CorruptData, Fenced, NotFound, NotReady
from strandline.formats.node.ticket import SpanTicket, decode_keys, encode_keys, sign_ticket, verify_ticket
from strandline.model.cursor import SECOND
from strandline.storage.clock import Chance, Clock
from strandline.storage.disk import Disk, replace_file

_LOGGER: Final = logging.getLogger(__name__)

LIFETIME: Final = 3600.0
"""Default seconds during which the spans of a plan can be read."""

_KEPT: Final = 4
"""Keys that are known at a time."""


@final
class Tickets:
    """Issues and verifies tickets by the keys in one file. Safe in threads."""

    def __init__(self, path: str, *, disk: Disk, clock: Clock, chance: Chance) -> None:
        """Keys in the file at ``path``, which is read when they are first needed."""
        self.seconds = LIFETIME
        """How long a ticket is valid."""
        self._path = path
        self._disk = disk
        self._clock = clock
        self._chance = chance
        self._lock = threading.Lock()
        self._keys: tuple[bytes, ...] | None = None

    def keys(self) -> tuple[bytes, ...]:
        """The known keys, the one that signs first; none on a replica that was not given any yet."""
        with self._lock:
            return self._known()

    def ensure(self) -> None:
        """Durably make a key if there is none: on a primary."""
        with self._lock:
            if not self._known():
                words = (self._chance.uuid().bytes for _ in range(4))
                self._store((hashlib.sha256(b"".join(words)).digest(),))

    def adopt(self, keys: Sequence[bytes]) -> None:
        """Durably take over the keys of the primary; this node's own keys still verify."""
        with self._lock:
            known = self._known()
            merged = tuple(dict.fromkeys((*keys, *known)))[:_KEPT]
            if keys and merged != known:
                self._store(merged)

    def issue(self, log_id: UUID, first: int, upto: int, name: str) -> str | None:
        """The ticket to read offsets ``first`` up to ``upto``, for a caller of this name; None without a key."""
        keys = self.keys()
        if not keys:
            return None
        expires = self._clock.now() + int(self.seconds * SECOND)
        return sign_ticket(SpanTicket(log_id, first, upto, expires, name), keys[0])

    def verify(self, text: str) -> SpanTicket:
        """The content of a ticket; ``Fenced`` if no node of this log signed it so, or it has expired."""
        keys = self.keys()
        if not keys:
            raise NotReady("This node does not know the log's key for tickets yet: ask another node, or ask again.")
        ticket = verify_ticket(text, keys)
        if ticket is None:
            raise Fenced("The ticket was not signed by a node of this log, or was altered: plan the read again.")
        late = self._clock.now() - ticket.expires
        if late >= 0:
            raise Fenced(f"The ticket expired {late // SECOND} s ago: plan the read again.")
        return ticket

    def _known(self) -> tuple[bytes, ...]:
        if self._keys is None:
            self._keys = self._loaded()
        return self._keys

    def _loaded(self) -> tuple[bytes, ...]:
        try:
            return decode_keys(self._disk.read(self._path), self._path)
        except NotFound:
            return ()
        except CorruptData as error:
            _LOGGER.warning("Reads that were planned before are refused: %s", error)
            return ()

    def _store(self, keys: Iterable[bytes]) -> None:
        found = tuple(keys)
        replace_file(self._disk, self._path, encode_keys(found), temporary=f"{self._path}.new")
        self._keys = found
