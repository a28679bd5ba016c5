"""Connections of callers that have not authenticated: how many, and for how long."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Final, final

from strandline.node.flight.server.limits import ServerLimits
from strandline.storage.connections import connections_at, end_connection, network_of
from strandline.storage.env import Env

_LOGGER: Final = logging.getLogger(__name__)


def superfluous(unknown: Mapping[str, float], limits: ServerLimits, now: float) -> list[str]:
    """The connections to end, of those without an admitted call, given when each was first seen.

    If there are too many, the networks with the most lose their oldest: a caller with credentials sends its first call
    at once, and many callers may share one address (NAT, a load balancer).
    """
    ranked: list[tuple[int, str]] = []
    each: Counter[str] = Counter()
    for peer, since in sorted(unknown.items(), key=lambda item: item[1], reverse=True):
        if now - since < limits.authenticate_seconds:
            ranked.append((each[network_of(peer)], peer))
            each[network_of(peer)] += 1
    ranked.sort(key=lambda item: item[0])  # stable: of equal rank, the newest first
    kept = {peer for _, peer in ranked[: limits.connections_unknown]}
    return [peer for peer in unknown if peer not in kept]


@final
class ConnectionGuard:
    """Ends connections that no admitted call has used. Safe in threads.

    The gRPC library counts connections, and neither shows them nor who they are from: this looks at the sockets of the
    process a few times a second.
    """

    def __init__(self, limits: ServerLimits, *, env: Env) -> None:
        self._limits = limits
        self._clock = env.clock
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._since: dict[str, float] = {}

    def admitted(self, peer: str) -> None:
        """Note that a call over this connection was admitted."""
        with self._lock:
            self._known.add(peer)

    def judge(self, peers: Iterable[str], known: set[str]) -> list[str]:
        """The connections to end, of all open ones; ``known`` are those of admitted calls before these were listed."""
        now, found = self._clock.monotonic(), set(peers)
        with self._lock:
            self._known -= known - found  # they are closed; a later one is in neither set
            unknown = found - self._known
            self._since = {peer: self._since.get(peer, now) for peer in unknown}
            return superfluous(self._since, self._limits, now)

    def end_unknown(self, port: int, hosts: Collection[str] = ()) -> None:
        """End the superfluous connections at a port of this process, of these own addresses."""
        with self._lock:
            known = set(self._known)
        try:
            found = connections_at(port, hosts)
        except OSError as error:  # without a list nobody is judged: all would seem closed
            _LOGGER.info("The connections of the node cannot be listed now: %s.", error)
            return
        ended = self.judge(found, known)
        for peer in ended:
            end_connection(peer, found[peer])
        if ended:
            _LOGGER.info("%d connections without an admitted call were ended.", len(ended))
