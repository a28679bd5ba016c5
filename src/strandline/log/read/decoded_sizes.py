"""Estimates of what the records of spans take in memory: a listing knows their number and stored bytes only.

Repetitive records are stored in a hundredth of their bytes, so that stored bytes bound no memory. The estimate is
learned from what was read last, by bytes per record and per stored byte; the higher one counts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from strandline.errors import StrandlineError
from strandline.log.read.reading import divided_spans
from strandline.model.cursor import Span


@final
@dataclass(slots=True)
class DecodedSizes:
    """Estimates the bytes of records in memory. Used by one thread."""

    _per_record: float = 0.0
    _per_byte: float = 0.0
    """0: nothing was read yet."""

    def of(self, span: Span) -> int:
        """About how many bytes its records take in memory; the stored bytes at least."""
        learned = max(self._per_byte * span.size, self._per_record * (span.next - span.first))
        return max(span.size, int(learned))

    def total(self, spans: Sequence[Span]) -> int:
        """About how many bytes their records take together."""
        return sum(map(self.of, spans))

    def learn(self, spans: Sequence[Span], records: int, decoded: int) -> None:
        """Learn from spans of which ``records`` were read, each perhaps several times, in ``decoded`` bytes.

        A lower estimate than before is their geometric mean: records of another kind may come again, and a few commits
        after huge values small ones are not taken for huge.
        """
        stored, listed = sum(span.size for span in spans), sum(span.next - span.first for span in spans)
        if not stored or not records:
            return
        per_record = decoded / records
        self._per_byte = _updated(self._per_byte, per_record * listed / stored)
        self._per_record = _updated(self._per_record, per_record)

    def within(self, spans: Sequence[Span], most: int | None) -> Sequence[Span]:
        """The first of these spans, up to this many bytes in memory, but at least one.

        Before anything was learned, the densest of them is read here.
        """
        if most is None or len(spans) < 2:  # noqa: PLR2004 - one span is not divided
            return spans
        if not self._per_byte:
            self._measure(max(spans, key=lambda span: (span.next - span.first) / max(1, span.size)))
        size = 0
        for number, span in enumerate(spans):
            size += self.of(span)
            if number and size > most:
                return spans[:number]
        return spans

    def _measure(self, span: Span) -> None:
        # What is damaged, was moved meanwhile or does not fit is found by whoever reads all of it.
        with contextlib.suppress(StrandlineError, MemoryError):
            part = next(iter(divided_spans([span])))
            batches = part.fetch()
            self.learn([part], sum(batch.num_rows for batch in batches), sum(batch.nbytes for batch in batches))


def _updated(before: float, now: float) -> float:
    return max(now, math.sqrt(before * now))
