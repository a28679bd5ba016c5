"""The lease of a log as one of its nodes uses it: renewals, the leadership under it, checks while it may take over."""

from __future__ import annotations

import logging
import threading
from typing import Final, final

from strandline.errors import Fenced, NotReady, StorageError
from strandline.node.node_folder import NodeFolder
from strandline.storage.lease import Lease

_LOGGER = logging.getLogger(__name__)
_RENEWALS: Final = 3
"""Renewals per lease period."""
_CHECKS: Final = 8
"""Checks of the lease per lease period by a node that may take over."""
_PROMOTION_WAIT: Final = 1.5
"""Lease periods that a promotion waits for the former primary's lease to expire."""


@final
class NodeLease:
    """The lease, and when this node renews or checks it next. Used by one thread at a time."""

    def __init__(self, lease: Lease, node_folder: NodeFolder, stop: threading.Event | None = None) -> None:
        """``stop`` is set when the node is to stop: it waits for the lease no longer."""
        self.lease = lease
        self._stop = threading.Event() if stop is None else stop
        self._node_folder = node_folder
        self._clock = node_folder.env.clock
        self.renewal = 0.0
        """When the next renewal is due, on the clock that counts suspension."""
        self._next_check = 0.0

    def renew(self, now: float) -> str | None:
        """Renew the lease if that is due; returns why this node no longer leads, or None."""
        if now < self.renewal:
            return None
        self.renewal = now + self.lease.seconds / _RENEWALS
        try:
            self.lease.renew()
        except Fenced as error:
            return str(error)
        except StorageError as error:
            self.renewal = now + self.lease.seconds / _CHECKS  # the lease expires if this keeps failing
            _LOGGER.warning("Node %s could not renew its lease: %s", self._node_folder.state.name, error)
        return None

    def begin_check(self) -> float | None:
        """Begin a check of the lease; returns the seconds until the next one, or None if none is due yet."""
        now = self._clock.boot()
        if now < self._next_check:
            return None
        pause = self.lease.seconds / _CHECKS * (0.5 + self._node_folder.env.chance.jitter())
        self._next_check = now + pause
        return pause

    def led_last(self) -> bool:
        """Whether no other node can have led since this one did: its term was the last one."""
        state, own = self.lease.read(), self._node_folder.state
        if state is None:
            # It has just created the log, or copied one.
            return own.generation > 0 and own.seen == own.led and not own.primary
        holder = (state.holder or "").partition(" ")[0]
        if own.generation and holder == own.name and state.epoch == own.led + 1:
            # It acquired the lease, and crashed before it stored that. No other node led in that term.
            own = self._node_folder.remember(led=state.epoch)
        return own.led > 0 and state.epoch == own.led

    def try_acquire(self) -> bool:
        """Acquire the lease in a term above all that this node has seen, unless another node holds it."""
        return self.lease.try_acquire(above=self._node_folder.state.seen)

    def acquire(self) -> None:
        """Acquire the lease, after the former primary's has expired; ``NotReady`` if it is renewed, or to stop."""
        deadline = self._clock.monotonic() + self.lease.seconds * _PROMOTION_WAIT
        while not self.try_acquire():
            if self._clock.monotonic() >= deadline:
                state = self.lease.read()
                holder = None if state is None else state.holder
                raise NotReady(f"The lease is held by {holder} and renewed: stop that node first.")
            self._clock.sleep(self.lease.seconds / _CHECKS)
            if self._stop.is_set():
                raise NotReady(f"{self._node_folder.state.name} stops while it waits for the lease: it does not lead.")

    def primary_url(self) -> str | None:
        """The address of the node that holds the lease; None if none does, or an earlier run of this node."""
        state = self.lease.read()
        holder = None if state is None else state.holder
        if holder is None:
            return None
        name, _, url = holder.partition(" ")
        return None if name == self._node_folder.state.name else url

    def ensure_term(self) -> int:
        """The term of the lease that was just acquired.

        Stored first if no other node led in between: after a crash the node must know that it led. Until then the
        holder of the lease says the same.
        """
        term, own = self.lease.ensure(), self._node_folder.state
        if own.generation and own.led == term - 1:
            self._node_folder.remember(led=term)
        return term


@final
class Leadership:
    """Held while this node is the primary of its term. Ends by itself when the lease expires, and never resumes.

    Without a lease only a higher term ends it.

    No I/O: a lease counts its time from before it was requested, so that no other node holds it at the same time.
    """

    def __init__(self, term: int, lease: Lease | None = None) -> None:
        self.term = term
        self._lease = lease
        self._ended: str | None = None

    def end(self, why: str) -> None:
        """End it for good."""
        if self._ended is None:
            self._ended = why

    @property
    def is_held(self) -> bool:
        """Whether this node leads at this moment."""
        return self._ended is None and (self._lease is None or (self._lease.held() and self._lease.epoch == self.term))

    def check(self, what: str) -> None:
        """``Fenced`` unless this node leads now; ``what`` describes what happened to the write."""
        if self._ended is not None:
            raise Fenced(f"This node is not the primary any more ({self._ended}): {what}. Call the new primary.")
        if not self.is_held:
            raise Fenced(
                f"This node's lease of term {self.term} has run out, so that another node may be the primary: {what}. "
                "Find the primary, and call it."
            )
