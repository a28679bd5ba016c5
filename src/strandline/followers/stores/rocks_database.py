"""A RocksDB database of a store: opening, iteration by prefix, the stored position, and errors of ``rocksdict``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from strandline.errors import (
    CorruptData,
    DiskFull,
    Fenced,
    InvalidInput,
    MissingExtra,
    StorageError,
    StrandlineError,
    UnsupportedVersion,
)
from strandline.model.cursor import Cursor
from strandline.model.sink import StorePosition
from strandline.storage.disk import Disk
from strandline.storage.env import Env

if TYPE_CHECKING:
    from rocksdict import Options, Rdict, ReadOptions
    from rocksdict import Snapshot as RocksSnapshot

KIND: Final = "rocksdb"

KIND_VERSION: Final = 1

FAMILY: Final = "strandline"
"""The column family of internal keys: users' keys stay bare, which is 50 % faster than with a prefix."""

POSITION: Final = b"standing"

FORMAT: Final = b"format"

VERSION: Final = b"%d" % KIND_VERSION

_CONFIG: Final = "rocksdict-config.json"

_INFO_LOGS: Final = 2

_LOCKED: Final = re.compile(r"LOCK: (No locks available|Resource temporarily unavailable)")


def rocksdict() -> Any:
    """The library, or ``MissingExtra``."""
    try:
        import rocksdict
    except ImportError as error:
        raise MissingExtra("RocksDB stores need the extra 'rocksdb': pip install 'strandline[rocksdb]'.") from error
    return rocksdict


def open_database(folder: str, *, sync: bool) -> Rdict:
    """Open the database in a folder, or create one."""
    try:
        db: Rdict = rocksdict().Rdict(folder, _options(sync=sync), {FAMILY: _options(sync=sync)})
    except MissingExtra:
        raise
    except Exception as error:
        raise explained(error, folder, "opened") from error
    return db


def _options(*, sync: bool) -> Options:
    rocks = rocksdict()
    options: Options = rocks.Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_atomic_flush(True)  # keys and cursor are flushed together
    options.set_keep_log_file_num(_INFO_LOGS)
    mode = rocks.DBRecoveryMode
    # If every write was synced, only the last one can be torn, and anything else is damage. If none was, a machine
    # crash may leave a hole before later writes: everything after the hole is dropped, with its cursors.
    options.set_wal_recovery_mode(mode.tolerate_corrupted_tail_records() if sync else mode.point_in_time())
    return options


class KeyIterator(Iterator[tuple[bytes, bytes]]):
    """Iterator over a range; raises if it ends because of damage."""

    def __init__(self, db: Rdict, prefix: bytes, name: str) -> None:
        """The keys that begin with the prefix, as of now."""
        self._name = name
        self._last = prefix
        self._upper = successor(prefix)
        self._snapshot: RocksSnapshot | None = db.snapshot()
        self._items: Iterator[Any] = self._snapshot.items(from_key=prefix, read_opt=self._bounded())

    def __next__(self) -> tuple[bytes, bytes]:
        for row in self._items:
            self._last = row[0]
            found: tuple[bytes, bytes] = row
            return found
        if self._snapshot is None:
            raise InvalidInput(f"The store in {self._name} was closed while a range of it was read: open it again.")
        self._check_end(self._snapshot)
        raise StopIteration

    def _check_end(self, snapshot: RocksSnapshot) -> None:
        """Raise if the iteration ended because of a read error, which ``rocksdict`` does not report."""
        again = snapshot.iter(self._bounded())
        again.seek(self._last)
        if again.valid():
            again.next()
        try:
            again.status()
        except Exception as error:
            raise explained(error, self._name, "read") from error

    def _bounded(self) -> ReadOptions:
        options: ReadOptions = rocksdict().ReadOptions()
        if self._upper is not None:
            options.set_iterate_upper_bound(self._upper)
        return options

    def close(self) -> None:
        """Release the database."""
        self._items, self._snapshot = iter(()), None


def successor(prefix: bytes) -> bytes | None:
    r"""The lowest bytes above all keys with the prefix; None if there are none.

    >>> successor(b"a"), successor(b"a\xff\xff"), successor(b"\xff"), successor(b"")
    (b'b', b'b', None, None)
    """
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else None


def cursor_in(folder: str, *, env: Env) -> Cursor:
    """The cursor in a database, which is not changed.

    Opened through hard links in a folder of their own, since ``rocksdict`` writes beside the files even when it only
    reads.
    """
    scratch = f"{folder}/.opened-{env.chance.uuid().hex}"
    rows = [row for row in env.disk.scan(folder) if row.name != _CONFIG]
    env.disk.make_folders(scratch)
    try:
        for row in rows:
            _link_or_copy(f"{folder}/{row.name}", f"{scratch}/{row.name}", env.disk)
        position = _position_in(scratch, folder)
    finally:
        env.disk.remove_folder(scratch)
    if position.cursor is None or position.resync is not None:
        raise CorruptData(f"The database in {folder} does not hold a whole state and its cursor.")
    return position.cursor


def _link_or_copy(source: str, target: str, disk: Disk) -> None:
    try:
        disk.link(source, target)
    except StorageError:
        disk.copy(source, target)  # where hard links are not supported


def _position_in(scratch: str, folder: str) -> StorePosition:
    rocks = rocksdict()
    options = rocks.Options(raw_mode=True)
    reading = rocks.AccessType.read_only(False)
    try:
        db = rocks.Rdict(scratch, options, {FAMILY: rocks.Options(raw_mode=True)}, reading)
        own = db.get_column_family(FAMILY)
        try:
            found, stored = own.get(FORMAT), own.get(POSITION)
        finally:
            own.close()
            db.close()
    except Exception as error:
        raise explained(error, folder, "opened") from error
    if found != VERSION:
        raise UnsupportedVersion(f"The database in {folder} is no store of version {KIND_VERSION}, but {found!r}.")
    return decoded(stored, folder)


def encoded(position: StorePosition) -> bytes:
    """The stored form of a position: one value, so it is read atomically."""
    return f"{position.cursor or ''} {position.resync or ''}".encode()


def decoded(stored: bytes | None, folder: str) -> StorePosition:
    """The position in its stored form; without a stored value the store is new."""
    if stored is None:
        return StorePosition(None)
    try:
        cursor, resync = stored.decode("ascii").split(" ")
        return StorePosition(Cursor.parse(cursor) if cursor else None, UUID(resync) if resync else None)
    except (InvalidInput, ValueError) as error:
        raise CorruptData(f"The store in {folder} is damaged: its cursor cannot be read ({error}).") from error


def explained(error: Exception, folder: str, what: str) -> StrandlineError:
    """The error for an error of the library, which distinguishes them by text alone."""
    text = str(error)
    if _LOCKED.search(text):
        return Fenced(f"The store in {folder} is open elsewhere; nothing was changed. Close it there first. ({text})")
    if "No space left" in text:
        return DiskFull(
            f"The disk of the store in {folder} is full; nothing was acknowledged: make room and open it again."
        )
    if text.startswith("Corruption"):
        return CorruptData(
            f"The store in {folder} could not be {what}, since it is damaged: import a snapshot into another folder, "
            f"or remove this one and let it be built again. ({text})"
        )
    return StorageError(
        f"The store in {folder} could not be {what}: close it, remove the cause, and open it again. ({text})"
    )
