"""Dead letters: a record of each batch that could not be read."""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import fields, is_dataclass
from typing import Any
from uuid import UUID

from strandline.errors import NotFound
from strandline.log.queue.contract import Fetcher
from strandline.model.head import Descriptor, MetadataRange, MetadataRanges
from strandline.storage.store import ObjectStore


def keep_letter(
    store: ObjectStore, folder: str, fetcher: Fetcher, descriptor: Descriptor, *, reason: str, now: int
) -> str:
    """Durably keep a descriptor, and its object's bytes if there are any; returns where.

    The letter ``<folder>/<sequence>.json`` is written last: whoever finds it may rely on the ``.batch`` beside it
    that it names. Doing it again replaces both.
    """
    path = f"{folder}/{descriptor.sequence:020d}"
    kept: str | None = f"{path}.batch"
    try:
        store.put(f"{path}.batch", fetcher.raw(descriptor))
    except NotFound:
        kept = None
    store.put(f"{path}.json", encode_letter(descriptor, reason=reason, now=now, kept=kept))
    return f"{store.url}/{path}.json"


def encode_letter(descriptor: Descriptor, *, reason: str, now: int, kept: str | None) -> bytes:
    """The letter as JSON: the whole descriptor, why it is here, since when (microseconds), where its bytes are."""
    letter = {"descriptor": _plain(descriptor), "reason": reason, "at": now, "bytes": kept}
    return json.dumps(letter, indent=1).encode()


def _plain(value: object) -> Any:
    if isinstance(value, MetadataRange):
        return {"start": value.start, "ingested": value.ingested, "payload": b64encode(value.payload).decode()}
    if isinstance(value, tuple | MetadataRanges):
        return [_plain(item) for item in value]
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return str(value) if isinstance(value, UUID) else value
