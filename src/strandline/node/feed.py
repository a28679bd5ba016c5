"""What a primary sends: its log's batches from a position on, as they were written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, final

from strandline.log.wal.log import WalLog
from strandline.log.wal.span import whole_batches
from strandline.model.batch import LogBatch
from strandline.model.cursor import Cursor, Limit
from strandline.model.errors import NotReady
from strandline.node.contract import Beat

TAKEN: Final = Limit(bytes=2 << 20)
"""About so much is taken at once."""


@final
class LogFeed:
    """The batches of a log in order, up to its durable end. Satisfies :class:`~strandline.node.contract.Feed`.

    Batches in the log's tail are the same for every feed, and copied for none.
    """

    def __init__(self, log: WalLog, since: Cursor, beat: Callable[[], Beat], sent: Callable[[int], None]) -> None:
        """From ``since`` on; ``sent`` is told how far it got."""
        self._log = log
        self._at = since
        self._now = beat
        self._sent = sent
        self._beat = beat()
        self._closed = False

    @property
    def beat(self) -> Beat:
        """The primary's word as of the last take."""
        return self._beat

    def take(self, timeout: float) -> Sequence[LogBatch]:
        """What comes next, waiting for it no longer than ``timeout`` seconds; empty if nothing did."""
        if self._closed:
            raise NotReady("The feed is closed.")
        is_there = self._log.view().bounds.next > self._at.next or (timeout > 0 and self._log.wait(self._at, timeout))
        batches = whole_batches(self._log.plan(self._at, TAKEN)) if is_there else []
        self._beat = self._now()
        if batches:
            self._at = Cursor(self._at.log_id, batches[-1].next, batches[-1].term)
            self._sent(self._at.next)
        return batches

    def close(self) -> None:
        """End the feed."""
        self._closed = True
