"""Workers write the parts of a table transaction: in this process here, on Spark's executors in ``spark``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from strandline.model.cursor import Span
from strandline.model.sink import Part, Written
from strandline.tables.work import assigned, written


class Workers(Protocol):
    """Where the parts of a range are written."""

    def tasks(self, spans: Sequence[Span]) -> int:
        """How many workers a range is worth."""

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
