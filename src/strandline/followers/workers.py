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


def title(log: object, table: object, since: int, upto: int) -> str:
    """What a job does, for operators: the names of log and table, and the range. Never an address or an option.

    >>> from types import SimpleNamespace as Named
    >>> title(Named(url="s3://bucket/orders"), Named(url="s3://bucket/tables/orders", mode="latest"), 0, 1_900_000)
    'orders → latest, offsets 0–1,900,000'
    >>> title(Named(url="wal:///disk/orders/"), Named(table="shop.versions", mode="history"), 5, 9)
    'orders → shop.versions (history), offsets 5–9'
    """  # noqa: RUF002 - a range
    return f"{pipeline_name(log, table)}, offsets {since:,}–{upto:,}"  # noqa: RUF001 - a range


def pipeline_name(log: object, table: object) -> str:
    """The names of log and table: the last parts of their addresses, and what the table keeps."""
    source, target = _name(log), _name(table)
    kind = str(getattr(table, "mode", "") or type(table).__name__)
    place = kind if target in ("", source) else f"{target} ({kind})"
    return f"{source or 'log'} → {place}"


def _name(thing: object) -> str:
    address = getattr(thing, "url", None) or getattr(thing, "table", None)
    return address.rstrip("/").rpartition("/")[2] if isinstance(address, str) else ""


class InProcess:
    """Writes the parts one after the other in this process."""

    def tasks(self, spans: Sequence[Span]) -> int:
        """One: a second one would wait for the first."""
        return 1

    def run(self, parts: Sequence[Part], spans: Sequence[Span], title: str) -> Sequence[Written]:
        """Write all parts here."""
        return [written(part, own) for part, own in assigned(parts, spans)]


IN_PROCESS: Final = InProcess()
