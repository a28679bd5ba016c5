"""Names of the sources that an object log has ingested, as objects beside it: for people, and for nothing else.

The log itself remembers a hash of a source's identity, and its position.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final
from uuid import UUID

from strandline.errors import NotFound, StorageError
from strandline.log.object.log import ObjectLog
from strandline.log.writers.source import source_writer
from strandline.model.head import WriterId
from strandline.storage.objects.store import ObjectStore

_FOLDER: Final = "sources/"
_LONGEST: Final = 1000


def note_source(target: ObjectLog, source: Any) -> None:
    """Store the name of a source that is ingested for the first time. An ingest goes on without it."""
    name = next((found for field in ("url", "name") if isinstance(found := getattr(source, field, None), str)), None)
    note_name(target, source.log_id, name or repr(source))


def note_name(target: ObjectLog, source_id: UUID, name: str) -> None:
    """Store the name of a source. Its records are appended, too, if that fails."""
    with contextlib.suppress(StorageError):
        target.store.put(_path(source_writer(str(source_id))), [name[:_LONGEST].encode()])


def forget_name(store: ObjectStore, writer: UUID) -> None:
    """Delete the name of a source that the log has forgotten."""
    with contextlib.suppress(StorageError):
        store.delete(_path(WriterId(writer)))


def source_names(store: ObjectStore) -> dict[str, str]:
    """The names under which sources were first ingested, by their ids."""
    found = {}
    for item in store.list(_FOLDER):
        with contextlib.suppress(NotFound):  # forgotten meanwhile
            found[item.path.removeprefix(_FOLDER)] = bytes(store.get(item.path).data).decode(errors="replace")
    return found


def _path(writer: WriterId) -> str:
    return f"{_FOLDER}{writer}"
