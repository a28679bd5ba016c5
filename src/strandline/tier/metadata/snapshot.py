"""Snapshots of the metadata partitions: the cache of each as tables, with its position.

Numbered sealed folders; the newest valid one wins. ``data/`` has ``positions.json``, and per partition one file of
concatenated Arrow IPC streams. The manifest's cursor counts the events of all partitions.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

import pyarrow as pa

from strandline.errors import InvalidInput, StorageError
from strandline.formats.arrow.stream import StreamLayout, read_stream
from strandline.formats.json.checked import damage, decode_checked, encode_checked
from strandline.log.topic.contract import NO_TOPIC
from strandline.model.cursor import Cursor
from strandline.model.json_values import LARGEST, natural
from strandline.snapshots.sealed import DATA, check_kind, newest_snapshot, next_number, seal, snapshot_folder
from strandline.snapshots.staging import set_aside
from strandline.storage.env import SYSTEM, Env
from strandline.tier.metadata.cache import SegmentCache
from strandline.tier.metadata.cache_tables import SCHEMAS
from strandline.tier.metadata.state import PartitionCopy

KIND: Final = "segment-cache"
KIND_VERSION: Final = 1
POSITIONS: Final = "positions.json"

_LAYOUTS: Final = {name: StreamLayout.of(schema) for name, schema in SCHEMAS.items()}
_LOGGER = logging.getLogger(__name__)
_KEPT: Final = 2
"""How many snapshots are kept: if the newest is damaged, the one before it saves most of the replay."""


@dataclass(frozen=True, slots=True)
class MetadataSnapshots:
    """The snapshots in one folder. One thread saves at a time; two managers may share the folder."""

    folder: str
    count: int
    """Number of metadata partitions: another number distributes the segments differently."""
    topic_id: UUID = NO_TOPIC
    """The topic of the positions, if known."""
    env: Env = field(default=SYSTEM, repr=False)

    def save(self, taken: Mapping[int, PartitionCopy]) -> None:
        """Store a snapshot atomically: durable when this returns; on failure the former one stays."""
        number = next_number(self.folder, env=self.env)
        seal(
            snapshot_folder(self.folder, number),
            kind=KIND,
            kind_version=KIND_VERSION,
            cursor=self._cursor({partition: each.next for partition, each in taken.items()}),
            fill=lambda data: self._fill(data, taken),
            verify=self._verify,
            env=self.env,
        )
        self._trim(number)

    def load(self) -> dict[int, tuple[int, SegmentCache]]:
        """Positions and caches of the newest valid snapshot; empty, with a warning, if none is usable. Never raises.

        Without a snapshot all events are replayed, with the same result.
        """
        try:
            return self._loaded()
        except Exception as error:  # noqa: BLE001 - the events are the source of truth
            _LOGGER.warning(
                "The snapshot at %s cannot be used, and all segment events are replayed: %s", self.folder, error
            )
            return {}

    def _loaded(self) -> dict[int, tuple[int, SegmentCache]]:
        snapshot = newest_snapshot(self.folder, env=self.env)
        if snapshot is None:
            _LOGGER.warning("There is no snapshot at %s: all segment events are replayed.", self.folder)
            return {}
        check_kind(snapshot, KIND, KIND_VERSION)
        if snapshot.cursor.log_id != self.topic_id:
            raise InvalidInput(f"it is of topic {snapshot.cursor.log_id} and not of {self.topic_id}")
        data = f"{snapshot.folder}/{DATA}"
        return {
            partition: (position, SegmentCache.from_tables(self._tables(data, partition, slices)))
            for partition, (position, slices) in self._positions(data).items()
        }

    def _cursor(self, positions: Mapping[int, int]) -> Cursor:
        return Cursor(self.topic_id, sum(positions.values()))

    def _fill(self, data: str, taken: Mapping[int, PartitionCopy]) -> None:
        partitions: dict[str, Any] = {}
        for partition, (position, tables) in sorted(taken.items()):
            slices: dict[str, list[int]] = {}
            parts: list[memoryview] = []
            at = 0
            for name, table in tables.items():
                part = _encoded(table)
                slices[name] = [at, len(part)]
                parts.append(part)
                at += len(part)
            self.env.disk.write_new(f"{data}/{_name(partition)}", parts)
            partitions[str(partition)] = {"next": position, "tables": slices}
        fields = {"partition_count": self.count, "partitions": partitions}
        self.env.disk.write_new(f"{data}/{POSITIONS}", [encode_checked(KIND, KIND_VERSION, fields)])

    def _verify(self, data: str) -> Cursor:
        positions = self._positions(data)
        for partition, (_, slices) in positions.items():
            self._tables(data, partition, slices)
        return self._cursor({partition: position for partition, (position, _) in positions.items()})

    def _trim(self, number: int) -> None:
        """Remove older snapshots; what cannot be removed now is removed by the next save."""
        with suppress(StorageError):
            for row in self.env.disk.scan(self.folder):
                if row.is_folder and row.name.isdecimal() and int(row.name) <= number - _KEPT:
                    set_aside(f"{self.folder}/{row.name}", env=self.env)

    def _positions(self, data: str) -> dict[int, tuple[int, dict[str, slice]]]:
        path = f"{data}/{POSITIONS}"
        with damage(path, "Remove the snapshot."):
            fields = decode_checked(self.env.disk.read(path, 0, LARGEST + 1), KIND, KIND_VERSION)
            count = fields["partition_count"]
            found = {
                natural(int(key)): (natural(row["next"]), {name: _place(row["tables"][name]) for name in SCHEMAS})
                for key, row in fields["partitions"].items()
            }
        if count != self.count:
            raise InvalidInput(f"it is of a topic with {count} partitions and not {self.count}")
        return found

    def _tables(self, data: str, partition: int, slices: Mapping[str, slice]) -> dict[str, pa.Table]:
        path = f"{data}/{_name(partition)}"
        held = memoryview(self.env.disk.read(path))
        tables = {}
        for name, place in slices.items():
            found = read_stream(held[place], _LAYOUTS[name], f"The table of {name} in {path}")
            tables[name] = pa.Table.from_batches(found.batches, SCHEMAS[name])
        return tables


def _name(partition: int) -> str:
    return f"{partition:010d}.arrow"


def _encoded(table: pa.Table) -> memoryview:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return memoryview(sink.getvalue())


def _place(bounds: list[int]) -> slice:
    start, length = map(natural, bounds)
    return slice(start, start + length)
