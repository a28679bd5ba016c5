"""What a primary sends: its log's batches from a position on, as they were written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, final

from strandline.errors import NotReady
from strandline.log.wal.log import WalLog
from strandline.log.wal.read.span import WalSpan, whole_batches
from strandline.model.batch import LogBatch
from strandline.model.cursor import Cursor, Limit
from strandline.model.node import Beat

TAKEN_BYTES: Final = 2 << 20
"""About so much is taken at once."""

_TAKEN: Final = Limit(bytes=TAKEN_BYTES)


class _Found(NamedTuple):
    """What comes next: batches that are in memory, or where they are on the disk."""

    batches: Sequence[LogBatch] = ()
    spans: Sequence[WalSpan] = ()


@final
class LogFeed:
    """The batches of a log in order, up to its durable end. Satisfies :class:`~strandline.node.messages.Feed`.

    Batches in the log's tail are the same for every feed, and copied for none.
    """

    def __init__(
        self,
        log: WalLog,
        since: Cursor,
        beat: Callable[[], Beat],
        sent: Callable[[int], None],
        *,
        is_awaited: Callable[[], bool] = lambda: False,
    ) -> None:
        """From ``since`` on; ``sent`` is told how far it got, ``is_awaited`` whether somebody waits for replicas."""
        self._log = log
        self._at = since
        self._now = beat
        self._sent = sent
        self._is_awaited = is_awaited
        self._beat = beat()
        self._is_ours = False
        self._found: _Found | None = None
        """What the last wait has found, until it is taken."""
        self._closed = False

    @property
    def beat(self) -> Beat:
        """The primary's word as of the last take."""
        return self._beat

    def wait(self, timeout: float) -> int:
        """Wait for what comes next; the next take reads so many bytes of it from the disk, and waits no more."""
        if self._closed:
            raise NotReady("The feed is closed.")
        found = self._next()
        if not any(found) and self._beat.durable >= self._log.bounds().next:
            found = self._wait(timeout)
        self._found = found
        return sum(span.size for span in found.spans if span.cached is None)

    def take(self, timeout: float) -> Sequence[LogBatch]:
        """What comes next, waiting for it no longer than ``timeout`` seconds; empty if nothing did.

        While somebody waits for replicas that is also a little of what is being synced, and then, with nothing, that
        it is durable.
        """
        if self._found is None:
            self.wait(timeout)
        found, self._found = self._found or _Found(), None
        batches = found.batches or whole_batches(found.spans)
        self._beat = self._now()
        if batches:
            self._at = Cursor(self._at.log_id, batches[-1].next, batches[-1].term)
            self._is_ours = True
            self._sent(self._at.next)
        return batches

    def _wait(self, timeout: float) -> _Found:
        log, at, durable = self._log, self._at.next, self._log.bounds().next
        if at == durable:
            if not log.wait_past(at, timeout, written=at):
                return _Found()
            if self._is_awaited() and (batches := log.ahead(at, TAKEN_BYTES)):
                return _Found(batches)
        # What was sent ahead is durable before more of that is sent; and what nobody waits for is in no hurry.
        log.wait_past(min(at, durable), timeout)
        return self._next()

    def _next(self) -> _Found:
        """What is durable and was not taken yet."""
        if self._log.bounds().next <= self._at.next:
            return _Found()
        # A position that this feed has come to by itself is the log's own, and need not be compared with it.
        newest = self._log.newest(self._at.next, TAKEN_BYTES) if self._is_ours else []
        return _Found(newest) if newest else _Found(spans=self._log.plan(self._at, _TAKEN))

    def close(self) -> None:
        """End the feed."""
        self._closed = True
