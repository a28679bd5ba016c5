"""Workers write the parts of a table transaction: in this process here, on Spark's executors in ``spark``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import pyarrow as pa

from strandline.log.planning import joined, pack
from strandline.log.reading import fetch_in_order
from strandline.model.cursor import Span
from strandline.model.sink import Part, Written


class Workers(Protocol):
    """Where the parts of a range are written."""

    def tasks(self, spans: Sequence[Span]) -> int:
        """How many workers a range is worth."""

    def run(self, parts: Sequence[Part], spans: Sequence[Span], title: str) -> Sequence[Written]:
        """Write all parts of the range of these spans; their reports in the order of the parts.

        Raises the error of the first part that failed. ``title`` describes the range to operators.
        """


def assigned(parts: Sequence[Part], spans: Sequence[Span], tasks: int) -> list[tuple[Part, Sequence[Span]]]:
    """The spans of each part: all of them for a part by keys, its own for a part by offsets."""
    if parts[0].takes == "keys":
        return [(part, spans) for part in parts]
    groups: list[Sequence[Span]] = [*pack(spans, tasks)]
    groups += [[]] * (len(parts) - len(groups))
    return list(zip(parts, groups, strict=True))


def written(part: Part, spans: Sequence[Span]) -> Written:
    """Fetch the spans and write the part, wherever this runs."""
    return part.write(_records(spans))


def _records(spans: Sequence[Span]) -> Iterator[pa.RecordBatch]:
    for _, batches in fetch_in_order(joined(spans)):
        yield from batches
        batches.clear()  # not kept longer than needed


class InProcess:
    """Writes the parts one after the other in this process."""

    def tasks(self, spans: Sequence[Span]) -> int:
        """One: a second one would wait for the first."""
        return 1

    def run(self, parts: Sequence[Part], spans: Sequence[Span], title: str) -> Sequence[Written]:
        """Write all parts here."""
        return [written(part, own) for part, own in assigned(parts, spans, len(parts))]


IN_PROCESS: Final = InProcess()
