"""Monotonic reads over several nodes of a log: no answer is older than an earlier one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar, final
from uuid import UUID

from strandline.errors import Diverged, NotReady
from strandline.model.cursor import Bounds
from strandline.node.flight.client.channel import Channel
from strandline.node.flight.client.node_channels import NodeChannels

T = TypeVar("T")


@final
class MonotonicReads:
    """Reads from the nodes of a log, and remembers the highest bounds that any of them showed. Safe in threads.

    With one address nothing is compared, because a node never shows less than before.
    """

    def __init__(self, nodes: NodeChannels) -> None:
        """Nothing was shown yet."""
        self._nodes = nodes
        self._lock = threading.Lock()
        self.log_id: UUID | None = None
        """The log's identity, once a node has answered."""
        self.first = 0
        """The highest first offset that was shown."""
        self.next = 0
        """The highest end that was shown."""

    def ask(self, call: Callable[[Channel], T], end_of: Callable[[T], int | None], *, waits: bool = True) -> T:
        """Call a node to read from. A node whose log ends before an end that was shown is skipped for the next one.

        Without ``waits`` each node is asked once.
        """
        if self._nodes.is_one:
            return call(self._nodes.all[0])
        shown = self.next

        def checked_call(channel: Channel) -> T:
            found = call(channel)
            end = end_of(found)
            if end is not None and end < shown:
                self._refuse_shorter(channel, end, shown)
            self.show(0, end or 0)
            return found

        return self._nodes.on_reader(checked_call, waits=waits)

    def _refuse_shorter(self, channel: Channel, end: int, shown: int) -> None:
        if self._nodes.is_led_by(channel):
            raise Diverged(
                f"Offsets below {shown} of {self._nodes.url} were readable, and {channel.url}, which leads, ends at "
                f"{end}: a forced promotion or a restored folder lost them. Rebuild everything that has read them, and "
                "open the log again."
            )
        raise NotReady(f"{channel.url} lags: it ends at {end}, and offsets below {shown} were read. Ask another node.")

    def show(self, first: int, end: int) -> None:
        """Note bounds that were shown, or the end of an acknowledged append."""
        with self._lock:
            self.first = max(self.first, first)
            self.next = max(self.next, end)

    def shown(self, log_id: UUID, bounds: Bounds) -> Bounds:
        """The bounds to show for those that a node answered; ``Diverged`` if the node has another log."""
        self.identify(log_id)
        if self._nodes.is_one:
            return bounds
        self.show(bounds.first, bounds.next)
        return Bounds(min(self.first, bounds.next), bounds.next)

    def identify(self, log_id: UUID) -> None:
        """Note the log for which a node answered; ``Diverged`` if an earlier answer was for another log."""
        known = self.log_id
        if not self._nodes.is_one and known is not None and known != log_id:
            raise Diverged(
                f"{self._nodes.url} is log {log_id} now, and was log {known}: it was replaced. Open it again."
            )
        self.log_id = log_id
