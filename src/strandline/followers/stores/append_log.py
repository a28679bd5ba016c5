"""A store with its state in memory and its writes in an append-only file."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, Final, final

import pyarrow as pa

from strandline.errors import Fenced, NotFound, StorageError
from strandline.followers.stores.append_log_file import (
    ROW_OVERHEAD,
    Content,
    FileBlock,
    cursor_of_snapshot,
    encode_base,
    encode_write,
    read_content,
)
from strandline.followers.stores.state import KeyedStore
from strandline.formats.arrow.block import Parts
from strandline.formats.wal.frame import HEADER_SIZE, FrameHead, frame_head
from strandline.log.folders import FolderKind, check_new
from strandline.model.addresses import Address, as_folder
from strandline.model.arguments import checked
from strandline.model.cursor import Cursor
from strandline.model.keyed import Updates
from strandline.model.sink import StorePosition
from strandline.model.snapshot import Snapshot
from strandline.snapshots.sealed import seal, unpack
from strandline.storage.clock import Chance
from strandline.storage.disk import AppendFile, Disk, make_own_folder
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import Origin, bound_to_process, call_in_child

KIND: Final = "append-log"
KIND_VERSION: Final = 1

FILE: Final = "fold.log"
_TEMPORARY: Final = "fold.log.new"
_ASIDE: Final = "fold.log.torn"
_LOCK: Final = "lock"
_LOGGER: Final = logging.getLogger(__name__)


@bound_to_process()
@final
@checked
class AppendLogStore(KeyedStore):
    """A durable :class:`~strandline.model.sink.Store`: a write is a frame in a file before readers see it.

    With ``sync`` a frame is durable before the state and the cursor change, so that no value that was read is lost.
    Without it, a process crash loses nothing, and a machine crash may lose the latest writes, each of them
    whole, with its cursor. When the bytes written since the last compaction exceed ``compact_after`` and the live
    state, the file is compacted to the current state; readers continue meanwhile, the write that caused it waits.

    One process at a time: a second opener is ``Fenced``.
    """

    def __init__(self, folder: str, content: Content, *, sync: bool, compact_after: int, env: Env) -> None:
        """Use :meth:`open`."""
        super().__init__()
        self._folder = folder
        self._path = content.path
        self._sync = sync
        self._compact_after = compact_after
        self._env = env
        self._state, self._position = content.state, content.position
        self._place = content.place or FileBlock(_new_term(self._env.chance))
        self._coming: FileBlock | None = None
        """The end of a compacted file whose rename may or may not have happened."""
        self._doubtful = False
        """Whether a sync of writes that were not durable failed."""
        self._compact_at = compact_after
        self._file: AppendFile | None = None
        self._held = contextlib.ExitStack()
        self._origin = Origin(f"The store in {folder}", self)
        call_in_child(self, AppendLogStore._after_fork)

    def _after_fork(self) -> None:
        """In a forked child: close the file and the lock, which would otherwise outlive the parent's close."""
        with self._held:
            if self._file is not None:
                self._file.close()

    @classmethod
    def open(
        cls, folder: Address, *, sync: bool = True, compact_after: int = 10 << 20, env: Env = SYSTEM
    ) -> AppendLogStore:
        """Open the store in this folder, or create one; reads the whole file.

        A torn tail after the last whole write is truncated, and kept beside the file as ``fold.log.torn``.
        ``CorruptData``, with file and byte, for any other damage; ``Fenced`` while another process has it open.
        """
        folder = as_folder(folder)
        check_new(folder, FolderKind.APPEND_LOG_STORE, disk=env.disk)
        make_own_folder(folder, disk=env.disk)
        with contextlib.ExitStack() as held:
            if not held.enter_context(env.disk.try_locked(f"{folder}/{_LOCK}")):
                raise Fenced(f"The store in {folder} is open elsewhere; nothing was changed. Close it there first.")
            try:
                content = read_content(f"{folder}/{FILE}", disk=env.disk)
            except NotFound:
                content = Content(f"{folder}/{FILE}")
            store = cls(folder, content, sync=sync, compact_after=compact_after, env=env)
            store._settle(content)
            store._held = held.pop_all()
        return store

    @classmethod
    def import_from(cls, snapshot: Address, dest: Address, *, env: Env = SYSTEM, **options: Any) -> AppendLogStore:
        """Create a store in ``dest``, absent or empty, from a fully verified snapshot, and open it with ``options``."""
        unpack(
            as_folder(snapshot),
            as_folder(dest),
            kind=KIND,
            kind_version=KIND_VERSION,
            verify=lambda data: cursor_of_snapshot(f"{data}/{FILE}", disk=env.disk),
            env=env,
        )
        return cls.open(dest, env=env, **options)

    def __repr__(self) -> str:
        return f"AppendLogStore({self._folder!r})"

    def _settle(self, content: Content) -> None:
        """Truncate a torn tail, and sync the rest before it is served: its writer may not have synced it."""
        if content.torn:
            _LOGGER.warning(
                "%s ends within a write that a crash interrupted (%s): %d bytes from byte %d on are cut off.",
                content.path, content.why, content.torn, content.size,
            )  # fmt: skip
            aside = f"{self._folder}/{_ASIDE}"  # a copy of the latest torn tail
            self._env.disk.remove(aside)
            self._env.disk.write_new(aside, [self._env.disk.read(content.path, content.size)])
        self._env.disk.remove(f"{self._folder}/{_TEMPORARY}")
        self._repair_file()

    def _keep(self, records: pa.Table | Updates | None, after: StorePosition) -> None:
        file = self._file or self._repair_file()
        parts, end = encode_write(records, after, self._place, self._env.clock.now() // 1000)
        self._file = None  # until the frame is whole: after an interruption the next write repairs the file
        try:
            file.write(parts)
            if self._sync:
                file.sync()
                end = end._replace(durable=end.frames)
        except BaseException:
            file.close()
            raise
        self._place, self._file = end, file

    def _repair_file(self) -> AppendFile:
        """Reopen the file, truncate it after its last whole write, and sync it.

        After a failed write it may end with a part of a frame. After a failed sync no write can be trusted that was not
        durable before, even if it can be read: then the state in memory is written to a new file.
        """
        self._adopt()
        if self._doubtful:
            self._replace()
            self._adopt()
        file = self._env.disk.open_append(self._path)
        try:
            self._cut(file)
            self._doubtful = self._place.durable < self._place.frames
            file.sync()
            self._doubtful = False
            # The name too: a file that was just created, or renamed by a compaction, may lose it in a crash.
            self._env.disk.sync_folder(self._folder)
        except BaseException:
            file.close()
            raise
        self._place = self._place._replace(durable=self._place.frames)
        self._file = file
        return file

    def _adopt(self) -> None:
        """Determine whether a started rename has happened."""
        if self._coming is None:
            return
        head = frame_head(memoryview(self._env.disk.read(self._path, 0, HEADER_SIZE)))
        if isinstance(head, FrameHead) and head.info.term == self._coming.term:
            self._place, self._doubtful = self._coming, False
        self._coming = None

    def _cut(self, file: AppendFile) -> None:
        size = file.size()
        if size < self._place.size:
            raise StorageError(f"{self._path} is shorter than its written bytes: close the store, and open it again.")
        if size > self._place.size:
            file.cut(self._place.size)

    def close(self) -> None:
        """Sync and close the file; a failed sync is logged. Idempotent."""
        with self._writing:
            if self._closed:
                return
            self._closed = True
            try:
                if self._file is not None and self._place.durable < self._place.frames:
                    self._leave_mark(self._file)
            finally:
                if self._file is not None:
                    self._file.close()
                    self._file = None
                self._held.close()

    def _leave_mark(self, file: AppendFile) -> None:
        """Sync, and record that in a frame of its own, so that later damage is not mistaken for a torn tail."""
        try:
            file.sync()
            marked = self._place._replace(durable=self._place.frames)
            file.write(encode_write(None, self._position, marked, self._env.clock.now() // 1000)[0])
        except StorageError as error:
            _LOGGER.warning("%s could not be synced when it was closed (%s).", self._path, error)

    def compact(self) -> None:
        """Atomically replace the file by one with the current state alone."""
        with self._writing:
            self._refuse_closed()
            self._compact()

    def _after_write(self) -> None:
        since = self._place.size - self._place.base
        if since <= self._compact_at:
            return
        live = self._state.size() + ROW_OVERHEAD * len(self._state.live)
        self._compact_at = max(self._compact_after, live)
        if since <= self._compact_at:
            return
        try:
            self._compact()
        except StorageError as error:
            # The write is stored; only the file is too long. Try again after as many bytes.
            self._compact_at = since + max(self._compact_after, live)
            _LOGGER.warning("%s could not be compacted, and is used as it is (%s).", self._path, error)

    def _compact(self) -> None:
        self._replace()
        self._repair_file()
        self._compact_at = self._compact_after

    def _replace(self) -> None:
        """Write the current state to a new file and rename it; :meth:`_adopt` finds out whether the rename happened.

        Called with the writers' lock held, so the state does not change meanwhile.
        """
        temporary = f"{self._folder}/{_TEMPORARY}"
        live = self._state.live
        term = _new_term(self._env.chance)
        frames = encode_base(live, list(live.values()), self._position, term, self._env.clock.now() // 1000)
        self._coming = _write_file(temporary, frames, term, disk=self._env.disk)
        if self._file is not None:
            # From here on either file may have the name: nothing more may be written to this one.
            self._file.close()
            self._file = None
        self._env.disk.rename(temporary, self._path)

    def export_to(self, folder: Address) -> Snapshot:
        """Seal the state as of the call as a snapshot; reads and writes continue meanwhile."""
        folder = as_folder(folder)
        self._refuse_closed()
        with self._reading:
            keys, values, position = list(self._state.live), list(self._state.live.values()), self._position
        cursor = self._exported_cursor(position)
        return seal_frames(
            folder,
            lambda term, timestamp: encode_base(keys, values, position, term, timestamp),
            cursor,
            env=self._env,
        )


def seal_frames(
    folder: str, frames: Callable[[int, int], Iterator[Parts]], cursor: Cursor, *, env: Env = SYSTEM
) -> Snapshot:
    """Seal a state as a snapshot of this kind: ``frames`` encodes it, given a term and a time in milliseconds."""
    term = _new_term(env.chance)

    def fill(data: str) -> None:
        _write_file(f"{data}/{FILE}", frames(term, env.clock.now() // 1000), term, disk=env.disk)

    def verify(data: str) -> Cursor:
        return cursor_of_snapshot(f"{data}/{FILE}", disk=env.disk)

    return seal(folder, kind=KIND, kind_version=KIND_VERSION, cursor=cursor, fill=fill, verify=verify, env=env)


def _write_file(path: str, frames: Iterator[Parts], term: int, *, disk: Disk) -> FileBlock:
    disk.remove(path)
    file = disk.open_append(path)
    try:
        count = size = 0
        for parts in frames:
            file.write(parts)
            count += 1
            size += sum(map(len, parts))
        file.sync()
    except StorageError:
        with contextlib.suppress(StorageError):
            disk.remove(path)
        raise
    finally:
        file.close()
    return FileBlock(term, count, count, size, size)


def _new_term(chance: Chance) -> int:
    return chance.uuid().int >> 65
