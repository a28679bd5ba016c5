"""The Delta table sink: follows a log exactly once, through ``deltalake``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import UUID

import pyarrow as pa

from strandline.errors import Conflict, Diverged, InvalidInput, NotFound
from strandline.model.addresses import Address, as_address, is_text, refuse_credentials
from strandline.model.arguments import Named, checked
from strandline.model.cursor import Cursor
from strandline.model.sink import is_applied
from strandline.storage.clock import CHANCE
from strandline.storage.disk import DISK, Disk
from strandline.tables.apply import apply_records
from strandline.tables.delta.history import own_commits
from strandline.tables.delta.table import FollowedDelta, data_files
from strandline.tables.delta.transaction import DeltaTransaction
from strandline.tables.kinds import Kind
from strandline.tables.layout import files_in, shares
from strandline.tables.part import TablePart
from strandline.tables.shape import TableShape, as_key
from strandline.values.contract import Codec

if TYPE_CHECKING:
    from strandline.values.contract import Codec


@checked
class DeltaSink:
    """A Delta table that follows a log: data and cursor are one commit, keyed by offset, so that nothing is duplicated.

    ``mode="latest"`` keeps one row per key, the newest by offset; deletes and purges remove it, a null value is a row,
    and a record without key is refused as ``NullKey``. ``mode="append"`` keeps every change.

    Two followers of one table cannot both commit: the table format refuses the second, which gets ``Fenced``. The
    cursor is the Delta application transaction ``strandline/<log id>/<name>``; its version is the next offset.

    Before each commit the table's own history proves that it is the followed table and still matches its
    cursor (:mod:`~strandline.tables.delta.history`): a table that was restored, overwritten, replaced or removed is
    ``Diverged``. Compaction, VACUUM, checkpoints, log cleanup and changed properties are allowed.
    """

    def __init__(
        self,
        url: Address,
        *,
        mode: Kind = "latest",
        value: Codec | None = None,
        key: str | Sequence[str] = (),
        transform: Callable[[pa.Table], pa.Table] | None = None,
        soft_deletes: bool = False,
        name: Named = "default",
        options: Mapping[str, str] | None = None,
        disk: Disk = DISK,
    ) -> None:
        """The table at ``url``, which is created by the first apply; ``options`` are its storage options."""
        self.url = as_address(url)
        """The address of the table."""
        if not is_text(self.url):
            raise InvalidInput(f"{self.url!a} is not UTF-8, and a table's address has to be: name another folder.")
        refuse_credentials(self.url, "give them as storage options, or by the environment variables of the cloud")
        self.mode: Kind = mode
        """The kind of the table."""
        self._shape = TableShape(mode, value, as_key(key), transform, soft_deletes)
        self._name = name
        self._table = FollowedDelta(self.url, self._shape, name, options or {}, disk)

    def __repr__(self) -> str:
        return f"DeltaSink({self.url!r}, mode={self.mode!r}, name={self._name!r})"

    def cursor(self, log_id: UUID) -> Cursor | None:
        """How far the table has applied that log, proved by its history; None if there is no table yet.

        ``Diverged`` if it follows another log, if other writers changed its rows, or if it is not the table that this
        object has committed to; also if that was removed.
        """
        table = self._table.open()
        if table is not None:
            return self._table.last_commit(table, log_id).cursor
        self._table.refuse_removed(log_id)
        return None

    def resume(self, log_id: UUID) -> Cursor | None:
        """The same for a starting follower, which has only the table's own history."""
        self._table.known.pop(log_id, None)
        return self.cursor(log_id)

    def apply(self, records: pa.Table, *, since: Cursor, upto: Cursor) -> None:
        """Commit the range with its cursor, exactly once; see :class:`~strandline.model.sink.Sink`.

        Commits of other writers that changed no row, such as a compaction, are allowed.
        """
        apply_records(self, records, since=since, upto=upto)

    def begin(self, *, since: Cursor, upto: Cursor, tasks: int) -> DeltaTransaction | None:
        """Prove the table and plan the parts of a range; see :class:`~strandline.model.sink.TableSink`."""
        # One handle for the check and the commit: a commit of another writer in between makes this one fail.
        table = self._table.open()
        if table is None:
            self._table.refuse_removed(since.log_id)
            self._table.check_place()
        at = None if table is None else self._table.last_commit(table, since.log_id).cursor
        if is_applied(since=since, upto=upto, at=at):
            return None
        parts = tuple(self._parts({} if table is None else data_files(table), since, at, tasks))
        return DeltaTransaction(self._table, table, since, upto, at, parts)

    def _parts(
        self, files: Mapping[str, tuple[str, int]], since: Cursor, at: Cursor | None, tasks: int
    ) -> Iterator[TablePart]:
        floor = 0 if at is None or at.next <= since.next else at.next
        part = TablePart(self._shape, self._shape.schema(), self._table.files, str(CHANCE.uuid()), floor)
        if not self._shape.is_keyed:
            yield from [part] * max(1, tasks)
            return
        sizes = [(path, size) for path, (_, size) in files.items()]
        for share in shares(tasks):
            yield replace(part, share=share, old=tuple(files_in(share, sizes)))

    def repair(self, log_id: UUID, serves: Callable[[Cursor], bool]) -> Cursor | None:
        """Restore the table to the last version that is known to be right; returns the cursor there.

        That is the last commit of this sink whose files still exist and whose cursor the log still ``serves``. A
        table that needs no repair is not changed. Changes of other writers since then are undone, in one commit that
        carries the cursor. ``Diverged`` if there is no such version; None if there is no table.
        """
        table = self._table.open()
        if table is None:
            return self.resume(log_id)
        try:
            return self.resume(log_id)
        except Diverged as error:
            damage = error
        application = self._table.application(log_id)
        for commit in own_commits(table.version(), self._table.read_commit, application):
            if (
                commit.cursor is not None
                and serves(commit.cursor)
                and self._table.restored(table, commit.version, commit.cursor)
            ):
                return commit.cursor
        raise Diverged(
            f"The table {self.url} cannot be repaired: no version of it is left that is known to be right and "
            f"that the log can continue from. Remove it to build it again. ({damage})"
        ) from damage

    def adopt(self, log_id: UUID) -> Cursor:
        """Accept the table as it is now as the state of its cursor: the caller knows that it is right.

        For a table that other writers changed on purpose, or whose history is lost. ``NotFound`` if there is no table,
        ``Conflict`` if another writer changes rows of it at the same time. Several concurrent calls all succeed.
        """
        table = self._table.open()
        if table is None:
            raise NotFound(f"There is no table at {self.url} to adopt.")
        cursor = Cursor(log_id, self._table.next_in(table, log_id))
        self._table.known.pop(log_id, None)
        try:
            self._table.commit(table, [], cursor)
        except Conflict as error:
            with contextlib.suppress(Diverged):
                return self.cursor(log_id) or cursor  # another call adopted it
            raise Conflict(
                f"Another job changed {self.url} while it was being adopted; nothing was committed. Check the table "
                "again, and adopt it if it is right."
            ) from error
        return cursor
