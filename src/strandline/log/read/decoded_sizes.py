"""Estimates of what the records of spans take in memory: a listing knows their number and stored bytes only.

Repetitive records are stored in a hundredth of their bytes, so that stored bytes bound no memory. The estimate is
learned from what was read last, by bytes per record and per stored byte; the higher one counts. It bounds commits, what
is fetched ahead, and how much of a node's log is read in one call.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, final

import pyarrow as pa

from strandline.errors import StrandlineError
from strandline.log.read.planning import divided_spans
from strandline.model.cursor import Span

_DENSEST: Final = 1024
"""Bytes in memory of a stored byte, as long as nothing was read."""


class Fetchable(Protocol):
    """Something to fetch: a span of a plan, or a batch of a queue, which may not know its offsets."""

    @property
    def size(self) -> int:
        """The stored bytes to read for it; 0 if unknown."""

    def fetch(self, columns: Sequence[str] | None = None) -> list[pa.RecordBatch]:
        """Read it; may block."""


F = TypeVar("F", bound=Fetchable)


@final
@dataclass(slots=True)
class DecodedSizes:
    """Estimates the bytes of records in memory. Used by one thread."""

    _per_record: float = 0.0
    _per_byte: float = 0.0
    """0: nothing was read yet."""

    def of(self, span: Fetchable) -> int:
        """About how many bytes its records take in memory; the stored bytes at least."""
        learned = max(self._per_byte * span.size, self._per_record * _listed(span))
        return max(span.size, int(learned))

    def total(self, spans: Iterable[Fetchable]) -> int:
        """About how many bytes their records take together."""
        return sum(map(self.of, spans))

    def fit(self, spans: Sequence[Fetchable], most: int) -> bool:
        """Whether their records take up to this many bytes; before anything was learned, whether they surely do."""
        return self.total(spans) <= (most if self._per_record else most // _DENSEST)

    def learn(self, spans: Sequence[Fetchable], records: int, decoded: int) -> None:
        """Learn from spans of which ``records`` were read, each perhaps several times, in ``decoded`` bytes.

        A lower estimate than before is their geometric mean: records of another kind may come again, and a few commits
        after huge values small ones are not taken for huge.
        """
        stored, listed = sum(span.size for span in spans), sum(map(_listed, spans))
        if not records:
            return
        per_record = decoded / records
        self._per_record = _updated(self._per_record, per_record)
        if stored:
            self._per_byte = _updated(self._per_byte, per_record * listed / stored)

    def fetched(self, span: F, batches: list[pa.RecordBatch]) -> tuple[F, list[pa.RecordBatch]]:
        """Learn from a span that was read; both are given back."""
        self.learn([span], _listed(span), sum(batch.nbytes for batch in batches))
        return span, batches

    def within(self, spans: Sequence[Span], most: int | None) -> Sequence[Span]:
        """The first of these spans, up to this many bytes in memory, but at least one.

        Before anything was learned, the densest of them is read here.
        """
        if most is None or len(spans) < 2:  # noqa: PLR2004 - one span is not divided
            return spans
        if not self._per_record:
            densest = max(spans, key=lambda span: _listed(span) / max(1, span.size))
            # What is damaged, was moved meanwhile or does not fit is found by whoever reads all of it.
            with contextlib.suppress(StrandlineError, MemoryError):
                part = next(iter(divided_spans([densest])))
                self.fetched(part, part.fetch())
        size = 0
        for number, span in enumerate(spans):
            size += self.of(span)
            if number and size > most:
                return spans[:number]
        return spans


def _listed(span: Any) -> int:
    """How many records a span has by its listing; 1 for what does not know its offsets, such as a batch of a queue."""
    return getattr(span, "next", 1) - getattr(span, "first", 0)


def _updated(before: float, now: float) -> float:
    return max(now, math.sqrt(before * now))
