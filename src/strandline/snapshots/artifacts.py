"""Snapshots in an object store: one consumer publishes, new consumers download."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from strandline.errors import AlreadyExists, Contended, CorruptData, Diverged, Fenced, NotFound, NotReady, StorageError
from strandline.formats.snapshot.manifest import PointerCodec, decode_snapshot
from strandline.log.addressed import log_at
from strandline.log.contract import LogReading
from strandline.log.read.span_tasks import is_same_history
from strandline.model.addresses import Address, as_folder
from strandline.model.arguments import Duration, Named, Positive, checked
from strandline.model.cursor import SECOND, Cursor
from strandline.model.json_values import LARGEST
from strandline.model.sink import Store
from strandline.model.snapshot import Artifact, Pointer, Snapshot, SnapshotFile
from strandline.model.stamp import OpId
from strandline.model.times import TOLERANCE
from strandline.snapshots.pointer import (
    StalePayload,
    abandoned,
    follows,
    forget,
    generation_of,
    give_up,
    location_of,
    plan_sweep,
    point,
)
from strandline.snapshots.sealed import DATA, MANIFEST, read_snapshot
from strandline.snapshots.staging import scratch_folder, staged
from strandline.storage.cell import StoreCell
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.storage.lease import Lease
from strandline.storage.objects.store import ObjectStore, cautious_now
from strandline.storage.objects.urls import store_at

GRACE: Final = 3600.0
"""Seconds that superseded payloads are kept for their readers, and unfinished ones for their exporters."""

PART: Final = 8 << 20
"""Bytes of a file per object. Objects are uploaded whole, so this bounds the memory."""

WORKERS: Final = 4
"""Concurrent requests."""

_TRIES: Final = 5
_LOGGER = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")


class _ObjectMissing(StorageError):
    """An object of a payload is missing. Handled by reading the pointer again."""


@dataclass(frozen=True, slots=True)
class Publication:
    """Outcome of an export.

    ``published``: a snapshot was published. ``current``: the published one is as new, or recent enough. ``busy``:
    another exporter holds the lease. ``cursor`` is that of the newest published snapshot; None if there is none, or if
    it was not read.
    """

    outcome: Literal["published", "current", "busy"]
    cursor: Cursor | None = None


@bound_to_process()
@checked
class Artifacts:
    """Published snapshots below a prefix of a store, with one pointer to the newest, which never moves back.

    Any number of processes may publish, fetch and trim concurrently, and crash at any moment. The snapshot that the
    pointer names is complete and never deleted. All calls block on the store and raise ``StorageError``.
    """

    def __init__(
        self,
        store: ObjectStore | Address,
        prefix: str = "",
        *,
        grace: float = GRACE,
        part: Positive = PART,
        workers: Positive = WORKERS,
        env: Env = SYSTEM,
    ) -> None:
        """Use ``store``, or the one at an address; nothing is read or written yet."""
        self._store = store_at(store)
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._grace = grace
        self._part = part
        self._workers = workers
        self._env = env
        self._cell = StoreCell(self._store, f"{self._prefix}pointer.json", PointerCodec(), env=env)
        self._origin = Origin(f"The snapshots in {self._store.url}/{self._prefix}", self)

    def __repr__(self) -> str:
        return f"Artifacts({self._store.url!r}, {self._prefix!r})"

    def newest(self) -> Artifact | None:
        """The newest published snapshot; None without any."""
        pointer = self._pointer()
        return None if pointer is None else pointer.current

    def lease(self, holder: Named, *, seconds: Duration = 60.0) -> Lease:
        """The lease that all exporters to this prefix share."""
        path = f"{self._prefix}lease.json"
        return Lease(self._store, path, holder, seconds=seconds, env=self._env)

    def publish(
        self,
        folder: Address,
        *,
        log: LogReading | Address | None = None,
        replace: bool = False,
        guard: Callable[[], object] = lambda: None,
    ) -> Cursor:
        """Upload a sealed folder and move the pointer to it; returns the published cursor.

        If a snapshot as new or newer is published, nothing is uploaded; unless the ``log`` was restored from a copy or
        promoted by force since, and does not have the records of that snapshot any more. ``Diverged`` if the published
        one is of another log, unless ``replace``, or if the ``log`` does not have the records of the folder.
        ``CorruptData``, and the pointer stays, if a file differs from the manifest. ``guard`` is called before each
        attempt to move the pointer, and may raise.
        """
        folder = as_folder(folder)
        with log_at(log) as found:
            snapshot = read_snapshot(folder, env=self._env)
            _check_history(found, snapshot.cursor)
            manifest = self._env.disk.read(f"{folder}/{MANIFEST}", 0, LARGEST + 1)
            op = self._op()
            for _ in range(_TRIES):
                pointer = self._ensure_pointer()
                current = pointer.current
                lost = _lost_location(found, current)
                if current is not None and not follows(snapshot.cursor, current, replacing=replace, lost=lost):
                    return current.cursor
                artifact = self._upload(snapshot, manifest, pointer.generation)

                def edit(pointer: Pointer, artifact: Artifact = artifact, lost: str | None = lost) -> Pointer:
                    guard()
                    return point(pointer, artifact, replacing=replace, lost=lost)

                try:
                    pointer = self._cell.update(op, edit)
                except StalePayload:
                    continue  # a trim has given up this slow upload, and may have deleted it
                self._trim_quietly()
                return snapshot.cursor if pointer.current is None else pointer.current.cursor
        raise Contended(
            f"{self._cell.where}: {folder} was given up by trims {_TRIES} times while it was uploaded; nothing was "
            "published. Trim less often, or with a longer grace period."
        )

    def _upload(self, snapshot: Snapshot, manifest: bytes, generation: int) -> Artifact:
        sha256 = hashlib.sha256(manifest).hexdigest()
        location = location_of(generation, snapshot.cursor, sha256)

        def parts() -> Iterator[tuple[str, bytes]]:
            for number, file in enumerate(snapshot.files):
                yield from self._parts_of(snapshot.folder, number, file)
            # Last: a payload with a manifest is complete.
            yield MANIFEST, manifest

        def put(part: tuple[str, bytes]) -> None:
            self._store.put(f"{self._prefix}{location}/{part[0]}", part[1])

        for _ in _ahead(put, parts(), self._workers):
            pass
        return Artifact(
            location=location,
            cursor=snapshot.cursor,
            kind=snapshot.kind,
            kind_version=snapshot.kind_version,
            size=sum(file.size for file in snapshot.files),
            part=self._part,
            sha256=sha256,
            published=self._env.clock.now(),
        )

    def _parts_of(self, folder: str, number: int, file: SnapshotFile) -> Iterator[tuple[str, bytes]]:
        """The parts of a file with their names; the uploaded bytes are hashed."""
        digest, path = hashlib.sha256(), f"{folder}/{DATA}/{file.path}"
        for index, start in enumerate(range(0, file.size, self._part)):
            piece = self._env.disk.read(path, start, min(self._part, file.size - start))
            digest.update(piece)
            yield _part_name(number, index), piece
        if self._env.disk.size(path) != file.size or digest.hexdigest() != file.sha256:
            raise CorruptData(
                f"The snapshot {folder} is damaged: {DATA}/{file.path} was altered. Nothing was published; take "
                "another snapshot."
            )

    def export(
        self,
        store: Store,
        lease: Lease | None = None,
        *,
        scratch: Address,
        log: LogReading | Address | None = None,
        pause: float = 0.0,
        replace: bool = False,
    ) -> Publication:
        """Publish a store's state, unless it is published already, or anything was within ``pause`` seconds.

        With the ``log`` that the store follows, a published snapshot of a lost history is replaced at once, however far
        it reaches; see :meth:`publish`.

        With a ``lease`` only its holder exports: one of many identical consumers that call this periodically. The
        lease is acquired if free, renewed during the export, and not released after success; without it the pointer
        does not move (``Fenced``). The snapshot is sealed in a temporary folder below ``scratch``.
        """
        scratch = as_folder(scratch)
        with log_at(log) as found:
            if lease is None:
                return self._export(store, scratch, found, pause=pause, replace=replace, guard=lambda: None)
            if not lease.try_acquire():
                return Publication("busy")
            try:
                # The lease only saves work: the pointer's rule makes concurrent exporters harmless.
                with lease.kept():
                    return self._export(store, scratch, found, pause=pause, replace=replace, guard=lease.ensure)
            except Fenced:
                raise
            except Exception:
                lease.release()  # another consumer may try at once
                raise

    def _export(
        self,
        store: Store,
        scratch: str,
        log: LogReading | None,
        *,
        pause: float,
        replace: bool,
        guard: Callable[[], object],
    ) -> Publication:
        at, current = store.position().cursor, self.newest()
        if at is None:
            raise NotReady(f"The store has no cursor yet, so there is nothing to publish to {self._cell.where}.")
        _check_history(log, at)
        lost = _lost_location(log, current)
        is_other = replace and current is not None and current.cursor.log_id != at.log_id
        if current is not None and not is_other and lost is None:
            # A publication time in the future is from a wrong clock.
            recent = -TOLERANCE <= self._env.clock.now() - current.published < pause * SECOND
            if recent or not follows(at, current):
                return Publication("current", current.cursor)
        with scratch_folder(f"{scratch}/export", env=self._env) as hidden:
            store.export_to(f"{hidden}/snapshot")
            return Publication("published", self.publish(f"{hidden}/snapshot", log=log, replace=replace, guard=guard))

    def fetch(self, dest: Address) -> Snapshot:
        """Download the newest published snapshot as a sealed folder; on failure ``dest`` is unchanged.

        ``NotFound`` if nothing is published, ``AlreadyExists`` unless ``dest`` is absent or empty, ``CorruptData`` if
        an object was altered.
        """
        dest = as_folder(dest)
        for _ in range(_TRIES):
            artifact = self.newest()
            if artifact is None:
                raise NotFound(f"Nothing is published at {self._cell.where}: publish a snapshot first.")
            try:
                return self._fetch(artifact, dest)
            except _ObjectMissing as error:
                now = self.newest()
                if now is not None and now.location == artifact.location:
                    raise CorruptData(
                        f"{self._store.url}/{self._prefix}{artifact.location} is damaged: {error} The pointer names "
                        "it. Publish another snapshot."
                    ) from error
        raise Contended(f"{self._cell.where} was moved {_TRIES} times while a snapshot was fetched. Try again.")

    def _fetch(self, artifact: Artifact, dest: str) -> Snapshot:
        place = f"{self._prefix}{artifact.location}"
        manifest = bytes(self._get(f"{place}/{MANIFEST}"))
        if hashlib.sha256(manifest).hexdigest() != artifact.sha256:
            raise CorruptData(f"{self._store.url}/{place}/{MANIFEST} does not match its hash.")
        snapshot = decode_snapshot(manifest, f"{self._store.url}/{place}/{MANIFEST}", dest)
        if snapshot.cursor != artifact.cursor:
            raise CorruptData(f"{self._store.url}/{place}/{MANIFEST} has another cursor than the pointer.")
        with staged(dest, env=self._env) as hidden:
            self._env.disk.make_folders(f"{hidden}/{DATA}")
            names = (
                f"{place}/{_part_name(number, index)}"
                for number, file in enumerate(snapshot.files)
                for index in range(-(-file.size // artifact.part))
            )
            with contextlib.closing(_ahead(self._get, names, self._workers)) as parts:
                for file in snapshot.files:
                    self._write(f"{hidden}/{DATA}/{file.path}", file, parts, place)
            self._env.disk.write_new(f"{hidden}/{MANIFEST}", [manifest])
        return snapshot

    def _get(self, path: str) -> bytes | memoryview:
        try:
            return self._store.get(path).data
        except NotFound as error:
            raise _ObjectMissing(str(error)) from error

    def _write(self, path: str, file: SnapshotFile, parts: Iterator[bytes | memoryview], place: str) -> None:
        """Write one file from the next parts; the written bytes are hashed."""
        if "/" in file.path:
            self._env.disk.make_folders(path.rpartition("/")[0])
        digest, left = hashlib.sha256(), file.size
        opened = self._env.disk.open_append(path)
        try:
            while left > 0:
                piece = next(parts, b"")
                if not piece:
                    break
                digest.update(piece)
                opened.write([piece])
                left -= len(piece)
            opened.sync()
        finally:
            opened.close()
        if left or digest.hexdigest() != file.sha256:
            raise CorruptData(
                f"{self._store.url}/{place} is damaged: the parts of {file.path} do not match its hash. Publish "
                "another snapshot."
            )

    def trim(self) -> list[str]:
        """Delete payloads that were superseded or abandoned a grace period ago; returns their locations.

        Never a payload that the pointer names or may still name: an exporter whose unfinished payload is given up here
        cannot point at it any more, and uploads again.
        """
        if (pointer := self._pointer()) is None:
            return []
        now = cautious_now(self._store, f"{self._prefix}clock/now", clock=self._env.clock)
        before = now - round(self._grace * SECOND)
        newest: dict[str, int] = {}
        objects: dict[str, list[str]] = {}
        for item in self._store.list(f"{self._prefix}payloads/"):
            location = "/".join(item.path.removeprefix(self._prefix).split("/")[:3])
            if generation_of(location) is not None:
                newest[location] = max(newest.get(location, 0), item.modified)
                objects.setdefault(location, []).append(item.path)
        generation = abandoned(pointer, newest, before=before)
        if generation is not None:
            # First make sure that the pointer can never name them; only then delete them.
            pointer = self._cell.update(self._op(), lambda now: give_up(now, generation))
        old = [location for location, modified in newest.items() if modified <= before]
        sweep = plan_sweep(pointer, old, before=before)
        gone = [*sweep.superseded, *sweep.unlisted]
        # The manifest is deleted first ("M" sorts after the digits): a payload with a manifest is complete.
        for _ in _ahead(
            self._store.delete,
            (path for location in gone for path in reversed(objects.get(location, []))),
            self._workers,
        ):
            pass
        if sweep.superseded:
            self._cell.update(self._op(), lambda now: forget(now, sweep.superseded))
        return gone

    def _trim_quietly(self) -> None:
        try:
            self.trim()
        except StorageError as error:
            _LOGGER.warning("Superseded snapshots at %s stay for now: %s", self._cell.where, error)

    def _pointer(self) -> Pointer | None:
        try:
            return self._cell.read().value
        except NotFound:
            return None

    def _ensure_pointer(self) -> Pointer:
        """The pointer, created if there is none."""
        if (found := self._pointer()) is None:
            with contextlib.suppress(AlreadyExists):
                return self._cell.create(self._op(), Pointer())
            found = self._cell.read().value
        return found

    def _op(self) -> OpId:
        return OpId(self._env.chance.uuid())


def _check_history(log: LogReading | None, cursor: Cursor) -> None:
    """``Diverged`` if the log does not have the records of a snapshot at this cursor; nothing without a log."""
    if log is not None and not is_same_history(log, cursor):
        raise Diverged(
            f"{log!r} does not have the records of a snapshot at {cursor}: it is another log, or was restored from a "
            "copy since. Nothing was published: build the store again, and publish that."
        )


def _lost_location(log: LogReading | None, current: Artifact | None) -> str | None:
    """The location of the published snapshot, if it is of a history that the log has lost; otherwise None."""
    if log is None or current is None or current.cursor.log_id != log.log_id or is_same_history(log, current.cursor):
        return None
    return current.location


def _part_name(file: int, index: int) -> str:
    return f"{file:08d}-{index:08d}"


def _ahead(work: Callable[[T], R], items: Iterable[T], workers: int) -> Generator[R]:
    """Results of ``work`` in the order of the items, with at most ``workers`` running at once."""
    with ThreadPoolExecutor(workers, thread_name_prefix="strandline-artifacts") as pool:
        waiting: deque[Future[R]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) >= workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
