"""Bootstrap: from the newest snapshot to a store that can follow the log."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from strandline.errors import AlreadyExists, CursorExpired, InvalidInput, NotFound, StorageError
from strandline.log.addressed import log_at
from strandline.log.contract import READING, Log, require
from strandline.log.slots.pin import SlotPin
from strandline.model.addresses import Address, as_folder
from strandline.model.arguments import checked
from strandline.model.cursor import Cursor, Limit
from strandline.model.sink import Store
from strandline.model.snapshot import Snapshot
from strandline.snapshots.artifacts import Artifacts
from strandline.snapshots.sealed import MANIFEST, check_snapshot, newest_snapshot
from strandline.snapshots.staging import check_free, scratch_folder
from strandline.storage.disk import Disk
from strandline.storage.env import SYSTEM, Env

_LOGGER = logging.getLogger(__name__)
_ONE: Final = Limit(batches=1)


S_co = TypeVar("S_co", bound=Store, covariant=True)
S = TypeVar("S", bound=Store)


class StoreKind(Protocol[S_co]):
    """A kind of store, such as the class ``AppendLogStore`` itself."""

    def open(self, folder: str, /, *args: Any, **options: Any) -> S_co:
        """Open the store in a folder."""

    def import_from(self, snapshot: str, dest: str, /, *args: Any, **options: Any) -> S_co:
        """Import a sealed folder into a folder that is absent or empty, and open the store."""


@checked
def bootstrap(
    source: Artifacts | Address,
    dest: Address,
    into: StoreKind[S],
    *,
    log: Log | Address | None = None,
    slot: str | None = None,
    replace: bool = False,
    env: Env = SYSTEM,
    **options: Any,
) -> S:
    """A store at ``dest`` that can follow the log: imported from the newest snapshot, or the existing one.

    ``source`` is the address of published snapshots, a folder of numbered ones, or a single one. An existing store at
    ``dest`` is used, and that is logged, if ``log`` still retains its cursor (not checked without ``log``); otherwise,
    and always with ``replace``, it is replaced after the import. ``options`` are for opening and importing.

    With ``log`` and ``slot`` the slot pins the records that the store needs before anything is read: it is created if
    missing, and reset if invalidated, which fences its holder. A created slot is dropped if the bootstrap fails, and
    expires if the process is killed; once the store exists, it pins for good.

    ``NotFound`` if there is no snapshot, ``CursorExpired`` if the log no longer retains the records after the newest,
    ``Diverged`` if it, or the store at ``dest``, is of another log. On failure ``dest`` is unchanged.
    """
    if slot is not None and log is None:
        raise InvalidInput(f"Slot {slot!r} cannot be pinned without its log: pass log=.")
    with log_at(log, changes_slots=slot is not None) as found:
        if found is not None:
            require(found, "followed", *READING, slots=slot is not None)
        dest = as_folder(dest)
        source = source if isinstance(source, Artifacts) else as_folder(source)
        there = _is_occupied(dest, env.disk)
        if there and not replace:
            store = _usable(dest, into, found, slot, options, env)
            if store is not None:
                at = store.position().cursor
                _LOGGER.info("The store at %s is at %s and is used as it is; no snapshot was imported.", dest, at)
                return store
        with contextlib.ExitStack() as held:
            pinned = None
            if found is not None and slot is not None:
                pinned = held.enter_context(SlotPin(found, slot, env))
            snapshot = held.enter_context(_local_snapshot(source, dest, found, pinned, env=env))
            with _moved_aside(dest, env=env) if there else contextlib.nullcontext():
                store = into.import_from(snapshot.folder, dest, **options)
            _LOGGER.info("The store at %s was imported from a snapshot at %s.", dest, snapshot.cursor)
            try:
                if pinned is not None:
                    pinned.keep(str(env.chance.uuid()))
            except BaseException:
                store.close()
                raise
            return store


def _is_occupied(dest: str, disk: Disk) -> bool:
    try:
        check_free(dest, disk=disk)
    except AlreadyExists:
        return True
    return False


def _usable(
    dest: str, into: StoreKind[S], log: Log | None, slot: str | None, options: dict[str, Any], env: Env
) -> S | None:
    """The store at ``dest``, pinned by the slot, if it can follow the log; None otherwise.

    ``Diverged`` if it follows another log. On any error the store is closed.
    """
    store = into.open(dest, **options)
    try:
        position = store.position()
        if position.cursor is None or position.resync is not None:
            store.close()
            return None
        if log is not None:
            log.plan(position.cursor, _ONE)
            if slot is not None:
                pin = SlotPin(log, slot, env)
                pin.hold(position.cursor, is_stored=True)
                pin.keep(str(env.chance.uuid()))  # a bootstrap that was killed behind its import has left it to expire
    except CursorExpired as error:
        _LOGGER.warning("The store at %s is too old to resume and will be replaced: %s", dest, error)
        store.close()
        return None
    except BaseException:
        store.close()
        raise
    return store


@contextlib.contextmanager
def _local_snapshot(
    source: Artifacts | str, dest: str, log: Log | None, pinned: SlotPin | None, *, env: Env
) -> Iterator[Snapshot]:
    """The newest snapshot as a local folder; the log retains, and the slot pins, the records after it."""
    if isinstance(source, Artifacts):
        artifact = source.newest()
        if artifact is None:
            raise _none_at(repr(source))
        # Before the download: if a newer snapshot is published meanwhile, the slot only pins more.
        _pin_records_after(log, pinned, artifact.cursor)
        with scratch_folder(f"{dest}.fetched", env=env) as hidden:
            yield source.fetch(f"{hidden}/snapshot")
        return
    if any(row.name == MANIFEST for row in env.disk.scan(source)):
        snapshot: Snapshot | None = check_snapshot(source, env=env)
    else:
        snapshot = newest_snapshot(source, env=env)
    if snapshot is None:
        raise _none_at(source)
    _pin_records_after(log, pinned, snapshot.cursor)
    yield snapshot


def _none_at(where: str) -> NotFound:
    return NotFound(
        f"There is no snapshot at {where}: publish one from a consumer that has caught up, or let the new consumer "
        "read the log from its beginning if all of it is retained."
    )


def _pin_records_after(log: Log | None, pinned: SlotPin | None, cursor: Cursor) -> None:
    """Pin the records after a snapshot; ``CursorExpired`` if the log no longer retains them."""
    if log is None:
        return
    try:
        log.plan(cursor, _ONE)  # Diverged if the cursor is of another log, which a slot's position does not show
        if pinned is not None:
            pinned.hold(cursor)
    except CursorExpired as error:
        raise CursorExpired(
            f"The newest snapshot is at {cursor}, but the log retains records from offset {log.bounds().first} "
            "on: nothing was imported. Publish a snapshot of a consumer that has caught up, and let a slot pin the log "
            "until then."
        ) from error


@contextlib.contextmanager
def _moved_aside(dest: str, *, env: Env) -> Iterator[None]:
    """Move ``dest`` away for the block; removed if the block succeeds, restored if it fails."""
    place = Path(dest).absolute()
    with scratch_folder(dest, env=env) as hidden:
        aside = f"{hidden}/replaced"
        env.disk.rename(str(place), aside)
        try:
            yield
        except BaseException:
            with contextlib.suppress(StorageError):
                env.disk.rename(aside, str(place))
            raise
