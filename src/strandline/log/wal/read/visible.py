"""What an open log shows: the newest from memory, all else from its files, and when there is more."""

from __future__ import annotations

from collections.abc import Iterator

from strandline.log.wal.read.catalog import Catalog
from strandline.log.wal.read.span import some_batches
from strandline.log.wal.read.tail import Held, Tail
from strandline.log.wal.read.watermark import Published, View
from strandline.log.wal.slot_limits import WalKeeping
from strandline.model.batch import LogBatch
from strandline.model.cursor import Cursor


class WalShowing(WalKeeping):
    """What readers in the process of a log's writer see of it. Safe in threads."""

    _catalog: Catalog
    _published: Published
    _tail: Tail
    _unsynced: list[Held]
    """What is written, and not known to be durable."""

    def view(self) -> View:
        """What is durable and retained now."""
        return self._published.view

    def _frames(self, since: int, end: int) -> Iterator[Held]:
        while since < end:
            begins = self._tail.begins()
            if begins is not None and begins <= since:
                for held in self._tail.since(since):
                    if held.first >= end:
                        return
                    yield held
                    since = held.next
            else:
                for frame in self._catalog.frames(since, end if begins is None else min(begins, end)):
                    yield Held(frame)
                    since = frame.next

    def newest(self, since: int, size: int) -> list[LogBatch]:
        """The next few durable batches from the one with an offset on, up to ``size`` bytes, while they are in memory.

        What :meth:`plan` and their spans give, in a fraction of the time: for who follows the log closely. Where it
        gives nothing, they tell why.
        """
        bounds = self.bounds()
        if since < bounds.first:
            return []
        return some_batches((held for held in self._tail.some(since) if held.first < bounds.next), size)

    def ahead(self, since: int, size: int) -> list[LogBatch]:
        """The next few batches, if the first that is being synced is at ``since``: they may get lost.

        For who sends them on to where nothing is done with them before they are durable here.
        """
        frames = self._unsynced
        return some_batches(frames, size) if frames and frames[0].first == since else []

    def wait(self, past: Cursor, timeout: float) -> bool:
        """Block until something past the cursor is durable (True) or the time is over (False); does not poll."""
        return self._published.wait(past.next, timeout)

    def wait_past(self, durable: int, timeout: float, *, written: int | None = None) -> bool:
        """The same for an offset; or until more than ``written`` is at least being synced, if that is given."""
        return self._published.wait(durable, timeout, written=written)
