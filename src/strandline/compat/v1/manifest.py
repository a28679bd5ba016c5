"""Manifest cell of a version 1 queue: one object, changed by compare-and-set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from strandline.compat.v1.format import ManifestCodec
from strandline.errors import AlreadyExists, Contended, NotFound, OutcomeUnknown
from strandline.log.queue.contract import Writes
from strandline.model.head import QueueManifest
from strandline.model.stamp import OpId
from strandline.storage.cell import StoreCell
from strandline.storage.clock import Chance, Clock
from strandline.storage.metrics import Role, count_write
from strandline.storage.store import ObjectStore

_CREATIONS: Final = 16
"""How often an update begins again because the manifest was created, or removed, at the same moment."""


class ManifestCell:
    """The manifest of one queue. An absent object is an empty manifest, and is created by the first change.

    Edits may run several times, also after they took effect: they have to recognise that (see
    :mod:`strandline.compat.v1.edits`).
    """

    def __init__(self, store: ObjectStore, path: str, *, clock: Clock, chance: Chance) -> None:
        """Use the object ``path``; nothing is read or written yet."""
        self._chance = chance
        self._codec = ManifestCodec()
        self._cell: StoreCell[QueueManifest] = StoreCell(store, path, self._codec, clock=clock, chance=chance)

    @property
    def where(self) -> str:
        """The object's full name, for messages."""
        return self._cell.where

    def read(self) -> QueueManifest:
        """The manifest now."""
        try:
            return self._cell.read().value
        except NotFound:
            return QueueManifest()

    def update(self, edit: Callable[[QueueManifest], QueueManifest], *, role: Role = "consumer") -> QueueManifest:
        """Apply an edit; returns a manifest in which it was done, by this call or, as far as it can tell, before.

        What the edit raises on a current manifest is raised here and changes nothing. ``Contended`` after too many
        lost races, ``OutcomeUnknown`` if the store failed and could not be read back: both may be repeated.
        """
        for attempt in range(1, _CREATIONS + 1):
            # Each time a new operation: the object remembers none, the edit finds out by itself.
            try:
                return self._cell.update(OpId(self._chance.uuid()), edit, role=role)
            except NotFound:
                empty = QueueManifest()
                first = edit(empty)
            if first is empty:
                return empty
            try:
                # One try: an edit may depend on the time, so that it has to run again before each write.
                created = self._cell.create(OpId(self._chance.uuid()), first, attempts=1)
            except AlreadyExists:
                continue  # someone was faster; or this was, and its answer was lost
            except OutcomeUnknown:
                if attempt == _CREATIONS:
                    raise
            else:
                count_write(role, landed=True)
                return created
        raise Contended(f"{self.where} was created and removed at each of {_CREATIONS} tries. Try again.")

    def writes(self) -> Writes:
        """Conditional writes so far, and how many of them lost a race."""
        return Writes(self._codec.encoded, self._cell.conflicts)
