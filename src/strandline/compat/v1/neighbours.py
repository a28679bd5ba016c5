"""Other queues of version 1 in the same data folder: their manifests, so that no trimmer deletes their batches.

A manifest in the data folder is recognised by its content. One elsewhere is known by a *registration*: a small object
in the data folder that names the manifest, written before the queue's first change. Only this package writes
registrations; a queue whose manifest is elsewhere, and that only other implementations ever change, is not found.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from strandline.compat.v1.batch_format import decode_values
from strandline.compat.v1.edits import checked_path, is_batch_name
from strandline.compat.v1.manifest_format import decode_manifest, may_be_manifest
from strandline.errors import CorruptData, NotFound, UnsupportedVersion
from strandline.formats.json.checked import damage, decode_checked, encode_checked
from strandline.model.head import QueueManifest
from strandline.storage.objects.store import LARGEST_OBJECT, ObjectInfo, ObjectStore

_KIND: Final = "queue-in-folder"
_VERSION: Final = 1
_REGISTRATION: Final = re.compile(r"queue-[0-9a-f]{16}\.json")


@dataclass(slots=True)
class Neighbours:
    """The other queues in the data folder of one queue."""

    store: ObjectStore
    manifest: str
    folder: str
    _files: frozenset[ObjectInfo] = field(default=frozenset(), init=False)
    """Objects that were read, and are no manifests."""

    def register(self) -> None:
        """Write the registration of this queue, unless its manifest is in the data folder, where it is found anyway."""
        if not self.manifest.startswith(f"{self.folder}/"):
            digest = hashlib.blake2b(self.manifest.encode(), digest_size=8).hexdigest()
            self.store.put(f"{self.folder}/queue-{digest}.json", encode_registration(self.manifest))

    def read(self, objects: Iterable[ObjectInfo]) -> list[QueueManifest]:
        """The manifests of the other queues, by a listing of the data folder without what this queue lists.

        ``CorruptData`` if one is damaged, ``NotFound`` if a registered one is missing, ``UnsupportedVersion`` if one is
        of a later version: which batches it lists is unknown then, and nothing may be deleted.
        """
        strangers = [item for item in objects if not self._is_known(item)]
        found = [(item, self._content(item)) for item in strangers if item not in self._files]
        self._files = frozenset(strangers) - {item for item, data in found if data is not None}
        return [manifest for item, data in found if data is not None for manifest in self._manifests(item, data)]

    def _is_known(self, item: ObjectInfo) -> bool:
        """Whether an object is this queue's manifest, or is named like a batch of this folder or of one below."""
        names = item.path[len(self.folder) + 1 :].split("/")
        return item.path == self.manifest or any(is_batch_name("/".join(names[-depth:])) for depth in (1, 2))

    def _content(self, item: ObjectInfo) -> bytes | memoryview | None:
        """The object's bytes, if it is a manifest or a registration."""
        if item.size > LARGEST_OBJECT:
            return None
        try:
            data = self.store.get(item.path).data
        except NotFound:
            return None
        return data if self._is_registration(item) or (may_be_manifest(data) and not _is_batch(data)) else None

    def _is_registration(self, item: ObjectInfo) -> bool:
        return _REGISTRATION.fullmatch(item.path[len(self.folder) + 1 :]) is not None

    def _manifests(self, item: ObjectInfo, data: bytes | memoryview) -> Iterator[QueueManifest]:
        where = f"{self.store.url}/{item.path}"
        if not self._is_registration(item):
            yield decode_manifest(data, where)
            return
        path = decode_registration(bytes(data), where)
        if path != self.manifest:
            try:
                yield decode_manifest(self.store.get(path).data, f"{self.store.url}/{path}")
            except NotFound as error:
                raise NotFound(
                    f"{self.store.url}/{path} is missing, the manifest of another queue with batches in {self.folder}: "
                    f"nothing was deleted. Restore it, or delete {where} if that queue is gone."
                ) from error


def _is_batch(data: bytes | memoryview) -> bool:
    """Whether these bytes are a whole batch: one that ends in zeros looks like a manifest at its end."""
    try:
        decode_values(data, "")
    except (CorruptData, UnsupportedVersion):
        return False
    return True


def encode_registration(manifest: str) -> bytes:
    """The registration of the queue with this manifest."""
    return encode_checked(_KIND, _VERSION, {"manifest": manifest})


def decode_registration(data: bytes, where: str) -> str:
    """The path of the manifest that a registration names; ``CorruptData`` naming ``where``."""
    with damage(
        where,
        "It names the manifest of a queue with batches in this folder: restore it, or delete it if there is no such "
        "queue.",
    ):
        return checked_path(msgspec.convert(decode_checked(data, _KIND, _VERSION)["manifest"], str), "manifest")
