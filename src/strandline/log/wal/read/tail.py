"""In-memory tail: the newest durable frames, served without disk reads or copies."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import pyarrow as pa

from strandline.formats.arrow.value_page import decode_values
from strandline.log.wal.read.catalog import Located
from strandline.model.head import WriterId

_TAKEN: Final = 64
"""How many frames are looked at in one turn: a plan seldom wants more."""


class Records:
    """The records of a frame, in memory: the same for every reader, and copied for none."""

    __slots__ = ("_batches", "_page", "append", "checksums")

    def __init__(
        self,
        batches: tuple[pa.RecordBatch, ...] | None,
        page: bytes = b"",
        append: tuple[WriterId, int] | None = None,
        checksums: tuple[int, ...] | None = None,
    ) -> None:
        self.checksums = checksums
        self.append = append
        """Whose append they are, and its number; None if nobody numbered it."""
        self._batches = batches
        self._page = page

    def batches(self) -> tuple[pa.RecordBatch, ...]:
        """The records; a page is looked at when the first reader comes, and not by the thread that commits."""
        if self._batches is None:
            self._batches = (decode_values(self._page),)
        return self._batches


class Held(NamedTuple):
    """A frame, and its records if they are in memory."""

    frame: Located
    records: Records | None = None

    @property
    def first(self) -> int:
        """The offset of its first record."""
        return self.frame.first

    @property
    def next(self) -> int:
        """One past the offset of its last record."""
        return self.frame.next

    @property
    def size(self) -> int:
        """The bytes of the frame."""
        return self.frame.size

    @property
    def fingerprint(self) -> int:
        """Tells the frame from every other that could stand at its place."""
        return self.frame.fingerprint


class Tail:
    """The last frames of a log that are durable, without a hole, up to about ``limit`` bytes. Safe in threads."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._firsts: list[int] = []
        self._frames: list[Held] = []
        self._held = 0
        self._lock = threading.Lock()

    def add(self, frames: Sequence[Held]) -> None:
        """Frames have become durable."""
        with self._lock:
            self._firsts += [held.first for held in frames]
            self._frames += frames
            self._held += sum(map(_weight, frames))
            if self._held > self._limit:
                self._shrink()

    def _shrink(self) -> None:
        """Let go of the oldest, a quarter more than need be: removing from the front of a list moves the rest."""
        gone = 0
        while gone < len(self._frames) and self._held > self._limit - self._limit // 4:
            self._held -= _weight(self._frames[gone])
            gone += 1
        del self._firsts[:gone], self._frames[:gone]

    def after_fork(self) -> None:
        """In a child: hold nothing, since who was adding or removing frames may not have got to the end of it."""
        self._lock = threading.Lock()
        self._firsts, self._frames, self._held = [], [], 0

    def begins(self) -> int | None:
        """The first offset that it has; None if it has nothing."""
        with self._lock:
            return self._firsts[0] if self._firsts else None

    def since(self, offset: int) -> Iterator[Held]:
        """The frames with this offset, which it begins at or before, and later ones, as long as it has them."""
        while taken := self.some(offset):
            yield from taken
            offset = taken[-1].next

    def some(self, offset: int) -> list[Held]:
        """The first few of them; none where there is nothing from that offset on."""
        with self._lock:
            at = bisect_right(self._firsts, offset) - 1
            taken = self._frames[at : at + _TAKEN] if at >= 0 else []
        return taken if taken and taken[-1].next > offset else []


def _weight(held: Held) -> int:
    # A frame that is not held costs a little all the same, so that a tail of many small ones ends somewhere.
    return 512 + (held.size if held.records is not None else 0)
