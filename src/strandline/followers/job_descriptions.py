"""Job descriptions for operators: which log goes into which table, and the range of offsets."""

from __future__ import annotations


def job_description(log: object, table: object, since: int, upto: int) -> str:
    """One job of a follower: the names of log and table, and the range. Never an address or an option.

    >>> from types import SimpleNamespace as Named
    >>> job_description(
    ...     Named(url="s3://bucket/orders"), Named(url="s3://bucket/tables/orders", mode="latest"), 0, 1_900_000
    ... )
    'orders → latest, offsets 0–1,900,000'
    >>> job_description(Named(url="wal:///disk/orders/"), Named(table="shop.versions", mode="history"), 5, 9)
    'orders → shop.versions (history), offsets 5–9'
    """  # noqa: RUF002 - a range
    return f"{pipeline_name(log, table)}, offsets {since:,}–{upto:,}"  # noqa: RUF001 - a range


def pipeline_name(log: object, table: object) -> str:
    """The names of log and table: the last part of each address, and the kind of table."""
    source, target = _name(log), _name(table)
    kind = str(getattr(table, "mode", "") or type(table).__name__)
    place = kind if target in ("", source) else f"{target} ({kind})"
    return f"{source or 'log'} → {place}"


def _name(thing: object) -> str:
    address = getattr(thing, "url", None) or getattr(thing, "table", None)
    return address.rstrip("/").rpartition("/")[2] if isinstance(address, str) else ""
