"""Lag of a version 1 queue, for ``strandline lag --format queue-v1``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from strandline.cli.shared import output as show
from strandline.compat.v1.edits import time_of
from strandline.compat.v1.log import QueueLog
from strandline.errors import CursorExpired
from strandline.model.head import MetadataRanges, QueueEntry


@dataclass(frozen=True, slots=True)
class QueueLag:
    """A queue at one moment. It has one consumer and no record counts: the listed batches are its lag.

    ``seconds_behind`` is the age of the oldest batch, None if neither its metadata nor its name has a time.
    """

    url: str
    manifest: str
    first: int
    next: int
    epoch: int
    batches_behind: int
    bytes_behind: int
    seconds_behind: float | None

    def fields(self) -> dict[str, Any]:
        """The fields of ``--json``."""
        return asdict(self)

    def rendered(self) -> RenderableType:
        """The text output."""
        return Text.assemble((f"{self.url}/{self.manifest}", "bold"), f"  {self.line()}")

    def line(self) -> str:
        """The same on one line."""
        if not self.batches_behind:
            return f"batches {self.first:,} to {self.next:,}; the consumer (epoch {self.epoch}) is up to date"
        age = "" if self.seconds_behind is None else f", {show.seconds(self.seconds_behind)}"
        behind = f"{show.counted(self.batches_behind, 'batch', 'batches')} ({show.size(self.bytes_behind)}{age}) behind"
        return f"batches {self.first:,} to {self.next:,}; the consumer (epoch {self.epoch}) is {behind}"


def look_at_queue(queue: QueueLog) -> QueueLag:
    """The current lag of the queue. Its sizes come from a listing: the manifest has none."""
    while True:
        try:
            spans = queue.plan(queue.start())
        except CursorExpired:
            continue  # acknowledged between the two reads
        break
    manifest = queue.manifest()
    now = queue.env.clock.now()
    oldest = _ingested(spans[0].entry) if spans else now
    return QueueLag(
        url=queue.url,
        manifest=queue.manifest_path,
        first=spans[0].first if spans else manifest.next_sequence,
        next=spans[-1].next if spans else manifest.next_sequence,
        epoch=manifest.epoch,
        batches_behind=len(spans),
        bytes_behind=sum(span.size for span in spans),
        seconds_behind=None if oldest is None else max(0.0, round((now - oldest) / 1e6, 3)),
    )


def _ingested(entry: QueueEntry) -> float | None:
    times = MetadataRanges.of(entry.metadata).times
    return min(times) if times else time_of(entry.location)
