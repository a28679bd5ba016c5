"""Erasure of personal data: purges are found in the log, and the values that they erase in segments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, final

import pyarrow as pa
import pyarrow.compute as pc

from strandline.log.read.erased_records import ERASED_COLUMNS
from strandline.model.cursor import Span
from strandline.model.records import Op
from strandline.tier.copy.segment_files import ColdSpan

_PURGE: Final = Op.PURGE.value


@final
@dataclass(frozen=True, slots=True)
class PurgedKeys:
    """Keys that were purged, each with the offset of its latest purge: earlier values are to be erased."""

    keys: pa.Array = field(default_factory=lambda: pa.array([], pa.binary()))
    upto: pa.Array = field(default_factory=lambda: pa.array([], pa.int64()))

    def __len__(self) -> int:
        return len(self.keys)

    def hits(self, batch: pa.RecordBatch) -> pa.BooleanArray | None:
        """Which records of a batch are to be erased; None if none are. Needs offsets, operations and keys.

        Without values and headers, all earlier purges are among them: they may have such.
        """
        if not len(self.keys):
            return None
        upto = pc.take(self.upto, pc.index_in(batch.column("key"), value_set=self.keys))
        is_hit = pc.and_(pc.less(batch.column("offset"), upto), _has_something(batch))
        return is_hit.fill_null(False) if pc.any(is_hit).as_py() else None

    def may_hit(self, smallest: bytes, largest: bytes) -> bool:
        """Whether one of the keys is within bounds, which are inclusive."""
        within = pc.and_(pc.greater_equal(self.keys, smallest), pc.less_equal(self.keys, largest))
        return bool(pc.any(within).as_py())


def _has_something(batch: pa.RecordBatch) -> pa.BooleanArray:
    """Which records are no purges yet, or have a value or headers."""
    found = pc.not_equal(batch.column("op"), _PURGE)
    for name in ERASED_COLUMNS:
        found = pc.or_(found, pc.is_valid(batch.column(name)) if name in batch.schema.names else True)
    return found


def purges_in(spans: Iterable[Span]) -> PurgedKeys:
    """The purged keys of some spans, each with the offset of its last purge; reads only row groups that have one."""
    found = []
    for span in spans:
        if isinstance(span, ColdSpan) and not _may_purge(span):
            continue
        for batch in span.fetch(["offset", "op", "key"]):
            is_purge = pc.and_(pc.equal(batch.column("op"), _PURGE), pc.is_valid(batch.column("key")))
            purges = batch.filter(is_purge)
            if purges.num_rows:
                found.append(PurgedKeys(purges.column("key"), purges.column("offset")))
    return latest_purges(found)


def latest_purges(found: Iterable[PurgedKeys]) -> PurgedKeys:
    """All of them together, with the latest purge of each key."""
    parts = [part for part in found if len(part)]
    if not parts:
        return PurgedKeys()
    table = pa.table(
        {
            "key": pa.chunked_array([part.keys.cast(pa.binary()) for part in parts]),
            "upto": pa.chunked_array([part.upto.cast(pa.int64()) for part in parts]),
        }
    )
    newest = table.group_by("key").aggregate([("upto", "max")])
    return PurgedKeys(newest.column("key").combine_chunks(), newest.column("upto_max").combine_chunks())


def _may_purge(span: ColdSpan) -> bool:
    ops = span.tail().statistics(span.group, "op")
    return ops is None or ops[1] >= _PURGE
