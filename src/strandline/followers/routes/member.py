"""One table of a route: its cursor, the records that wait for its next commit, its failures and its counts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import Conflict, Fenced, StrandlineError
from strandline.followers.committer import SinkCommitter
from strandline.followers.routes.pacing import Waiting
from strandline.followers.routes.progress import MemberProgress, State
from strandline.followers.table_route import upkeep_failures
from strandline.model.cursor import Cursor
from strandline.model.records import READ_SCHEMA
from strandline.storage.env import Env
from strandline.storage.metrics import count_commit
from strandline.storage.retry import Backoff
from strandline.tables.apply import apply_records
from strandline.tables.written import Written

RETRIES: Final = Backoff(attempts=12, base=0.25, ceiling=60.0)
"""Pauses before a failed table is tried again. Somebody may repair it: an unbounded follower tries for ever."""
_MOST_SHARED: Final = 4
"""How much more than themselves the records that wait may keep in memory, since they were taken out of a range."""
_LOGGER: Final = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class RoutedTable:
    """One table of a route. At any time one thread owns it: that of its lane, or of its running commit."""

    name: str
    begin: Callable[[], SinkCommitter]
    """Starts its follower, from the table's own cursor."""
    env: Env
    has_slot: bool = False
    """Whether the route has a slot, which shows whether a newer follower has taken it over."""
    labels: tuple[str, str] = ("", "")
    """Log and table, in Prometheus."""
    committer: SinkCommitter | None = None
    """None: its follower could not be started yet, or is started again."""
    is_known: bool = False
    """Whether its follower has found or made the table: it is not made again, should somebody remove it."""
    cursor: Cursor | None = None
    """The stored cursor."""
    state: State = "catching up"
    error: Exception | None = None
    failures: int = 0
    retry_at: float = 0.0
    commit: Future[Any] | None = None
    """The commit that runs."""
    _waiting: list[pa.Table] = field(default_factory=list)
    _rows: int = 0
    _size: int = 0
    _since: float | None = None
    _commits: int = 0
    _records: int = 0
    _bad: int = 0
    _seconds: float = 0.0
    _is_held: bool = False
    """Whether it was committed to since its follower was started last, so that only a newer follower can fence that."""
    _upkeep_failures: int = 0

    def open(self) -> Cursor:
        """Start its follower, and read its cursor again: nothing of it waits then."""
        self.drop()
        self._is_held = False
        self.committer = self.begin()
        self.cursor = self.committer.start
        return self.cursor

    @property
    def started(self) -> SinkCommitter:
        """Its follower, which was started."""
        if self.committer is None:
            raise AssertionError(f"the follower of {self.name} was not started")
        return self.committer

    def drop(self) -> None:
        """Forget the records that wait: they are read again from the table's cursor."""
        self._waiting, self._rows, self._size, self._since = [], 0, 0, None

    def take(self, records: pa.Table) -> None:
        """Records of the log for the table; those that it has are dropped."""
        if self.cursor is not None and records.num_rows and records.column("offset")[0].as_py() < self.cursor.next:
            records = records.filter(pc.greater_equal(records.column("offset"), self.cursor.next))
        if not records.num_rows:
            return
        import numpy as np

        if records.get_total_buffer_size() > _MOST_SHARED * records.nbytes:
            records = records.take(pa.array(np.arange(records.num_rows)))  # else few records keep all of their range
        self._waiting.append(records)
        self._rows += records.num_rows
        self._size += records.nbytes
        if self._since is None:
            self._since = self.env.clock.monotonic()

    def waiting(self, read: Cursor) -> Waiting:
        """What waits, of a table whose lane has read up to a cursor."""
        is_behind = self.cursor is None or self.cursor.next < read.next
        return Waiting(self.name, self._rows, self._size, self._since, is_behind)

    def store(self, upto: Cursor) -> None:
        """Commit what waits, with a cursor: the records of the table below it."""
        committer, since = self.started, self.cursor
        if since is None or since.next >= upto.next:
            return
        records = pa.concat_tables([READ_SCHEMA.empty_table(), *self._waiting])
        table = committer.table
        began = self.env.clock.monotonic()
        done: list[Written] = []

        def write() -> None:
            if table is None:
                committer.apply(records, since=since, upto=upto)
            else:
                done[:] = apply_records(table, records, since=since, upto=upto, selected=True)

        if table is None:
            write()
        else:
            committer.store(write)
        self.stored(upto, records.num_rows, done, self.env.clock.monotonic() - began)

    def stored(self, upto: Cursor, records: int, written: Sequence[Written], seconds: float) -> None:
        """A commit has landed."""
        bad = sum(one.bad_records for one in written)
        self.drop()
        self._is_held = True
        self.cursor = upto
        self.failures, self.error = 0, None
        self._commits += 1
        self._records += records
        self._bad += bad
        self._seconds = seconds
        was, self._upkeep_failures = self._upkeep_failures, upkeep_failures(self.started.table)
        failures = self._upkeep_failures - was
        count_commit(self.labels, records=records, bad_records=bad, seconds=seconds, upkeep_failures=failures)

    def failed(self, error: Exception) -> None:
        """It falls behind alone, and is tried again later; one that another follower has taken over is not.

        With a slot the first commit to a table may find that of a follower which has the slot no more: then this one
        takes the table over.
        """
        self.drop()
        self.is_known = self.is_known or (self.committer is not None and not self.committer.is_new)
        self.committer = None
        self.error = error
        self.state = "stopped" if isinstance(error, Fenced) and (self._is_held or not self.has_slot) else "failing"
        self.retry_at = self.env.clock.monotonic() + RETRIES.pause(self.failures, self.env.chance.jitter())
        self.failures += 1
        _LOGGER.warning("The table %s falls behind the others of its route: %s", self.name, error)

    @property
    def is_given_up(self) -> bool:
        """Whether a follower with an end does not wait for it."""
        if self.error is None:
            return False
        is_retryable = isinstance(self.error, StrandlineError) and self.error.retryable
        may_succeed = is_retryable or isinstance(self.error, Conflict | Fenced)
        return self.state == "stopped" or not may_succeed or self.failures >= RETRIES.attempts

    @property
    def is_keyed(self) -> bool:
        """Whether its rows are divided among workers by their keys."""
        table = None if self.committer is None else self.committer.table
        return getattr(table, "mode", "append") != "append"

    def progress(self) -> MemberProgress:
        """Its progress as a value."""
        at = None if self.cursor is None else self.cursor.next
        counts = (self._commits, self._records, self._bad, self._seconds)
        error = "" if self.error is None else str(self.error)
        return MemberProgress(self.name, self.state, at, *counts, error, self._upkeep_failures)
