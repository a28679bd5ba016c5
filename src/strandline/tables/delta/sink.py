"""The Delta table sink: follows a log exactly once, through ``deltalake``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from strandline.errors import InvalidInput, NotFound
from strandline.model.addresses import Address, as_address, refuse_credentials
from strandline.model.arguments import Named, checked, is_text
from strandline.model.cursor import Cursor
from strandline.storage.env import SYSTEM, Env
from strandline.tables.delta.commits import DeltaCommits
from strandline.tables.delta.orphans import OrphanSweeper
from strandline.tables.delta.place import refuse_links, refuse_other_files
from strandline.tables.delta.trimming import trim
from strandline.tables.delta.version import check_folder
from strandline.tables.files.joining import join_small_files
from strandline.tables.files.sink import FileTableSink
from strandline.tables.files.transaction import FileTransaction
from strandline.tables.files.upkeep import TrimCounts
from strandline.tables.rows.kinds import Mode
from strandline.tables.rows.logged import Value, shape_of
from strandline.tables.rows.partitions import Layout
from strandline.tables.rows.shape import DeadLetters
from strandline.tables.rows.tombstones import Tombstones
from strandline.tables.rows.types import storable


@checked
class DeltaSink(FileTableSink):
    """A Delta table that follows a log: data and cursor are one commit, keyed by offset, so that nothing is duplicated.

    ``mode="latest"`` keeps one row per key, the newest by offset; deletes and purges remove it (``mode="marked"``: mark
    it), a null value is a row. ``mode="append"`` keeps every change. ``mode="history"`` keeps every version of every
    key, with the offsets and times at which it began and ended.

    ``value`` is the codec of the values, such as ``sl.values.Json(schema)``: the table then has their fields as
    columns, and ``_key``, ``_offset``, ``_timestamp`` and ``_op``. New fields become new columns, and numbers become
    wider; any other change of the schema is ``SchemaRefused``. ``value="log"`` is the codec that the log names
    (:meth:`meet`), in its newest version at each commit; a table that was made with the record's own columns keeps
    them.

    ``key`` names columns that identify a row instead of the record's key. ``tombstones`` then says how a delete without
    a value names its row by the record's key: ``"key"``, that is the text of the key column; ``"json"``, it is a JSON
    object with the key columns; a codec of it; or ``"dead-letters"``, such a delete is a bad record. Without
    ``tombstones`` the first one is ``BadRecord``, also with ``dead_letters``.

    ``transform`` is a function from an Arrow table of decoded changes to the rows to keep; it is called for parts of a
    range, in any cuts. A record that cannot become a row is ``BadRecord`` (``NullKey`` without a key), and nothing is
    applied; with ``dead_letters``, the address of a second table, it goes there with its offset and the reason. More
    than ``max_bad_share`` of a commit's records stop it all the same.

    ``layout`` says how the files are kept (:class:`~strandline.tables.rows.partitions.Layout`): it divides and orders
    the rows for queries, and lets the follower join small files and remove old ones. Partitions are those with which
    the table was made, or ``InvalidInput``.

    Two followers of one table cannot both commit: the one whose first commit is later takes the table over
    (:mod:`strandline.tables.claim`), and the other is ``Fenced`` at its next, whatever slots they use. The cursor is
    the Delta application transaction ``strandline/<log id>/<name>``; its version is the next offset.

    Before each commit the table's own history proves that it is the followed table and still matches its
    cursor (:mod:`~strandline.tables.delta.history`): a table that was restored, overwritten, replaced or removed is
    ``Diverged``. OPTIMIZE, VACUUM, checkpoints, log cleanup and changed properties are allowed.
    """

    _followed: DeltaCommits

    def __init__(
        self,
        url: Address,
        *,
        mode: Mode = "latest",
        value: Value | None = None,
        key: str | Sequence[str] = (),
        tombstones: Tombstones | None = None,
        transform: Callable[[pa.Table], pa.Table] | None = None,
        dead_letters: Address | None = None,
        max_bad_share: Any = 1.0,
        layout: Layout | None = None,
        name: Named = "default",
        options: Mapping[str, str] | None = None,
        env: Env = SYSTEM,
    ) -> None:
        """The table at ``url``, which is created by the first apply; ``options`` are its storage options."""
        self.url = _table_address(url)
        """The address of the table."""
        shape = shape_of(mode, value, key, tombstones, transform, layout=layout, has_plain_types=True)
        storage = self.options = dict(options or {})
        """Its storage options."""
        letters_of = None
        if dead_letters is not None:
            letters = _table_address(dead_letters)
            _refuse_nested(self.url, letters)
            letters_of = partial(_letters_of, letters, name, storage, env)
        table = DeltaCommits(self.url, shape, name, storage, env)
        super().__init__(table, shape, value, storable, letters_of, max_bad_share, layout=layout)
        self._orphans = OrphanSweeper(table)

    def table_id(self) -> str:
        """Delta's own id of the table, another one after it was made anew; ``NotFound`` if there is no table."""
        return str(self._existing().id)

    def begin(self, *, since: Cursor, upto: Cursor, tasks: int) -> FileTransaction | None:
        """Prove the table and plan the parts of a range; orphans of failed jobs go now and then."""
        begun = super().begin(since=since, upto=upto, tasks=tasks)
        if begun is not None:
            self._orphans.remove_in_time(begun.version.number + 1)
        return begun

    def _trimmed(self, version: Any, at: Cursor, seconds: float) -> TrimCounts:
        return trim(self._followed, version, at, seconds)

    def optimized(self) -> int:
        """Join small files; see :func:`~strandline.tables.maintain.operations.optimize`."""
        if self._shape.is_keyed or self._shape.layout is not None:
            return join_small_files(self._followed, self._shape)
        version = self._existing(is_moved=True)
        self._followed.files.refuse_links(self._followed.sizes(version))  # the library reads them itself
        before, number = len(version.listed_files()), version.number
        with self._followed.named_errors():
            version.table.optimize.compact()
        after = self._existing()
        for done in range(number + 1, after.number + 1):
            with contextlib.suppress(NotFound):  # a checkpoint is left of it
                # The library does not: a power failure could take the joined files.
                self._followed.make_durable(after, done, is_own=True)
        return before - len(after.listed_files())

    def vacuumed(self, hours: int) -> int:
        """Remove unnamed files; see :func:`~strandline.tables.maintain.operations.vacuum`."""
        table = self._existing(is_moved=True).table
        refuse_links(self._followed.files)  # the library would follow them, and delete what is there
        with self._followed.named_errors():
            # Young files, too: those of another table within this one are the next that would go.
            refuse_other_files(self.url, table.vacuum(0, dry_run=True, enforce_retention_duration=False, full=True))
            gone = table.vacuum(hours, dry_run=False, enforce_retention_duration=False, full=True)
        return len(gone)


def _table_address(given: Address) -> str:
    url = as_address(given)
    if not is_text(url):
        raise InvalidInput(f"{url!a} is not UTF-8, and a table's address has to be: name another folder.")
    refuse_credentials(url, "give them as storage options, or by the environment variables of the cloud")
    check_folder(url)
    return url


def _letters_of(url: str, name: str, options: Mapping[str, str], env: Env, table_id: str) -> DeltaCommits:
    """The dead-letter table as the table with that id uses it: it has a cursor of its own there."""
    return DeltaCommits(url, DeadLetters(), f"{name}/dead-letters/{table_id}", options, env)


def _refuse_nested(table: str, letters: str) -> None:
    ours, theirs = (f"{one.removeprefix('file://').rstrip('/')}/" for one in (table, letters))
    if ours.startswith(theirs) or theirs.startswith(ours):
        raise InvalidInput(
            f"The dead letters {letters} are within the table {table}, or the reverse, and a VACUUM would delete them: "
            "choose another path."
        )
