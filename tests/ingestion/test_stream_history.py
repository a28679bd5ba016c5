"""A stream that was created again is another history, also where no ingested message is left in it."""

from __future__ import annotations

from uuid import UUID

import pytest

import strandline as sl
from strandline.errors import CursorExpired, Diverged
from strandline.ingestion.streams import MessageStream, Taken, message_batch
from strandline.log.memory import MemoryLog
from strandline.log.read.reading import Arrival, wait_for_more
from strandline.model.cursor import Bounds, Cursor
from strandline.storage.clock import CLOCK
from strandline.storage.env import SYSTEM


class Stream(MessageStream):
    """Messages from a position on; an ingest opens it anew."""

    name, _clock = "Stream orders", CLOCK

    def __init__(self, created: str, first: int, values: list[bytes]) -> None:
        super().__init__()
        self.created, self.first, self.values = created, first, values

    @property
    def log_id(self) -> UUID:
        return UUID(int=7)

    def bounds(self) -> Bounds:
        return Bounds(self.first, self.first + len(self.values))

    def incarnation(self) -> str:
        return self.created

    def take(self, since: int, *, upto: int, records: int, size: int) -> Taken:
        upto = min(upto, since + records)
        values = self.values[since - self.first : upto - self.first]
        count = len(values)
        columns = {"offset": [*range(since, upto)], "timestamp": [0] * count, "op": [0] * count, "key": [None] * count}
        batch = message_batch({**columns, "value": values, "headers": [None] * count})
        return Taken(batch, upto, f"{upto - 1}/{values[-1].decode()}")

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("first", [3, 4], ids=["right behind", "later"])
@pytest.mark.parametrize("skip", [False, True])
def test_a_stream_that_was_created_again_is_another_history_where_the_ingested_messages_are_gone(
    first: int, skip: bool
) -> None:
    copy = MemoryLog()
    assert sl.ingest(Stream("monday", 0, [b"0", b"1", b"2"]), copy).records == 3
    with pytest.raises(Diverged):
        sl.ingest(Stream("tuesday", first, [b"other"]), copy, skip_trimmed=skip)
    assert copy.bounds().next == 3


def test_a_stream_that_deleted_what_was_ingested_is_continued() -> None:
    copy = MemoryLog()
    sl.ingest(Stream("monday", 0, [b"0", b"1", b"2"]), copy)
    assert sl.ingest(Stream("monday", 3, [b"3"]), copy).records == 1
    with pytest.raises(CursorExpired, match="begins at offset 5"):
        sl.ingest(Stream("monday", 5, [b"5"]), copy)
    assert sl.ingest(Stream("monday", 5, [b"5"]), copy, skip_trimmed=True).records == 1


def test_a_poll_at_the_end_of_a_stream_asks_it_once() -> None:
    class Asked(Stream):
        asked = 0

        def bounds(self) -> Bounds:
            self.asked += 1
            return super().bounds()

    stream = Asked("monday", 0, [b"0"])
    stream._env = SYSTEM
    assert wait_for_more(stream, stream.end(), 0.0) is Arrival.NOTHING
    once = stream.asked - 1  # without that for the end
    stream.asked = 0
    stream.wait(Cursor(stream.log_id, 1), 0.0)
    assert once == stream.asked == 1
