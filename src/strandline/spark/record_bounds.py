"""Bounds of the records that a query reads, by timestamp and key: which spans it can skip, and which rows it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from strandline.model.cursor import DescribedSpan
from strandline.model.records import TIMESTAMP


@dataclass(frozen=True, slots=True)
class RecordBounds:
    """Timestamps in microseconds, from ``since`` up to and without ``before``, and a prefix of keys; None: any."""

    since: int | None = None
    before: int | None = None
    prefix: bytes | None = None

    @property
    def columns(self) -> list[str]:
        """The columns that it needs."""
        times = ["timestamp"] if (self.since, self.before) != (None, None) else []
        return [*times, *([] if self.prefix is None else ["key"])]

    def may_match(self, span: object) -> bool:
        """Whether a span can hold a record within the bounds, by what it says of its records.

        >>> RecordBounds(since=5).may_match("a span of which nothing is known")
        True
        """
        if not self.columns or not isinstance(span, DescribedSpan):
            return True
        known = span.record_range()
        if self.since is not None and known.newest is not None and known.newest < self.since:
            return False
        if self.before is not None and known.oldest is not None and known.oldest >= self.before:
            return False
        prefix = self.prefix
        if not prefix:
            return True
        if known.highest_key is not None and known.highest_key < prefix:
            return False
        return known.lowest_key is None or known.lowest_key[: len(prefix)] <= prefix

    def matching(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The records within the bounds. A record without a key has no prefix."""
        masks: list[Any] = []
        if self.since is not None:
            masks.append(pc.greater_equal(batch.column("timestamp"), pa.scalar(self.since, TIMESTAMP)))
        if self.before is not None:
            masks.append(pc.less(batch.column("timestamp"), pa.scalar(self.before, TIMESTAMP)))
        if self.prefix is not None:
            masks.append(pc.starts_with(batch.column("key"), self.prefix))
        for mask in masks[1:]:
            masks[0] = pc.and_(masks[0], mask)
        return batch.filter(masks[0]) if masks else batch


EVERYTHING: Final = RecordBounds()
