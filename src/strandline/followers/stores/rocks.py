"""A store in RocksDB, through ``rocksdict``: for state larger than memory."""

from __future__ import annotations

import re
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, final
from uuid import UUID

import pyarrow as pa

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
from strandline.followers.stores.state import RuledStore, change_of
from strandline.log.folders import FolderKind, check_new
from strandline.model.addresses import Address, as_folder
from strandline.model.arguments import checked
from strandline.model.cursor import Cursor
from strandline.model.keyed import Updates, as_bytes
from strandline.model.records import Op
from strandline.model.sink import StorePosition
from strandline.model.snapshot import Snapshot
from strandline.snapshots.sealed import seal, unpack
from strandline.storage.disk import Disk, make_own_folder
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import Origin, bound_to_process

if TYPE_CHECKING:
    from rocksdict import Options, Rdict, ReadOptions
    from rocksdict import Snapshot as RocksSnapshot
else:
    Rdict = Any  # of an extra

_KIND: Final = "rocksdb"
_KIND_VERSION: Final = 1
_FAMILY: Final = "strandline"
"""The column family of internal keys: users' keys stay bare, which is 50 % faster than with a prefix."""
_POSITION: Final = b"standing"
_FORMAT: Final = b"format"
_VERSION: Final = b"%d" % _KIND_VERSION
_CONFIG: Final = "rocksdict-config.json"
_INFO_LOGS: Final = 2
_LOCKED: Final = re.compile(r"LOCK: (No locks available|Resource temporarily unavailable)")


@bound_to_process()
@final
@checked(own=("get",))
class RocksStore(RuledStore):
    """A :class:`~strandline.model.sink.Store` on disk: a write is one RocksDB batch, with the cursor inside.

    With ``sync`` a write is durable when it returns. Without it, a process crash loses nothing, and a
    machine crash may lose the latest writes, each of them whole, with its cursor.

    Any thread may read at any time; a range is read from a RocksDB snapshot. One opener at a time: a second one, in
    any process, is ``Fenced``.
    """

    def __init__(self, folder: str, db: Rdict, *, sync: bool, env: Env) -> None:
        """Use :meth:`open`."""
        super().__init__()
        self._folder = folder
        self._env = env
        self._db = db
        self._own: Rdict = db.get_column_family(_FAMILY)
        self._handle: Any = db.get_column_family_handle(_FAMILY)
        self._write_options = rocksdict().WriteOptions()
        self._write_options.sync = sync
        self._new_batch = rocksdict().WriteBatch
        self._known: StorePosition | None = None
        self._ranges: weakref.WeakSet[_KeyIterator] = weakref.WeakSet()
        self._origin = Origin(f"The store in {folder}", self)

    @classmethod
    def open(cls, folder: Address, *, sync: bool = True, env: Env = SYSTEM) -> RocksStore:
        """Open the store in this folder, or create one.

        A torn tail after the last whole write is dropped. ``CorruptData`` for any other damage, ``Fenced``
        while another process has it open, ``InvalidInput`` for a RocksDB database that is no store.
        """
        rocksdict()
        folder = as_folder(folder)
        check_new(folder, FolderKind.ROCKSDB_STORE, disk=env.disk)
        make_own_folder(folder, disk=env.disk)
        try:
            db: Rdict = rocksdict().Rdict(folder, _options(sync=sync), {_FAMILY: _options(sync=sync)})
        except Exception as error:
            raise _explained(error, folder, "opened") from error
        try:
            store = cls(folder, db, sync=sync, env=env)
        except BaseException:
            db.close()
            raise
        try:
            store._check_format()
            store._known = store.position()
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def import_from(cls, snapshot: Address, dest: Address, *, env: Env = SYSTEM, **options: Any) -> RocksStore:
        """Create a store in ``dest``, absent or empty, from a fully verified snapshot, and open it with ``options``."""
        rocksdict()
        unpack(
            as_folder(snapshot),
            as_folder(dest),
            kind=_KIND,
            kind_version=_KIND_VERSION,
            verify=lambda data: _cursor_in(data, env=env),
            shared=True,  # a checkpoint shares files with its store
            env=env,
        )
        return cls.open(dest, env=env, **options)

    def __repr__(self) -> str:
        return f"RocksStore({self._folder!r})"

    def position(self) -> StorePosition:
        """The position in the stream that it follows."""
        known = self._known
        if known is not None:
            return known
        with self._explaining("read"):
            stored = self._own.get(_POSITION)
        return _decoded(stored, self._folder)

    def get(self, key: bytes) -> bytes | None:
        """The value of a key, None if it is absent."""
        name = as_bytes(key)
        try:
            value: bytes | None = self._db.get(name)
        except Exception as error:
            raise self._failed(error, "read") from error
        return value

    def range(self, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Keys that begin with the prefix, with their values, sorted by key; the state as of the call."""
        start = as_bytes(prefix)
        with self._explaining("read"):
            found = _KeyIterator(self._db, start, self._folder)
        self._ranges.add(found)
        return found

    def _write(self, records: pa.Table | Updates | None, after: StorePosition) -> None:
        self._refuse_closed()
        batch = self._new_batch(raw_mode=True)
        if records is not None and len(records):
            keys, values, ops = change_of(records)
            if ops is None:
                deque(map(batch.put, keys, values), maxlen=0)  # the fastest loop: not in Python
            else:
                put, delete = batch.put, batch.delete
                for op, key, value in zip(ops, keys, values, strict=True):
                    if op == Op.PUT:
                        put(key, value)
                    else:
                        delete(key)
        batch.put(_POSITION, _encoded(after), self._handle)
        self._known = None  # until the outcome is known, the position is read from the database
        try:  # not in a block of _explaining, which would cost each write more
            self._db.write(batch, self._write_options)
        except Exception as error:
            raise self._failed(error, "written to") from error
        self._known = after

    def export_to(self, folder: Address) -> Snapshot:
        """Seal the state as of the call, from a RocksDB checkpoint: large files are linked, not copied.

        Writes wait while the checkpoint is made, and continue while it is hashed and opened.
        """
        folder = as_folder(folder)
        with ExitStack() as held:
            held.enter_context(self._writing)
            self._refuse_closed()
            cursor = self._exported_cursor(self.position())

            def fill(data: str) -> None:
                self._checkpoint(data)
                held.close()

            return seal(
                folder,
                kind=_KIND,
                kind_version=_KIND_VERSION,
                cursor=cursor,
                fill=fill,
                verify=lambda data: _cursor_in(data, env=self._env),
                env=self._env,
            )

    def _checkpoint(self, data: str) -> None:
        within = f"{data}/.checkpoint"  # RocksDB makes the folder itself
        with self._explaining(f"exported to {data}"):
            rocksdict().Checkpoint(self._db).create_checkpoint(within)
        for row in self._env.disk.scan(within):
            self._env.disk.rename(f"{within}/{row.name}", f"{data}/{row.name}")
        self._env.disk.remove_folder(within)

    def close(self) -> None:
        """Sync and close the database; iterations end. Idempotent."""
        with self._writing:
            if self._closed:
                return
            self._closed = True
            for found in list(self._ranges):
                found.close()  # an open snapshot would keep the folder locked
            try:
                self._db.flush_wal(True)
            except Exception as error:
                raise _explained(error, self._folder, "made durable") from error
            finally:
                self._handle = None
                for part in (self._own, self._db):
                    # Closing flushes again and repeats old errors; the write-ahead log has everything.
                    with suppress(Exception):
                        part.close()

    @contextmanager
    def _explaining(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise self._failed(error, what) from error

    def _failed(self, error: Exception, what: str) -> StrandlineError:
        self._refuse_closed()
        return _explained(error, self._folder, what)

    def _check_format(self) -> None:
        with self._explaining("opened"):
            found = self._own.get(_FORMAT)
            used = found is None and next(iter(self._db.keys()), None) is not None
            if found is None and not used:
                self._own.put(_FORMAT, _VERSION, self._write_options)
        if used:
            raise InvalidInput(
                f"{self._folder} is a RocksDB database, but no store of strandline: name another folder."
            )
        if found not in (None, _VERSION):
            raise UnsupportedVersion(
                f"The store in {self._folder} is of version {found!r}, and this program reads version {_KIND_VERSION}: "
                "use the strandline that wrote it."
            )


def rocksdict() -> Any:
    """The library, or ``MissingExtra``."""
    try:
        import rocksdict
    except ImportError as error:
        raise MissingExtra("RocksDB stores need the extra 'rocksdb': pip install 'strandline[rocksdb]'.") from error
    return rocksdict


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


class _KeyIterator(Iterator[tuple[bytes, bytes]]):
    """Iterator over a range; raises if it ends because of damage."""

    def __init__(self, db: Rdict, prefix: bytes, name: str) -> None:
        self._name = name
        self._last = prefix
        self._upper = _successor(prefix)
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
            raise _explained(error, self._name, "read") from error

    def _bounded(self) -> ReadOptions:
        options: ReadOptions = rocksdict().ReadOptions()
        if self._upper is not None:
            options.set_iterate_upper_bound(self._upper)
        return options

    def close(self) -> None:
        self._items, self._snapshot = iter(()), None


def _successor(prefix: bytes) -> bytes | None:
    r"""The lowest bytes above all keys with the prefix; None if there are none.

    >>> _successor(b"a"), _successor(b"a\xff\xff"), _successor(b"\xff"), _successor(b"")
    (b'b', b'b', None, None)
    """
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else None


def _cursor_in(folder: str, *, env: Env) -> Cursor:
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
        db = rocks.Rdict(scratch, options, {_FAMILY: rocks.Options(raw_mode=True)}, reading)
        own = db.get_column_family(_FAMILY)
        try:
            found, stored = own.get(_FORMAT), own.get(_POSITION)
        finally:
            own.close()
            db.close()
    except Exception as error:
        raise _explained(error, folder, "opened") from error
    if found != _VERSION:
        raise UnsupportedVersion(f"The database in {folder} is no store of version {_KIND_VERSION}, but {found!r}.")
    return _decoded(stored, folder)


def _encoded(position: StorePosition) -> bytes:
    """The stored form of a position: one value, so it is read atomically."""
    return f"{position.cursor or ''} {position.resync or ''}".encode()


def _decoded(stored: bytes | None, folder: str) -> StorePosition:
    """The position in its stored form; without a stored value the store is new."""
    if stored is None:
        return StorePosition(None)
    try:
        cursor, resync = stored.decode("ascii").split(" ")
        return StorePosition(Cursor.parse(cursor) if cursor else None, UUID(resync) if resync else None)
    except (InvalidInput, ValueError) as error:
        raise CorruptData(f"The store in {folder} is damaged: its cursor cannot be read ({error}).") from error


def _explained(error: Exception, folder: str, what: str) -> StrandlineError:
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
