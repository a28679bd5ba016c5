"""The commit watermark of a replica, and reads of its copy up to there, with waits for a bookmark or for freshness."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import final

from strandline.errors import Diverged, NotReady
from strandline.model.cursor import Cursor
from strandline.node.lead.committed_log import ReadableLog
from strandline.node.node_folder import NodeFolder
from strandline.node.replicate.log_copy import LogCopy


@final
class ReplicaWatermark:
    """The copy of a replica as readers see it, through a bootstrap that replaces it. Any thread may read it.

    They see records up to the commit watermark, which never decreases.
    """

    def __init__(
        self,
        node_folder: NodeFolder,
        copy: Callable[[], LogCopy | None],
        is_bootstrapping: Callable[[], bool],
        *,
        committed: int,
        is_known: bool,
    ) -> None:
        """``copy`` gives the replica's copy as of each call; None if it has none. ``committed`` is known so far."""
        self._node_folder = node_folder
        self._clock = node_folder.env.clock
        self._copy = copy
        self._is_bootstrapping = is_bootstrapping
        self._changed = threading.Condition()
        self.shown = committed
        """The watermark up to which the local records are known to be the primary's, and committed."""
        self.of_primary = committed
        """The primary's highest watermark; the copy may lack records below it, or have others."""
        self.is_known = is_known
        """Whether it covers everything that this node has shown; until then the node serves no reads."""
        self.compared: int | None = None
        """The offset of the last record until it is compared with the primary's."""
        self.caught_up_at: float | None = None
        """When it last had everything that was durable on the primary."""

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Change the copy or the watermark within the block; readers that wait look again after it."""
        with self._changed:
            yield
            self._changed.notify_all()

    @property
    def committed(self) -> int:
        """The commit watermark here: every record below is in this copy, and satisfies the primary's policy."""
        copy = self._copy()
        return 0 if copy is None else min(self.shown, copy.log.bounds().next)

    @property
    def _reached(self) -> int:
        """The same, with the seal."""
        copy = self._copy()
        return 0 if copy is None else min(self.shown, copy.log.bounds().extent)

    @property
    def highest(self) -> int:
        """The highest watermark that is known of; the copy may be shorter."""
        return max(self.of_primary, self.shown)

    def raise_to(self, upto: int) -> None:
        """Raise the watermark to the primary's, but not before the last record was compared."""
        if self.compared is None and upto > self.shown:
            self._mark_unsettled()
            self.shown = upto

    def rebuilt(self) -> None:
        """Every record is the primary's from now on: the highest known watermark applies here."""
        self._mark_unsettled()
        self.shown = self.highest

    def learn(self, committed: int, term_start: int) -> None:
        """A watermark past the start of its term covers everything ever committed, and so all records shown here."""
        if committed >= term_start and self.compared is None:
            self.is_known = True

    def _mark_unsettled(self) -> None:
        """Store, before readers see more than the stored watermark, that it may be too low."""
        if self._node_folder.state.settled:
            self._node_folder.remember(settled=False)

    @property
    def staleness(self) -> float:
        """Seconds since this replica last had everything; infinite if never."""
        return float("inf") if self.caught_up_at is None else self._clock.monotonic() - self.caught_up_at

    def readable(
        self, *, after: Cursor | None = None, max_staleness: float | None = None, timeout: float = 1.0
    ) -> ReadableLog:
        """The copy up to the commit watermark, as :meth:`~strandline.node.api.Replica.reading` gives it.

        ``NotReady`` also during a bootstrap.
        """
        if self._copy() is None:
            raise _no_copy()
        if not self.is_known:
            raise NotReady(
                f"This replica does not know yet how much of its copy is committed: it was not closed cleanly, "
                f"and may have shown more than the {self.committed} records that it knows to be committed. Ask again "
                "when it follows a primary, or ask another node."
            )
        if after is not None:
            self._wait(lambda: self.committed >= after.next, timeout, f"offset {after.next - 1} is not here yet")
        if max_staleness is not None:
            self._wait(lambda: self.staleness <= max_staleness, timeout, f"it is {self.staleness:.1f} s behind")
        copy = self._copy()  # not before: a bootstrap may have replaced it during the wait
        if copy is None:
            raise _no_copy()
        if after is not None:
            _check_bookmark(copy, after)
        return ReadableLog(copy.log, lambda _: self._reached, self._wait_past)

    def _wait(self, condition: Callable[[], bool], timeout: float, why: str) -> None:
        if self._is_bootstrapping():
            raise NotReady("This replica builds its copy again, and cannot serve a read that has to wait.")
        with self._changed:
            if not self._changed.wait_for(condition, timeout):
                raise NotReady(f"After {timeout:g} s {why}: ask again, or ask the primary.")

    def _wait_past(self, past: int, timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._reached > past, timeout)


def _no_copy() -> NotReady:
    return NotReady("This replica has no copy of the log yet: it has to bootstrap first. Ask another node.")


def _check_bookmark(copy: LogCopy, after: Cursor) -> None:
    """``Diverged`` if the record before a bookmark is not that of its commit."""
    found = copy.log.term_at(after.next - 1)
    if after.log_id != copy.log.log_id or (after.term and found is not None and found != after.term):
        raise Diverged(
            f"The record before {after.next} is of term {found} here, and the bookmark says {after.term}: it was lost "
            "with its primary, or is of another log."
        )
