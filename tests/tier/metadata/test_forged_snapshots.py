"""Snapshots of segment caches that were forged, hashes and all: replayed, never believed, and nothing crashes."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from uuid import UUID

import pyarrow as pa
import pytest

from strandline.snapshots.sealed import MANIFEST
from strandline.tier.metadata.cache import SegmentCache
from strandline.tier.metadata.snapshot import MetadataSnapshots
from strandline.tier.metadata.state import PartitionCopy
from tests.fuzz.formats import TABLES, read_cache, stream_of  # the tables of a cache with five segments
from tests.fuzz.mutation import in_place
from tests.fuzz.targets import decoding


def saved(folder: Path) -> MetadataSnapshots:
    snapshots = MetadataSnapshots(str(folder), 1, UUID(int=7))
    snapshots.save({0: PartitionCopy(9, SegmentCache.from_tables(TABLES).to_tables())})
    return snapshots


def forge(folder: Path, change: object) -> None:
    """Change the bytes of the partition's file, and let the manifest vouch for them."""
    (snapshot,) = (place for place in folder.iterdir() if place.is_dir())
    (file,) = snapshot.glob("data/*.arrow")
    data = bytearray(file.read_bytes())
    change(data)  # type: ignore[operator]
    file.write_bytes(data)
    manifest = json.loads((snapshot / MANIFEST).read_bytes())
    for row in manifest["files"]:
        if row["path"] == file.name:
            row |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (snapshot / MANIFEST).write_text(json.dumps(manifest))


def test_a_saved_snapshot_is_loaded(tmp_path: Path) -> None:
    snapshots = saved(tmp_path)
    ((position, cache),) = snapshots.load().values()
    assert position == 9
    assert cache.to_tables() == TABLES


def test_a_forged_table_is_replayed_and_never_read_past_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    snapshots = saved(tmp_path)
    # The offsets of the names of partitions: what begins there would end a gigabyte further on.
    name = b"orders"

    def change(data: bytearray) -> None:
        at = data.index(name)
        ends = data.rindex((len(name)).to_bytes(4, "little"), 0, at)
        data[ends : ends + 4] = (1 << 30).to_bytes(4, "little")

    forge(tmp_path, change)
    assert snapshots.load() == {}
    assert "The table of partitions in" in caplog.text, (
        "it was found where the file is read, before anything else looks"
    )
    assert "Offset invariant failure: offset for slot 1 out of bounds: 1073741824" in caplog.text


def test_a_table_of_other_columns_is_replayed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    snapshots = saved(tmp_path)
    other = stream_of(pa.table({"x": pa.nulls(1000)}))
    forge(tmp_path, lambda data: data.__setitem__(slice(0, len(other)), other))
    assert snapshots.load() == {}
    assert "The table of partitions in" in caplog.text
    assert "but ['x']" in caplog.text


@pytest.mark.matrix
def test_a_thousand_damaged_tables_give_a_cache_or_are_refused() -> None:
    dice = random.Random(3)
    seen = set()
    with decoding(read_cache)() as attempt:
        for _ in range(1000):
            data = bytearray(stream_of(TABLES["segments"]))
            in_place(data, dice)
            seen.add(attempt(bytes(data)))
    assert seen == {"fine", "CorruptData"}
