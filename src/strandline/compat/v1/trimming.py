"""Trimming of a queue of version 1: by listing and by the clock, conservatively, since the format has no generations.

A producer lists an object within half the grace period after its upload began, or not at all. So an object that is
named like a batch, is a whole grace period old, and is not in a manifest that was read *after* the object was seen was
acknowledged, or will never be listed. Queues may share a data folder: what any other queue of it lists is kept, too
(:mod:`strandline.compat.v1.neighbours`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Final

from strandline.compat.v1.edits import is_batch_name, names_of, time_of
from strandline.compat.v1.manifest_format import decode_manifest
from strandline.compat.v1.neighbours import Neighbours
from strandline.errors import NotFound
from strandline.model.cursor import SECOND
from strandline.model.head import QueueManifest
from strandline.storage.env import Env
from strandline.storage.objects.store import ObjectInfo, ObjectStore, cautious_now

GRACE: Final = 600.0
"""Seconds that an unlisted object is kept."""


@dataclass(frozen=True, slots=True)
class QueueTrimResult:
    """Result of a round or a dry run: the deleted objects, and how many unlisted objects are kept for now."""

    garbage: tuple[ObjectInfo, ...] = ()
    waiting: int = 0
    dry_run: bool = False

    @property
    def size(self) -> int:
        """Bytes of the deleted objects."""
        return sum(item.size for item in self.garbage)


def names_in(manifest: QueueManifest) -> set[str]:
    """The names under which the listed objects may be."""
    return {name for entry in manifest.entries for name in names_of(entry.location)}


def unlisted(objects: Iterable[ObjectInfo], listed: Container[str], folder: str) -> list[ObjectInfo]:
    """The objects that are named like a batch in the data folder, and that are not listed."""
    inside = f"{folder}/"
    return [
        item
        for item in objects
        if item.path.startswith(inside) and is_batch_name(item.path[len(inside) :]) and item.path not in listed
    ]


def is_old(item: ObjectInfo, now: int, grace: float) -> bool:
    """Whether an object is older than the grace period by the store's time and, for a ULID, by its name.

    A time in the future is from a wrong clock: such an object is kept.
    """
    named = time_of(item.path)
    before = now - int(grace * SECOND)
    return item.modified <= before and (named is None or named <= before)


@dataclass(slots=True)
class QueueTrimmer:
    """Trims one queue. With ``remember`` it deletes only objects that it has seen unlisted for a grace period.

    Then a batch that was just acknowledged is kept for readers that hold its descriptor, and no wall clock has to be
    right. Without it, one round suffices: for a command.
    """

    store: ObjectStore
    manifest: str
    folder: str
    grace: float
    env: Env
    remember: bool
    _seen: dict[str, float] = field(default_factory=dict)
    _neighbours: Neighbours = field(init=False)

    def __post_init__(self) -> None:
        self._neighbours = Neighbours(self.store, self.manifest, self.folder)

    def run(self, *, dry_run: bool = False, on_progress: Callable[[int], None] | None = None) -> QueueTrimResult:
        """One round. ``on_progress`` is called with the number of objects deleted so far.

        Where there is no manifest nothing is deleted: it may be lost, or its path mistyped.
        """
        begun = self.env.clock.monotonic()
        # By both clocks: a clock that is ahead would make new uploads look like leftovers.
        now = (
            self.env.clock.now()
            if dry_run
            else cautious_now(self.store, f"{self.folder}-clock/now", clock=self.env.clock)
        )
        # In this order. If the manifest were read before the listing, it would lack objects that were listed in
        # between, and a slow trimmer would find those objects old and unlisted.
        objects = list(self.store.list(f"{self.folder}/"))
        manifest = self._read_manifest()
        if manifest is None:
            return QueueTrimResult(dry_run=dry_run)
        listed = names_in(manifest) | {self.manifest}
        listed.update(*map(names_in, self._neighbours.read(item for item in objects if item.path not in listed)))
        free = unlisted(objects, listed, self.folder)
        garbage = [item for item in free if is_old(item, now, self.grace)]
        if self.remember:
            # An object counts as unlisted only from now on, and only until the start of the round.
            seen = self.env.clock.monotonic()
            self._seen = {item.path: self._seen.get(item.path, seen) for item in free}
            garbage = [item for item in garbage if begun - self._seen[item.path] >= self.grace]
        for deleted, item in enumerate(garbage, 1):
            if not dry_run:
                self.store.delete(item.path)
            if on_progress is not None:
                on_progress(deleted)
        return QueueTrimResult(tuple(garbage), len(free) - len(garbage), dry_run)

    def _read_manifest(self) -> QueueManifest | None:
        try:
            data = self.store.get(self.manifest).data
        except NotFound:
            return None
        return decode_manifest(data, f"{self.store.url}/{self.manifest}")
