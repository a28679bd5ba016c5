"""Feed of a primary's log to one replica: its batches in order, unchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, final

from strandline.errors import NotReady
from strandline.log.wal.log import WalLog
from strandline.log.wal.read.span import WalSpan, whole_batches
from strandline.model.cursor import Cursor, Limit
from strandline.model.head import LogBatch
from strandline.model.node import Heartbeat

TAKEN_BYTES: Final = 2 << 20
"""Target size of one take."""

_TAKEN: Final = Limit(bytes=TAKEN_BYTES)


class _Found(NamedTuple):
    """The next batches: in memory, or as spans on the disk."""

    batches: Sequence[LogBatch] = ()
    spans: Sequence[WalSpan] = ()


@final
class LogFeed:
    """The batches of a log in order, up to its durable end. A :class:`~strandline.node.messages.ReplicationFeed`.

    All feeds share the batches in the log's tail without copying them.
    """

    def __init__(
        self,
        log: WalLog,
        since: Cursor,
        heartbeat: Callable[[], Heartbeat],
        sent: Callable[[int], None],
        *,
        is_awaited: Callable[[], bool] = lambda: False,
    ) -> None:
        """From ``since`` on. ``sent`` is called with each position; ``is_awaited`` says whether a commit waits."""
        self._log = log
        self._at = since
        self._now = heartbeat
        self._sent = sent
        self._is_awaited = is_awaited
        self._heartbeat = heartbeat()
        self._is_ours = False
        self._found: _Found | None = None
        """The result of the last wait, until it is taken."""
        self._closed = False

    @property
    def heartbeat(self) -> Heartbeat:
        """The primary's heartbeat as of the last take."""
        return self._heartbeat

    def wait(self, timeout: float) -> int:
        """Wait for the next batches; returns how many bytes the next take reads from the disk."""
        if self._closed:
            raise NotReady("The feed is closed.")
        found = self._next()
        if not any(found) and self._heartbeat.durable >= self._log.bounds().extent:
            found = self._wait(timeout)
        self._found = found
        return sum(span.size for span in found.spans if span.cached is None)

    def take(self, timeout: float) -> Sequence[LogBatch]:
        """The next batches, waiting up to ``timeout`` seconds; empty if none came.

        While a commit waits for replicas, batches are sent while their sync is still running; an empty take then says
        that they are durable.
        """
        if self._found is None:
            self.wait(timeout)
        found, self._found = self._found or _Found(), None
        batches = found.batches or whole_batches(found.spans)
        self._heartbeat = self._now()
        if batches:
            self._at = Cursor(self._at.log_id, batches[-1].next, batches[-1].term)
            self._is_ours = True
            self._sent(self._at.next)
        return batches

    def _wait(self, timeout: float) -> _Found:
        log, at, durable = self._log, self._at.next, self._log.bounds().next
        if log.ended(at):
            log.env.clock.sleep(timeout)  # only the heartbeat may change
            return _Found()
        if at == durable:
            if not log.wait_past(at, timeout, written=at):
                return _Found()
            if self._is_awaited() and (batches := log.ahead(at, TAKEN_BYTES)):
                return _Found(batches)
        # Batches sent ahead must become durable before the next are sent ahead; without a waiting commit none are.
        log.wait_past(min(at, durable), timeout)
        return self._next()

    def _next(self) -> _Found:
        """The durable batches that were not taken yet."""
        if self._log.bounds().next <= self._at.next:
            return _Found()
        # The feed reached this position itself, so it need not be checked against the log.
        newest = self._log.newest(self._at.next, TAKEN_BYTES) if self._is_ours else []
        return _Found(newest) if newest else _Found(spans=self._log.plan(self._at, _TAKEN))

    def close(self) -> None:
        """End the feed."""
        self._closed = True
