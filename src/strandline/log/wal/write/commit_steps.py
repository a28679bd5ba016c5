"""The two steps of a group commit: write the frames; sync and publish them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from strandline.log.wal.read.span import Tail, WalSpan
from strandline.log.wal.read.watermark import Published
from strandline.log.wal.write.groups import Item
from strandline.log.wal.write.journal import Journal, WrittenGroup
from strandline.storage.env import Env
from strandline.storage.metrics import BATCHES_WRITTEN, BYTES_WRITTEN, COMMIT_SECONDS, RECORDS_WRITTEN


class CommitSteps:
    """Called by the committing thread only, :meth:`write` and then :meth:`finish` for each group; each may raise."""

    def __init__(
        self,
        journal: Journal,
        tail: Tail,
        published: Published,
        *,
        durable: Callable[[int], object] | None,
        env: Env,
    ) -> None:
        """``durable`` is called with each new durable end, before readers see it."""
        self._journal = journal
        self._tail = tail
        self._published = published
        self._durable = durable
        self._clock = env.clock
        self.unsynced: list[WalSpan] = []
        """Frames that are written, but not known to be durable."""

    def write(self, items: Sequence[Item]) -> WrittenGroup:
        """Write a group's frames; not durable yet."""
        written = self._journal.write(items)
        self.unsynced = written.held
        # Before the sync: the woken threads run during it.
        self._published.wrote(written.held[-1].next)
        return written

    def finish(self, written: WrittenGroup) -> None:
        """Sync the frames, and move the watermark past them."""
        held = written.held
        self._journal.sync()
        if self._durable is not None:
            self._durable(held[-1].next)
        self._journal.settle(written)
        # First the frames, then the end: a reader that sees the end finds the frames.
        self._tail.add(held)
        place = self._journal.place
        self._published.advance(upto=place.next, active=place.first, term=place.term)
        self.unsynced = []
        COMMIT_SECONDS.observe(self._clock.monotonic() - written.begun)
        BATCHES_WRITTEN.inc(len(held))
        RECORDS_WRITTEN.inc(held[-1].next - held[0].first)
        BYTES_WRITTEN.inc(sum(span.size for span in held))
        # Last: it needs no interpreter lock, so that waiting threads continue meanwhile.
        self._published.write()

    def after_wake(self) -> None:
        """Write the index: work that can wait until the threads that wait for a group are woken."""
        self._journal.write_index()
