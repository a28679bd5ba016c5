"""Queues of version 1 for tests: filled as other implementations do, and read without the package's own code."""

from __future__ import annotations

import struct
from uuid import UUID

import pyarrow as pa

from strandline.compat.v1.log import QueueLog, open_queue
from strandline.compat.v1.manifest_format import ManifestCodec, decode_manifest
from strandline.model.head import MetadataRange, QueueEntry, QueueManifest, WriterId
from strandline.model.stamp import Stamped
from strandline.storage.env import Env
from strandline.storage.objects.store import ObjectStore
from strandline.testing.clock import ManualClock, SeededChance

GRACE = 600.0


def encode_manifest(manifest: QueueManifest) -> bytes:
    """The bytes of a manifest, as a writer that has written nothing before encodes them."""
    return ManifestCodec().encode(Stamped(manifest))


def opened(store: ObjectStore, *, clock: ManualClock | None = None, seed: int = 1, **options) -> QueueLog:
    return open_queue(store, env=Env(clock=clock or ManualClock(), chance=SeededChance(seed)), **options)


def values(*entries: bytes) -> pa.Table:
    return pa.table({"value": pa.array(entries, pa.binary())})


def writer(number: int) -> WriterId:
    return WriterId(UUID(int=number))


def append(log: QueueLog, *entries: bytes, by: int = 1, number: int, expect: int | None = None):
    return log.append(values(*entries), writer=writer(by), number=number, expect=expect).result(120)


def foreign_batch(*entries: bytes) -> bytes:
    block = b"".join(struct.pack("<I", len(entry)) + entry for entry in entries)
    return block + struct.pack("<BIH", 0, len(entries), 1)


def fill(store: ObjectStore, *batches: tuple[bytes, ...], first: int = 0, epoch: int = 0) -> QueueManifest:
    """A queue as another implementation leaves it: batches named as it pleases, numbering from ``first``."""
    entries = []
    for place, entries_of in enumerate(batches):
        location = f"ingest/part-{first + place}.batch"
        store.put(location, foreign_batch(*entries_of))
        metadata = (MetadataRange(0, 1_000_000 * (first + place), b"m%d" % place),)
        entries.append(QueueEntry(first + place, location, metadata))
    manifest = QueueManifest(tuple(entries), first + len(batches), epoch)
    store.put("ingest/manifest", encode_manifest(manifest))
    return manifest


def manifest_in(store: ObjectStore, path: str = "ingest/manifest") -> QueueManifest:
    return decode_manifest(store.get(path).data, path)


def sequences(log: QueueLog) -> list[int]:
    return [entry.sequence for entry in log.manifest().entries]


def content(log: QueueLog) -> list[tuple[int, bytes]]:
    """Offset and value of everything that is listed."""
    rows = [row for batch in log.read() for row in batch.to_pylist()]
    return [(row["offset"], row["value"]) for row in rows]


def paths(store: ObjectStore, prefix: str = "") -> list[str]:
    return [item.path for item in store.list(prefix)]
