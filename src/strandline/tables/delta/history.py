"""Reads a Delta table's transaction log: the sink's own commits, and changes by others since. No I/O.

The Delta application transaction of a sink outlives changes of its rows: a RESTORE, an overwrite and a CREATE
OR REPLACE keep it. So it proves how far the sink *had* got, but not that the table still holds that. Each commit of a
sink therefore carries two transactions: ``strandline/<log id>/<name>``, whose version is the next offset, and
``strandline/<log id>/<name>/<table id>``, whose version is the Delta version of the commit itself. Together they
identify the version and table of the cursor, also where only a checkpoint is left; the commits after that
version show whether its rows were changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from strandline.errors import CorruptData, Diverged, InvalidInput
from strandline.model.cursor import Cursor
from strandline.tables.files.followed import REMEDY, OwnCommit
from strandline.tables.files.recorded import COMMIT_KEY, CURSOR_KEY, HOLDER_KEY

TABLE_KEY: Final = "strandline.table"
"""Key of the table's id in the commit info of a sink's commit, beside ``CURSOR_KEY`` and ``COMMIT_KEY``.

The value of ``COMMIT_KEY`` is a number that no other commit has: by it a follower recognises a commit whose answer was
lost.
"""

ReadCommit = Callable[[int], bytes | None]
"""The bytes of the commit file of a version; None if there is none."""


@dataclass(frozen=True, slots=True)
class Application:
    """The names of a sink's application transactions."""

    log_id: UUID
    name: str

    @property
    def cursor(self) -> str:
        """The transaction whose version is the next offset."""
        return f"strandline/{self.log_id}/{self.name}"

    def commit(self, table_id: str) -> str:
        """The transaction whose version is the Delta version of the sink's last commit to this table."""
        return f"{self.cursor}/{table_id}"

    def start(self, table_id: str) -> str:
        """The transaction whose version is the offset at which the rows begin, once a rebuild has moved it."""
        return f"{self.commit(table_id)}/start"

    def floor(self, table_id: str) -> str:
        """The transaction whose version is the oldest Delta version that upkeep has kept: no repair goes below it."""
        return f"{self.commit(table_id)}/floor"

    def reset(self, table_id: str) -> str:
        """The transaction whose version is the last Delta version that may name files which were removed before."""
        return f"{self.commit(table_id)}/reset"


NOBODY: Final = Application(UUID(int=0), "")
"""For reading a commit file without looking for a follower's own transactions."""


@dataclass(frozen=True, slots=True)
class TableCommit:
    """One version of a table, as seen by a sink."""

    version: int
    operation: str = "?"
    cursor: Cursor | None = None
    """The cursor that the sink stored with it; None for a commit of another writer."""
    table_id: str | None = None
    """The id of the table that the sink committed to, if known."""
    changed_rows: bool = False
    """Whether it added or removed rows, not only files."""
    data_files: tuple[str, ...] = ()
    """The files that it added, as stored in the commit."""
    commit_id: str | None = None
    """The number that a sink gave it."""
    holder: str | None = None
    """The follower that committed, or that held the table then."""
    is_restore: bool = False
    time: int | None = None
    """When it was committed, in milliseconds, by the clock of its writer; None if that is unknown."""


def parse_commit(version: int, data: bytes, application: Application) -> TableCommit:
    """Decode a commit file. Only commits of the sink itself count as its own."""
    try:
        actions = [json.loads(line) for line in data.splitlines() if line.strip()]
        info: Any = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
        files = [action[kind] for action in actions for kind in ("add", "remove") if kind in action]
        own = (one["txn"]["version"] for one in actions if "txn" in one and one["txn"]["appId"] == application.cursor)
        offset = next(own, None)
        return TableCommit(
            version,
            operation=_operation(info),
            cursor=None if offset is None else _cursor(info.get(CURSOR_KEY), application.log_id, offset),
            table_id=info.get(TABLE_KEY),
            changed_rows=any(file.get("dataChange", True) for file in files),
            data_files=tuple(action["add"]["path"] for action in actions if "add" in action),
            commit_id=info.get(COMMIT_KEY),
            holder=info.get(HOLDER_KEY),
            is_restore=info.get("operation") == "RESTORE",
            time=info["timestamp"] if isinstance(info.get("timestamp"), int) else None,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError, OSError) as error:
        raise CorruptData(
            f"The commit file of version {version} cannot be read ({error!r}): restore it from a copy."
        ) from error


def last_commit(
    seen: OwnCommit, committed: int | None, read: ReadCommit, application: Application, where: str
) -> OwnCommit:
    """The sink's last commit, proved to be still in effect: no later commit changed a row.

    ``seen`` is the table's newest version with the cursor of the application transaction, ``committed`` the version of
    the sink's last commit to this table; None if an earlier release wrote it, or the table was replaced.

    ``Diverged`` if one did, if the table is not the one that the sink committed to, or if that cannot be known
    because commit files are missing. A table of an earlier release, which did not store the version of its cursor,
    is searched for its last commit and accepted as it is there.
    """
    at = seen.version + 1
    is_gone = committed is not None and committed > seen.version
    for commit in () if is_gone else commits(seen.version, read, application):
        at = commit.version
        if commit.cursor is not None:
            if commit.table_id not in (None, seen.table_id):
                raise Diverged(f"The table {where} was replaced by another one at the same place. {REMEDY}")
            return OwnCommit(seen.table_id, commit.version, commit.cursor, commit.holder)
        if commit.changed_rows:
            raise Diverged(
                f"Version {commit.version} of the table {where} was not committed by its follower and changed rows "
                f"({commit.operation}), so that its rows no longer match its cursor. {REMEDY}"
            )
        if at == committed:
            break
    # A checkpoint has the transaction of the commit, whose own file may be gone.
    if at > (0 if committed is None else committed + 1):
        raise Diverged(
            f"The commit file of version {at - 1} of the table {where} is missing, so that it is unknown whether "
            f"rows were changed since its follower's last commit. {REMEDY}"
        )
    if committed is None or is_gone:
        raise Diverged(f"No version of the table {where} was committed by its follower. {REMEDY}")
    return OwnCommit(seen.table_id, committed, seen.cursor)


def commits(version: int, read: ReadCommit, application: Application) -> Iterator[TableCommit]:
    """The commits from a version downwards, as far as commit files reach."""
    while version >= 0 and (data := read(version)) is not None:
        yield parse_commit(version, data, application)
        version -= 1


def last_restore(version: int, read: ReadCommit, application: Application) -> int | None:
    """The version that a RESTORE of another writer made since the sink's last commit; None if there is none."""
    found = (one for one in commits(version, read, application) if one.cursor is not None or one.is_restore)
    last = next(found, None)
    return None if last is None or last.cursor is not None else last.version


def _operation(info: Any) -> str:
    operation = str(info.get("operation", "?"))
    if operation == "RESTORE":
        given = info.get("operationParameters") or {}
        named = next((given[key] for key in ("version", "timestamp") if given.get(key)), "an earlier version")
        return f"RESTORE to {named}"
    return operation


def _cursor(text: Any, log_id: UUID, offset: int) -> Cursor:
    """The whole cursor, if it is stored and matches the transaction, which is authoritative."""
    try:
        cursor = Cursor.parse(text) if isinstance(text, str) else None
    except InvalidInput:
        cursor = None
    if cursor is None or (cursor.log_id, cursor.next) != (log_id, offset):
        return Cursor(log_id, offset)
    return cursor


def letter_logs(files: Iterable[bytes | None]) -> set[str]:
    """The logs whose letters were ever committed to a dead-letter table, as far as its commit files are there."""
    found: set[str] = set()
    for version, data in enumerate(files):
        try:
            actions = [json.loads(line) for line in (data or b"").splitlines() if b"/dead-letters/" in line]
            names = [str(action["txn"]["appId"]) for action in actions if "txn" in action]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptData(
                f"The commit file of version {version} cannot be read ({error!r}): restore it from a copy."
            ) from error
        found.update(name.split("/")[1] for name in names if name.startswith("strandline/"))
    return found
