"""The task of a worker, in a thread or on an executor: fetch the spans of its part, and write it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import pyarrow as pa

from strandline.log.contract import Log
from strandline.log.read.planning import behind, divided, joined
from strandline.log.read.reading import fetch_in_order
from strandline.model.cursor import Cursor, Limit, Span
from strandline.model.sink import Part, Written


def assigned(parts: Sequence[Part], spans: Sequence[Span]) -> list[tuple[Part, Sequence[Span]]]:
    """The spans of each part: all of them for a part by keys, its own for a part by offsets."""
    if parts[0].takes == "keys":
        return [(part, spans) for part in parts]
    return list(zip(parts, divided(spans, len(parts)), strict=True))


def is_shuffled(parts: Sequence[Part]) -> bool:
    """Whether there are too many parts by keys for each to fetch all records: their rows are shuffled."""
    return parts[0].takes == "keys" and len(parts) > parts[0].most_refetched


def written(part: Part, spans: Sequence[Span]) -> Written:
    """Fetch the spans and write the part, wherever this runs."""
    return part.write(records_of(spans))


def records_of(spans: Sequence[Span]) -> Iterator[pa.RecordBatch]:
    """The records of some spans, in order, fetched ahead."""
    for _, batches in fetch_in_order(joined(spans)):
        yield from batches
        batches.clear()  # not kept longer than needed


class Workers(Protocol):
    """A pool of workers that writes the parts of a range."""

    def tasks(self, spans: Sequence[Span]) -> int:
        """Number of workers for a range."""

    def run(self, parts: Sequence[Part], spans: Sequence[Span], title: str) -> Sequence[Written]:
        """Write all parts of the range of these spans; their reports in the order of the parts.

        Raises the error of the first part that failed. ``title`` describes the range to operators.
        """


class InProcess:
    """Writes the parts one after the other in this process."""

    def tasks(self, spans: Sequence[Span]) -> int:
        """One: a second one would wait for the first."""
        return 1

    def run(self, parts: Sequence[Part], spans: Sequence[Span], title: str) -> Sequence[Written]:
        """Write all parts here."""
        return [written(part, own) for part, own in assigned(parts, spans)]


IN_PROCESS: Final = InProcess()


def rebuilt_by(
    log: Log,
    start: int,
    upto: int,
    rebuild: Callable[[Cursor, Callable[[Sequence[Part]], Sequence[Written]], int], None],
    workers: Workers | None = None,
) -> Cursor:
    """Plan the log from a table's start on, and let ``rebuild`` write it by the workers; returns the cursor."""
    beginning = log.cursor_at(start)
    spans = log.plan(beginning, Limit(upto=upto))
    end = behind(beginning, spans[-1]) if spans else beginning
    hands = workers or IN_PROCESS
    rebuild(
        end, lambda parts: hands.run(parts, spans, f"rebuild of offsets {start:,} to {end.next:,}"), hands.tasks(spans)
    )
    return end
