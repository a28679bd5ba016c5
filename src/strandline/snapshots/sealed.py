"""Sealed folders: ``data/``, and ``MANIFEST.json`` with the cursor and the size and hash of every file.

A snapshot is complete or absent: it is written under a hidden name, opened once to verify it, and renamed last. An
import trusts nothing: it copies the files, verifies the hashes of the copies, opens them, and renames them last.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Final

from strandline.errors import CorruptData, InvalidInput, NotFound, UnsupportedVersion
from strandline.formats.snapshot.manifest import decode_snapshot, encode_snapshot
from strandline.model.addresses import Address, as_folder
from strandline.model.arguments import checked
from strandline.model.cursor import Cursor
from strandline.model.json_values import LARGEST
from strandline.model.snapshot import Snapshot, SnapshotFile
from strandline.snapshots.staging import files_below, set_aside, staged, sweep
from strandline.storage.disk import Disk, FolderRow, below
from strandline.storage.env import SYSTEM, Env

MANIFEST: Final = "MANIFEST.json"
DATA: Final = "data"

_LOGGER = logging.getLogger(__name__)
_READ_BYTES: Final = 1 << 20
"""Bytes per read while hashing."""
_NUMBER: Final = re.compile(r"[0-9]{20}")


def seal(
    folder: str,
    *,
    kind: str,
    kind_version: int,
    cursor: Cursor | None,
    fill: Callable[[str], object],
    verify: Callable[[str], Cursor],
    env: Env = SYSTEM,
) -> Snapshot:
    """Create a snapshot: durable, complete and verified when this returns; on failure nothing is left.

    ``fill`` writes the data to an empty folder; its files are synced here. ``verify`` opens that folder without
    changing a file, and returns its cursor. ``AlreadyExists`` unless ``folder`` is absent or empty, ``CorruptData`` if
    the data has another cursor than ``cursor`` (None if it is known only from the data).
    """
    with staged(folder, env=env) as hidden:
        data = f"{hidden}/{DATA}"
        env.disk.make_folders(data)
        fill(data)
        filled = files_below(data, disk=env.disk)
        _refuse_links(filled, folder, shared=True)
        held = verify(data)
        if cursor is not None:
            _same_cursor(held, cursor, folder)
        if _contents(files_below(data, disk=env.disk)) != _contents(filled):
            raise InvalidInput(
                f"Opening the data of {folder} to verify it changed its files, so it was not sealed: "
                "open them read-only."
            )
        # Hash after the verification: the hashes are of the final files.
        files = []
        for path in filled:
            env.disk.sync_file(f"{data}/{path}")
            files.append(_hashed(f"{data}/{path}", path, disk=env.disk))
        snapshot = Snapshot(folder, kind, kind_version, held, env.clock.now(), tuple(files))
        env.disk.write_new(f"{hidden}/{MANIFEST}", [encode_snapshot(snapshot)])
        if replace(read_snapshot(hidden, env=env), folder=folder) != snapshot:
            raise CorruptData(f"The manifest of {folder} was not read back as it was written; nothing was sealed.")
    return snapshot


def read_snapshot(folder: Address, *, env: Env = SYSTEM) -> Snapshot:
    """Read the manifest only. ``NotFound`` if there is no snapshot."""
    folder = as_folder(folder)
    path = f"{folder}/{MANIFEST}"
    try:
        data = env.disk.read(path, 0, LARGEST + 1)
    except NotFound as error:
        raise NotFound(f"There is no snapshot at {folder}: it has no {MANIFEST}.") from error
    return decode_snapshot(data, path, folder)


def check_snapshot(folder: Address, *, env: Env = SYSTEM, shared: bool = True) -> Snapshot:
    """Verify every file against the manifest: no file is missing, extra, altered or a link.

    ``CorruptData`` names the first violation. Without ``shared``, files with a second hard link are refused, too: they
    could be altered by that name.
    """
    folder = as_folder(folder)
    snapshot = _inspected(folder, env=env, shared=shared)
    for file in snapshot.files:
        _same_file(_hashed(f"{folder}/{DATA}/{file.path}", file.path, disk=env.disk), file, folder)
    return snapshot


def unpack(
    folder: str,
    dest: str,
    *,
    kind: str,
    kind_version: int,
    verify: Callable[[str], Cursor],
    shared: bool = False,
    env: Env = SYSTEM,
) -> Snapshot:
    """Copy the data of a snapshot to ``dest``; a failure leaves ``dest`` unchanged.

    ``verify`` opens the copy and returns its cursor. Refused are: another kind or version (``InvalidInput``,
    ``UnsupportedVersion``); files that are missing, extra, altered or links, paths outside ``data/``, another cursor
    than the manifest's (``CorruptData``); a destination that is neither absent nor empty (``AlreadyExists``).
    ``shared`` accepts hard links, for kinds that share files with a running store.
    """
    snapshot = read_snapshot(folder, env=env)
    check_kind(snapshot, kind, kind_version)
    with staged(dest, env=env) as hidden:
        if _inspected(folder, env=env, shared=shared) != snapshot:
            raise CorruptData(f"The snapshot {folder} was changed while it was read; nothing was imported. Try again.")
        for file in snapshot.files:
            target = below(hidden, *file.path.split("/"))
            if "/" in file.path:
                env.disk.make_folders(target.rpartition("/")[0])
            env.disk.copy(f"{folder}/{DATA}/{file.path}", target)
            # Hash the copy: the original may change meanwhile.
            _same_file(_hashed(target, file.path, disk=env.disk), file, folder)
        _same_cursor(verify(hidden), snapshot.cursor, folder)
    return snapshot


def check_kind(snapshot: Snapshot, kind: str, kind_version: int) -> None:
    """Raise unless the snapshot is of this kind and version."""
    if snapshot.kind != kind:
        raise InvalidInput(
            f"The snapshot {snapshot.folder} is of kind {snapshot.kind!r} and cannot be imported as {kind!r}: "
            "import it into a store of its own kind."
        )
    if snapshot.kind_version != kind_version:
        raise UnsupportedVersion(
            f"The snapshot {snapshot.folder} is of version {snapshot.kind_version} of {kind!r}, and this program reads "
            f"version {kind_version}: use the strandline that wrote it, or take another snapshot."
        )


@checked
def snapshot_folder(folder: Address, number: int) -> str:
    """The folder of the snapshot with a number."""
    return f"{as_folder(folder)}/{number:020d}"


@checked
def next_number(folder: Address, *, env: Env = SYSTEM) -> int:
    """The highest number in the folder plus one, damaged snapshots included; 1 in an empty folder.

    Two concurrent callers get the same number: the second to seal gets ``AlreadyExists`` and asks again.
    """
    folder = as_folder(folder)
    return max(_numbers(folder, disk=env.disk), default=0) + 1


@checked
def newest_snapshot(folder: Address, *, env: Env = SYSTEM) -> Snapshot | None:
    """The valid snapshot with the highest number; None without any. Damaged ones are skipped with a warning."""
    folder = as_folder(folder)
    return next(_valid(folder, env=env), None)


@checked
def trim(folder: Address, *, keep: int, env: Env = SYSTEM) -> list[int]:
    """Delete all but the newest ``keep`` valid snapshots; returns the deleted numbers.

    Damaged ones do not count; they are deleted once ``keep`` valid ones are newer.
    """
    folder = as_folder(folder)
    if keep < 1:
        raise InvalidInput(f"Trimming {folder} to {keep} snapshots would leave none; keep at least 1.")
    kept = [int(snapshot.folder.rpartition("/")[2]) for snapshot in islice(_valid(folder, env=env), keep)]
    if len(kept) < keep:
        return []
    gone = [number for number in _numbers(folder, disk=env.disk) if number < kept[-1]]
    for number in gone:
        set_aside(snapshot_folder(folder, number), env=env)
    sweep(folder, env=env)
    return gone


def _numbers(folder: str, *, disk: Disk) -> list[int]:
    return [int(row.name) for row in disk.scan(folder) if row.is_folder and _NUMBER.fullmatch(row.name)]


def _valid(folder: str, *, env: Env) -> Iterator[Snapshot]:
    for number in sorted(_numbers(folder, disk=env.disk), reverse=True):
        try:
            yield check_snapshot(snapshot_folder(folder, number), env=env)
        except (CorruptData, UnsupportedVersion, NotFound) as error:
            _LOGGER.warning("A snapshot is skipped: %s", error)


def _inspected(folder: str, *, env: Env, shared: bool) -> Snapshot:
    """The snapshot, after a check of names, sizes and links, but not of content."""
    snapshot = read_snapshot(folder, env=env)
    rows = {row.name: row for row in env.disk.scan(folder)}
    for name in (MANIFEST, DATA):
        row = rows.pop(name, None)
        if row is None:
            raise _damaged(folder, f"it has no {name}")
        if row.is_link:
            raise _damaged(folder, f"{name} is a link")
    found = files_below(f"{folder}/{DATA}", disk=env.disk)
    _refuse_links(found, folder, shared=shared)
    listed = {file.path: file for file in snapshot.files}
    for path in sorted([*rows, *(f"{DATA}/{path}" for path in found.keys() - listed.keys())]):
        raise _damaged(folder, f"{path} is not in the manifest")
    for path, file in listed.items():
        if path not in found:
            raise _damaged(folder, f"{DATA}/{path} is missing")
        if found[path].size != file.size:
            raise _damaged(folder, f"{DATA}/{path} has {found[path].size} bytes and should have {file.size}")
    return snapshot


def _contents(found: dict[str, FolderRow]) -> dict[str, FolderRow]:
    """The rows without their link counts: a running store may drop its link to a shared file at any time."""
    return {path: row._replace(links=1) for path, row in found.items()}


def _refuse_links(found: dict[str, FolderRow], folder: str, *, shared: bool) -> None:
    for path, row in found.items():
        if row.is_link:
            raise _damaged(folder, f"{DATA}/{path} is a link")
        if row.links < 1:
            raise _damaged(folder, f"{DATA}/{path} is no plain file")
        if row.links > 1 and not shared:
            raise _damaged(folder, f"{DATA}/{path} has a second hard link, through which it could be altered")


def _hashed(path: str, name: str, *, disk: Disk) -> SnapshotFile:
    digest, size = hashlib.sha256(), 0
    while piece := disk.read(path, size, _READ_BYTES):
        digest.update(piece)
        size += len(piece)
    return SnapshotFile(name, size, digest.hexdigest())


def _same_file(found: SnapshotFile, listed: SnapshotFile, folder: str) -> None:
    if found != listed:
        raise _damaged(folder, f"{DATA}/{listed.path} was altered: its hash is not the manifest's")


def _same_cursor(found: Cursor, expected: Cursor, folder: str) -> None:
    if found != expected:
        raise _damaged(folder, f"its data holds the cursor {found} instead of {expected}")


def _damaged(folder: str, what: str) -> CorruptData:
    return CorruptData(f"The snapshot {folder} is damaged: {what}. Nothing was changed; take another snapshot.")
