"""A store in RocksDB, through ``rocksdict``: for state larger than memory."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, final

import pyarrow as pa

from strandline.errors import InvalidInput, StrandlineError, UnsupportedVersion
from strandline.followers.stores.rocks_database import (
    FAMILY,
    FORMAT,
    KIND,
    KIND_VERSION,
    POSITION,
    VERSION,
    KeyIterator,
    cursor_in,
    decoded,
    encoded,
    explained,
    open_database,
    rocksdict,
)
from strandline.followers.stores.state import RuledStore, change_of
from strandline.log.folders import FolderKind, check_new
from strandline.model.addresses import Address, as_folder
from strandline.model.arguments import checked
from strandline.model.keyed import Updates, as_bytes
from strandline.model.records import Op
from strandline.model.sink import StorePosition
from strandline.model.snapshot import Snapshot
from strandline.snapshots.sealed import seal, unpack
from strandline.storage.disk import make_own_folder
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import Origin, bound_to_process

if TYPE_CHECKING:
    from rocksdict import Rdict
else:
    Rdict = Any  # of an extra


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
        self._own: Rdict = db.get_column_family(FAMILY)
        self._handle: Any = db.get_column_family_handle(FAMILY)
        self._write_options = rocksdict().WriteOptions()
        self._write_options.sync = sync
        self._new_batch = rocksdict().WriteBatch
        self._known: StorePosition | None = None
        self._ranges: weakref.WeakSet[KeyIterator] = weakref.WeakSet()
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
        db = open_database(folder, sync=sync)
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
            kind=KIND,
            kind_version=KIND_VERSION,
            verify=lambda data: cursor_in(data, env=env),
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
            stored = self._own.get(POSITION)
        return decoded(stored, self._folder)

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
            found = KeyIterator(self._db, start, self._folder)
        self._ranges.add(found)
        return found

    def _write(self, records: pa.Table | Updates | None, after: StorePosition) -> None:
        """Write everything in one batch."""
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
        batch.put(POSITION, encoded(after), self._handle)
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
                kind=KIND,
                kind_version=KIND_VERSION,
                cursor=cursor,
                fill=fill,
                verify=lambda data: cursor_in(data, env=self._env),
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
                raise explained(error, self._folder, "made durable") from error
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
        return explained(error, self._folder, what)

    def _check_format(self) -> None:
        with self._explaining("opened"):
            found = self._own.get(FORMAT)
            used = found is None and next(iter(self._db.keys()), None) is not None
            if found is None and not used:
                self._own.put(FORMAT, VERSION, self._write_options)
        if used:
            raise InvalidInput(
                f"{self._folder} is a RocksDB database, but no store of strandline: name another folder."
            )
        if found not in (None, VERSION):
            raise UnsupportedVersion(
                f"The store in {self._folder} is of version {found!r}, and this program reads version {KIND_VERSION}: "
                "use the strandline that wrote it."
            )
